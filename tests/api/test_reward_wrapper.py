"""A reward is a finite number, or an exception that says why there is none."""

import asyncio
import gc
import math
import os
import subprocess
import sys
import time
from fractions import Fraction
import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import AsyncRewardWrapper, episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.reward_value import as_reward, read_reward
from areal_lite.errors import ConfigError
from tests import fork_server
from tests.api import reward_samples as samples


def score(function, *args, timeout_seconds=15, max_workers=2, **kwargs):
    return asyncio.run(AsyncRewardWrapper(function, timeout_seconds, max_workers)(*args, **kwargs))


@given(st.one_of(st.floats(-3e38, 3e38), st.integers(-(10**38), 10**38), st.booleans()))
def test_every_finite_real_number_is_a_reward(value):
    assert as_reward(value) == float(value)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.bool_(True), np.int64(3), Fraction(1, 2)])
def test_numpy_scalars_and_fractions_are_rewards(value):
    assert as_reward(value) == float(value)


@given(
    st.one_of(
        st.sampled_from([math.nan, math.inf, -math.inf, None, 1j, 10**400, 1e39, -1e300, np.nan]),
        st.text(),
        st.binary(),
    )
)
def test_anything_else_is_refused_with_its_value(value):
    with pytest.raises(ValueError, match="must be a finite number"):
        as_reward(value)


def test_a_function_gets_prompt_completion_ids_and_row():
    assert score(samples.same, "p", "c", [1], [2], answer="c", question="?") == 1.0


def test_a_function_can_be_named_by_its_dotted_path():
    assert score("tests.api.reward_samples.echo", 2) == 2.0


def test_a_callable_object_keeps_its_state():
    assert score(samples.Threshold(3), 4) == 1.0


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "'1'", "None", "[1]"])
def test_a_value_that_is_not_a_number_raises_and_the_worker_survives(text):
    before = score(samples.process_id, max_workers=1)
    with pytest.raises(ValueError, match="must be a finite number"):
        score(samples.evaluate, text, max_workers=1)
    assert score(samples.process_id, max_workers=1) == before


@pytest.mark.parametrize("answer", ["[0.5, 1, 0]", "(0.5, 1, 0)", "{'score': [0.5, 1, 0], 'acc': 1}"])
def test_a_number_for_each_completion_token_is_a_reward(answer):
    assert score(samples.evaluates_answer, "", answer, [], [7, 8, 9]) == [0.5, 1.0, 0.0]
    with pytest.raises(ValueError, match="is a list of 3 for 2 completion_ids: it must be a finite number, or one"):
        score(samples.evaluates_answer, "", answer, [], [7, 8])


def test_arrays_of_numpy_and_torch_are_lists_of_rewards():
    for array in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])):
        assert read_reward(array) == ([1.0, 2.0], {})


async def judged(prompt, completion, prompt_ids, completion_ids, **row):
    return {"reward": 0.5, "judge": "fair"}


def tells(value):
    return {"score": 1, "acc": True, "pred": "x\ud800", "note": None, "half": np.float32(0.5)}


@pytest.mark.parametrize(("function", "in_process"), [(samples.evaluate, False), (tells, True), (judged, False)])
def test_facts_beside_the_score_go_into_the_episodes_record(function, in_process):
    wrapper = AsyncRewardWrapper(function, in_process=in_process)
    told = "{'score': 1, 'acc': True, 'pred': 'x?', 'note': None, 'half': 0.5}"

    async def call():
        episode = Episode()
        episode_context.enter(EpisodeContext(episode=episode))
        return await wrapper(*(("", "", [], []) if function is judged else (told,))), episode.reward_extra

    facts = {"acc": 1.0, "pred": "x?", "note": None, "half": 0.5}
    assert asyncio.run(call()) == ((0.5, {"judge": "fair"}) if function is judged else (1.0, facts))
    assert score(samples.evaluate, told) == 1.0  # outside an episode they are not kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'acc': 1}", "the reward is a dict of .'acc'.: give the number as 'score'"),
        ("{'score': 1, 'parts': [1]}", "the reward's 'parts' is .1.: beside the score, give numbers and texts"),
        ("{'score': nan}", "must be a finite number"),
        ("[1, inf]", "the reward is inf: it must be a finite number"),
    ],
)
def test_a_dict_or_list_without_a_reward_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        score(samples.evaluate, text)


@pytest.mark.parametrize("function", [samples.endless, samples.endless_in_c])
def test_a_timeout_raises_and_the_next_call_gets_a_new_worker(function):
    before = score(samples.process_id, max_workers=1)
    with pytest.raises(TimeoutError, match=rf"{function.__name__} gave no answer in 0.2 s"):
        score(function, timeout_seconds=0.2, max_workers=1)
    assert score(samples.process_id, max_workers=1) != before


def test_a_timeout_kills_processes_that_the_function_started(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        score(samples.starts_a_child, str(note), timeout_seconds=3)
    try:
        child = psutil.Process(int(note.read_text()))
    except psutil.NoSuchProcess:
        return
    assert child.status() == psutil.STATUS_ZOMBIE or child.wait(10) is None


def test_a_timeout_kills_a_function_that_forks_without_end(tmp_path):
    note = tmp_path / "pid"
    with pytest.raises(TimeoutError):
        score(samples.forks, str(note), timeout_seconds=3)
    left = [each for each in psutil.process_iter() if group_of(each) == int(note.read_text())]
    assert all(has_ended(each.pid) for each in left)


def group_of(process):
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def test_output_without_end_ends_at_the_timeout_and_stays_in_no_memory():
    script = f"""
import asyncio, resource
from areal_lite.api.reward_api import AsyncRewardWrapper
from tests.api import reward_samples
score = lambda function, *given: asyncio.run(AsyncRewardWrapper(function, 1, 1)(*given))
assert score(reward_samples.echo, 1) == 1.0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    score(reward_samples.writes)
except TimeoutError as error:
    assert "writes gave no answer in 1 s" in str(error)
else:
    raise AssertionError("no time-out")
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < {50 * 1024}
"""
    process = subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.returncode == 0, process.stderr.decode()


def test_a_dead_worker_is_a_failure_with_its_exit_code():
    with pytest.raises(RuntimeError, match=r"exits: its worker process died \(exit code 7\)"):
        score(samples.exits)
    assert score(samples.echo, 1) == 1.0


def test_an_exception_is_raised_again_with_its_type_text_and_traceback():
    with pytest.raises(KeyError) as caught:
        score(samples.complains, "no such answer")
    assert caught.value.args == ("no such answer",)
    assert "reward_samples.py" in caught.value.__notes__[0]


def test_sys_exit_in_a_reward_function_does_not_end_the_worker():
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        score(samples.leaves)


def test_exceeding_the_memory_limit_is_a_memory_error():
    limit = max(4 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    with pytest.raises(MemoryError):
        score(samples.allocates, limit + 1)


def test_a_worker_loads_neither_torch_nor_pydantic(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", fork_server.RealPopen)  # a fork has loaded both
    assert score(samples.loaded_modules, max_workers=3) == 0.0  # of no other test


def test_long_arguments_arrive_whole():
    assert score(samples.same, "p" * 3_000_000, "c", list(range(100_000)), [], answer="c") == 1.0


def test_wrappers_with_the_same_number_share_their_workers_over_event_loops():
    assert len({score(samples.process_id, max_workers=1) for _ in range(3)}) == 1


def test_good_calls_succeed_and_bad_ones_say_why_under_mixed_failures():
    limit = max(4 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    good = AsyncRewardWrapper(samples.echo, 15, 2)
    endless = AsyncRewardWrapper(samples.endless, 0.1, 2)
    exits = AsyncRewardWrapper(samples.exits, 15, 2)
    bomb = AsyncRewardWrapper(samples.allocates, 15, 2)
    calls = {0: lambda i: endless(), 20: lambda i: exits(), 30: lambda i: bomb(limit + 1)}

    async def run():
        return await asyncio.gather(*(calls.get(i % 40, good)(i) for i in range(200)), return_exceptions=True)

    ends = asyncio.run(run())
    kinds = {0: TimeoutError, 20: RuntimeError, 30: MemoryError}
    assert all(type(end) is kinds.get(i % 40, float) for i, end in enumerate(ends))
    assert all(end == i for i, end in enumerate(ends) if i % 40 not in kinds)
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    children = [child for child in alive if "call_child" in " ".join(child.cmdline())]
    assert len(children) <= 4  # the two of this pool, the one of pools of one, and the one that loads little


def test_cancelled_calls_stop_at_once_and_keep_the_pool_intact():
    async def run():
        endless, good = AsyncRewardWrapper(samples.endless, 60, 2), AsyncRewardWrapper(samples.echo, 15, 2)
        await asyncio.gather(good(0), good(1))
        with pytest.raises(TimeoutError, match="^$"):  # the caller's own limit, not the reward's
            async with asyncio.timeout(0.2):
                await asyncio.gather(*(endless() for _ in range(5)))
        assert [await good(i) for i in range(3)] == [0, 1, 2]

    asyncio.run(run())


def test_an_async_function_runs_on_the_loop_with_the_same_timeout():
    assert score(samples.judged, 0.25) == 0.25
    assert score(samples.AsyncJudge(), 2) == 2.0
    with pytest.raises(TimeoutError, match=r"judged_late gave no answer in 0.05 s"):
        score(samples.judged_late, timeout_seconds=0.05)
    with pytest.raises(ValueError, match="finite"):
        score(samples.judged, math.nan)


def test_retries_end_with_the_first_success(tmp_path):
    wrapper = AsyncRewardWrapper(samples.fails_until, 15, 2, 2)
    assert asyncio.run(wrapper(str(tmp_path / "two"), 3)) == 1.0
    with pytest.raises(OSError, match="not yet"):
        asyncio.run(wrapper(str(tmp_path / "three"), 4))


def test_a_lambda_is_refused_with_a_hint_and_runs_in_process():
    with pytest.raises(ConfigError, match=r"no importable name.*top of a module.*in_process=True"):
        AsyncRewardWrapper(lambda value: value)
    wrapper = AsyncRewardWrapper(lambda value: value, in_process=True)
    assert asyncio.run(wrapper(3)) == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"timeout_seconds": math.nan}, "timeout_seconds is nan"),
        ({"max_workers": 0}, "max_workers is 0"),
        ({"max_retries": -1}, "max_retries is -1"),
        ({"reward_fn": 3}, "it must be callable|dotted path"),
        ({"reward_fn": "tests.api.reward_samples.ecco"}, "did you mean 'echo'"),
    ],
)
def test_bad_arguments_are_config_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AsyncRewardWrapper(**{"reward_fn": samples.echo, **arguments})


SCRIPT = """
import asyncio, os, sys
from areal_lite.api import AsyncRewardWrapper
def mine(value): return os.getpid()
def forever():
    while True: pass
async def twice(function, *arguments):
    wrapper = AsyncRewardWrapper(function, 60, max_workers=2)
    return await asyncio.gather(wrapper(*arguments), wrapper(*arguments))
if __name__ == "__main__":
    print(*map(int, asyncio.run(twice(mine, 1))), flush=True)
    if "hang" in sys.argv:
        asyncio.run(twice(forever))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return [sys.executable, str(path)]


def has_ended(process_id, within_s=10):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
    return False


def test_a_function_of_the_main_script_works_and_its_workers_exit_with_it(script):
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(has_ended(int(worker)) for worker in done.stdout.split())


def test_busy_workers_exit_if_their_parent_is_killed(script):
    with subprocess.Popen([*script, "hang"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        workers = [psutil.Process(int(word)) for word in process.stdout.readline().split()]
        assert len(set(workers)) == 2
        while not all(worker.cpu_percent(0.05) for worker in workers):
            pass
        process.kill()
    assert all(has_ended(worker.pid) for worker in workers)


def test_no_file_descriptor_leaks():
    score(samples.echo, 1)
    gc.collect()
    before = psutil.Process().num_fds()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            score(samples.exits, max_workers=2)
        score(samples.echo, 1)
    assert psutil.Process().num_fds() <= before


UNGUARDED = """
import asyncio, os, pathlib, sys
from areal_lite.api import AsyncRewardWrapper
with pathlib.Path(sys.argv[1]).open("a") as file: file.write(f"{os.getpid()}\\n")
def mine(value): return 2 * value
reward = AsyncRewardWrapper(mine, max_workers=1)
"""
RUN = "print(asyncio.run(reward(1)))"


def run_script(tmp_path, text):
    """Run the script, and return its result with how often its top level ran."""
    (tmp_path / "script.py").write_text(text)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done, len((tmp_path / "runs").read_text().splitlines())


def test_a_script_without_a_guard_is_refused_with_the_fix_and_not_run_twice(tmp_path):
    done, runs = run_script(tmp_path, f"{UNGUARDED}{RUN}\n")
    assert done.returncode == 1
    assert "ConfigError: reward_fn mine lives in" in done.stderr
    assert "under `if __name__ == '__main__':`" in done.stderr
    assert (runs, done.stdout) == (1, "")


def test_a_guarded_script_is_imported_by_its_worker(tmp_path):
    done, runs = run_script(tmp_path, f"{UNGUARDED}if __name__ == '__main__':\n    {RUN}\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")
    assert runs == 2


@pytest.mark.parametrize("way", ["in_process=True", "async"])
def test_a_script_without_a_guard_may_compute_rewards_in_its_own_process(tmp_path, way):
    changed = ("def mine", "async def mine") if way == "async" else ("max_workers=1", way)
    text = UNGUARDED.replace(*changed)
    done, runs = run_script(tmp_path, f"{text}{RUN}\n")
    assert (done.returncode, done.stdout, runs) == (0, "2.0\n", 1), done.stderr
