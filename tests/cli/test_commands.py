"""Output and exit code of each command; a stand-in does the work."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
import pytest
from areal_lite.cli.main import main
from areal_lite.cli.stop_signals import task_stacks

CONFIG = """\
experiment_name: exp
model_path: models/tiny
workflow: my.Agent
train_dataset: {path: rows.jsonl}
trainer: {total_steps: 2, learning_rate: 1.0e-5}
"""
# Replaces the modules of areal_lite.runs that load torch.
STAND_IN = """
import contextlib, os, signal, sys, threading, types
from areal_lite import errors
progress = types.ModuleType("areal_lite.tools.run.progress")
run = types.ModuleType("areal_lite.runs.entry_points")

from areal_lite.cli.main import main
from areal_lite.cli import stop_signals

stop_signals.STOP_SECONDS = float(os.environ.get("STOP_SECONDS", "60"))

@contextlib.contextmanager
def no_progress(total_steps):
    yield types.SimpleNamespace(on_step=None, last={{}}, console=types.SimpleNamespace(print=print))

progress.TrainingProgress, progress.summary_table = no_progress, str
progress.server_table = lambda metrics, addresses, started: None

def run_training(config, on_step):
    {body}
    return types.SimpleNamespace(run_dir="runs/exp/trial")

run.run_training = run_training
sys.modules |= {{run.__name__: run, progress.__name__: progress}}
sys.exit(main(["train", "run.yaml", *sys.argv[1:]]))
"""
# On a signal, the main thread stops, refuses, or is stuck in a C call.
WAITS = """
    try:
        print("running", flush=True)
        threading.Event().wait()
    finally:
        print("cleaned up", flush=True)
"""
REFUSES = """
    while True:
        try:
            print("running", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
"""
FINISHES = """
    from areal_lite.runs.stopping import finishing, stopping_signal
    with finishing(lambda: ["step 2", "a checkpoint"]):
        print("running", flush=True)
        while not stopping_signal():
            threading.Event().wait(0.05)
        print("running", flush=True)
        threading.Event().wait()
"""
STUCK = """
    import contextlib, ctypes
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            print("running", flush=True)
            lock(mutex)  # waits forever, and a signal does not interrupt it
"""


@pytest.fixture(autouse=True)
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.delenv("AREAL_LITE_DEBUG", raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def areal_lite(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "areal_lite", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        **settings,
    )


@pytest.fixture
def here(monkeypatch, capsys):
    """Run a command in this process, as if in a terminal of eighty columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        try:
            code = main([*arguments])
        except SystemExit as end:
            code = end.code
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


SHOWN = """\
namespace(run_dir='runs/exp/trial')
written to runs/exp/trial
next: areal-lite view runs/exp/trial
"""


def stand_in(body):
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()
    return [sys.executable, "-c", STAND_IN.format(body=body)]


def run_training_that(body, **settings):
    return subprocess.run(stand_in(body), capture_output=True, text=True, timeout=60, **settings)


def errors_of(done):
    """Return stderr after the first line of a run."""
    return re.sub(r"\A\d\d:\d\d:\d\d train run.ya?ml: loading torch and transformers\n", "", done.stderr)


def test_a_run_says_what_it_does_before_it_loads_anything(tmp_path):
    (tmp_path / "torch.py").write_text("import sys; sys.exit('torch is imported')")
    done = subprocess.run(
        [sys.executable, "-B", "-m", "areal_lite", "train", "run.yaml"],  # a flag: not in a fork that has torch
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    first, *_, last = done.stderr.splitlines()
    assert first.endswith(" train run.yaml: loading torch and transformers")
    assert last == "torch is imported"


def test_only_the_first_rank_prints_the_run_directory():
    for rank, said in [("0", SHOWN), ("1", "")]:
        done = run_training_that("pass", env={**os.environ, "RANK": rank})
        assert (done.returncode, done.stdout, errors_of(done)) == (0, said, "")
        assert bool(done.stderr) == (rank == "0")


def test_config_prints_the_resolved_config():
    done = areal_lite("config", "run.yaml", "rollout.group_size=4", "trial_name=t")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  trial_name: t\n" in done.stdout
    assert "  group_size: 4\n" in done.stdout


def test_config_prints_every_kind_of_config_file():
    Path("other.yaml").write_text(
        "{kind: dpo, experiment_name: exp, model_path: m, train_dataset: {path: rows.jsonl, max_length: 9}, "
        "trainer: {batch_size: 2, learning_rate: 1.0e-5}}"
    )
    done = areal_lite("config", "other.yaml", "trainer.epochs=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kind: dpo\n" in done.stdout
    assert "  epochs: 3\n" in done.stdout
    other = areal_lite("train", "other.yaml")
    assert (other.returncode, other.stdout) == (64, "")
    assert other.stderr.endswith("kind: 'dpo': use the command areal-lite dpo\n")


def test_a_bad_config_ends_with_64_and_one_line_per_error():
    done = areal_lite("train", "run.yaml", "rollout.group_size=0")
    assert done.returncode == 64
    assert errors_of(done) == (
        "error: run.yaml, override 'rollout.group_size=0': rollout.group_size: 0: it must be greater than or equal "
        "to 1. Episodes per dataset row. Group-based advantages compare their rewards.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian", "run.yaml"), "unknown command 'trian'; did you mean 'train'? See areal-lite --help"),
        (("quux",), "unknown command 'quux'. See areal-lite --help"),
        (("train",), "the following arguments are required: CONFIG.yaml"),
        (("train", "run.yml"), "run.yml: no such file; did you mean 'run.yaml'?"),
        (("view", "run.yaml", "--port", "0"), "invalid positive_integer value: '0'"),
        (("view", "nothing"), "nothing: No such file or directory"),
        (("plot", "runs", "--colour", "red"), "unrecognized arguments: --colour"),
        (("train", "run.yaml", "--fast"), "unrecognized arguments: --fast. See"),
        (("train", "run.yaml", "--dry-rum"), "unrecognized arguments: --dry-rum; did you mean '--dry-run'?"),
        (("train", "run.yaml", "--seed=1"), "unrecognized arguments: --seed=1; did you mean 'seed=1'?"),
        (("train", "run.yaml", "--trainer.x", "1"), "--trainer.x; did you mean 'trainer.x=VALUE'?"),
        (("inspect", "runs", "--reward=1"), "unrecognized arguments: --reward=1. See"),
    ],
)
def test_wrong_arguments_end_with_64_and_one_line(arguments, message, here):
    done = here(*arguments)
    assert done.returncode == 64
    assert message in done.stderr
    assert errors_of(done).startswith("error: ")
    assert errors_of(done).count("\n") == 1


@pytest.mark.parametrize(
    ("command", "key"),
    [
        ("train", "trainer.learning_rate  (number > 0; required)\n    Peak learning rate of AdamW."),
        ("config", "checkpoint.resume  (text; default auto)\n    auto resumes from the newest"),
        (
            "sft",
            "trainer.averaging  (token | sequence; default token)\n    Average the loss over trained tokens",
        ),
        ("dpo", "trainer.beta  (number > 0; default 0.1)\n    Strength of the constraint towards"),
        (
            "reward-model",
            "train_dataset.rejected_key  (text; default rejected)\n    Column of the rejected answer.",
        ),
    ],
)
def test_help_of_all_shows_every_config_key_within_eighty_columns(command, key, here):
    done = here(command, "--help", "all")
    assert done.returncode == 0
    assert key in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_areal_lite_alone_shows_the_help(capsys):
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: areal-lite")


def test_help_lists_the_sections_and_shows_the_keys_of_one():
    done = areal_lite("train", "--help", env={**os.environ, "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ntrainer        Optimizer, algorithm and losses. 60 keys.\n" in done.stdout
    assert "learning_rate" not in done.stdout
    assert len(done.stdout.splitlines()) <= 30
    section = areal_lite("train", "-h", "trainer").stdout
    assert "trainer.learning_rate  (number > 0; required)" in section
    assert "rollout." not in section
    outside = areal_lite("train", "--help", "run").stdout
    assert outside.startswith("experiment_name  (text; required)")
    assert "trainer." not in outside
    wrong = areal_lite("train", "--help", "trainr")
    assert (wrong.returncode, wrong.stdout) == (64, "")
    assert wrong.stderr.startswith("error: unknown key 'trainr'; did you mean 'trainer'")


def test_help_on_a_terminal_is_paged(monkeypatch):
    pages = []
    monkeypatch.setattr("pydoc.pager", pages.append)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help", "server"])
    assert caught.value.code == 0
    assert pages[0].startswith("server:\n")


@pytest.mark.parametrize("words", [("--dry-run", "seed=-1"), ("seed=-1", "--dry-run")])
def test_overrides_may_follow_options(words, here):
    done = here("train", "run.yaml", *words)
    assert done.returncode == 64
    assert "override 'seed=-1'" in done.stderr


@pytest.mark.parametrize("arguments", [["config", "run.yaml"], ["train", "--help"]])
def test_a_closed_output_pipe_is_not_an_error(arguments):
    command = [sys.executable, "-m", "areal_lite", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, b"")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "port is '70000': it must be less than or equal to 65535"),
        (("--args", "{a: ["), "--args '{a: [' is not YAML: write {name: value}"),
        (("--backend", "sglang"), "server.backend is sglang, which is not installed"),
    ],
)
def test_serve_checks_its_options_before_anything_starts(options, message, here):
    done = here("serve", "models/tiny", *options)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr.startswith(f"error: {message}")


def test_light_commands_load_no_torch():
    code = (
        "import sys; from areal_lite.cli.main import main; main(['config', 'run.yaml']); "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_help_loads_no_command():
    code = (
        "import sys; from areal_lite.cli.commands import COMMANDS; from areal_lite.cli.main import main\n"
        "heavy = {'pydantic', *('areal_lite.' + command.module for command in COMMANDS.values())}\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_success_exits_with_0():
    done = run_training_that("pass")
    assert (done.returncode, errors_of(done)) == (0, "")
    assert "written to runs/exp/trial" in done.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("ConfigError", 64),
        ("ArealLiteError", 70),
        ("EpisodeError", 70),
        ("TrainingError", 70),
        ("RunDirBusyError", 73),
        ("StorageError", 74),
        ("ServerError", 75),
        ("StarvationError", 70),
        ("CheckpointError", 78),
    ],
)
def test_known_errors_end_with_their_code_and_one_line(error, code):
    done = run_training_that(f"raise errors.{error}('value, rule and fix')")
    assert (done.returncode, errors_of(done)) == (code, "error: value, rule and fix\n")


def test_notes_of_an_error_are_printed_below_it():
    done = run_training_that(
        """
        error = errors.TrainingError('value, rule and fix')
        error.add_note('the last good checkpoint is x')
        raise error
        """
    )
    assert errors_of(done) == "error: value, rule and fix\nerror: the last good checkpoint is x\n"


def test_debug_shows_the_traceback_of_known_errors():
    environment = {**os.environ, "AREAL_LITE_DEBUG": "1"}
    done = run_training_that("raise errors.ServerError('gone')", env=environment)
    assert done.returncode == 75
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("error: gone\n")


@pytest.mark.parametrize("error", ["ZeroDivisionError", "KeyboardInterrupt", "BrokenPipeError"])
def test_an_unexpected_error_ends_with_70_and_its_traceback(error):
    done = run_training_that(f"raise {error}('surprise')")
    assert done.returncode == 70
    assert "Traceback" in done.stderr
    assert f"{error}: surprise" in done.stderr


def test_the_working_directory_is_first_on_the_import_path_and_threads_do_not_spin(tmp_path):
    (tmp_path / "mine.py").write_text("here = True")
    done = run_training_that(
        "import mine; print(sys.path[0] == os.getcwd(), os.environ['OMP_WAIT_POLICY'], os.environ['KMP_BLOCKTIME'])",
        env={**os.environ, "KMP_BLOCKTIME": "7"},
    )
    assert done.stdout.startswith("True PASSIVE 7\n")


@pytest.mark.parametrize(
    ("rollout", "server", "spins"),
    [
        ("{}", "{}", "10000"),
        ("{max_head_offpolicyness: 1}", "{}", None),
        ("{}", "{replicas: 2}", None),
        ("{max_head_offpolicyness: 1, backend: sglang, addresses: [127.0.0.1:1]}", "{}", "10000"),
    ],
    ids=["on-policy", "asynchronous", "two servers", "servers elsewhere"],
)
def test_threads_wait_awake_where_no_other_process_computes_meanwhile(run_file, rollout, server, spins):
    run_file.write_text(f"{CONFIG}\nrollout: {rollout}\nserver: {server}\n")
    without = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    body = "print(os.environ.get('GOMP_SPINCOUNT'))"
    assert run_training_that(body, env=without).stdout.startswith(f"{spins}\n")
    assert run_training_that(body, env={**without, "GOMP_SPINCOUNT": "7"}).stdout.startswith("7\n")


def signalled(body, *numbers, options=()):
    with subprocess.Popen(
        [*stand_in(body), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for number in numbers:
            assert process.stdout.readline() == "running\n"
            process.send_signal(number)
        output, error = process.communicate(timeout=30)
    return process.returncode, output, error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_first_signal_cleans_up_and_exits_with_its_code(number, code):
    *ended, error = signalled(WAITS, number)
    assert ended == [code, "cleaned up\n"]
    assert error.partition(" loading torch and transformers\n")[2] in (
        "stopping; signal again to stop at once\n",
        "",
    )  # it may end before it can say so


def test_a_second_signal_exits_at_once():
    code, _, error = signalled(REFUSES, signal.SIGINT, signal.SIGTERM)
    assert code == 143
    assert error.endswith("signal again to stop at once\nstopped at once, without cleaning up\n")


def test_the_first_signal_says_what_it_waits_for_and_the_second_what_it_skips():
    code, _, error = signalled(FINISHES, signal.SIGINT, signal.SIGTERM)
    assert code == 143
    assert error.partition(" loading torch and transformers\n")[2] == (
        "stopping: waiting for step 2, then a checkpoint; signal again to stop at once\n"
        "stopped at once, without step 2 and a checkpoint\n"
    )


@pytest.mark.parametrize("body", [REFUSES, STUCK])
def test_a_process_that_does_not_stop_is_killed_after_the_grace_period(body, monkeypatch):
    monkeypatch.setenv("STOP_SECONDS", "1")
    code, _, error = signalled(body, signal.SIGTERM)
    assert code == 143
    assert error.endswith("still running after 1 s (-v shows where)\nnot stopped after 1 s: ending here\n")
    assert 'File "' not in error
    shown = signalled(body, signal.SIGTERM, options=["-v"])[2]
    assert "still running after 1 s, here:\n" in shown
    assert "in run_training" in shown


def test_the_stacks_of_all_tasks_are_told_once_per_place_with_the_calls_that_wait():
    async def inner(ready):
        ready.release()
        await asyncio.Event().wait()

    async def outer(ready):
        await inner(ready)

    async def main():
        ready, loop = threading.Semaphore(0), asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        others = [asyncio.run_coroutine_threadsafe(outer(ready), loop) for _ in range(3)]
        for _ in others:
            assert await asyncio.to_thread(ready.acquire, timeout=5)
        try:
            return task_stacks()
        finally:
            for other in others:
                other.cancel()
            loop.call_soon_threadsafe(loop.call_later, 0.05, loop.stop)
            await asyncio.to_thread(thread.join)
            loop.close()

    (stack,) = re.findall(r"^3 x\n((?:  .+\n)+)", asyncio.run(main()), re.MULTILINE)
    names = [re.fullmatch(r"  (\S+) at (\S+):\d+", line).groups() for line in stack.splitlines()]
    assert [name.rpartition(".")[2] for name, _ in names] == ["outer", "inner", "wait"]
    assert [file == __file__ for _, file in names] == [True, True, False]


def test_config_explains_a_key_a_section_and_a_last_part():
    done = areal_lite("config", "--explain", "rollout.group_size")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rollout.group_size  (integer >= 1; default 1)\n    Episodes per dataset row.")
    section = areal_lite("config", "--explain", "checkpoint").stdout
    assert section.startswith("checkpoint:\n    Checkpoints and resuming.\ncheckpoint.every_minutes")
    assert "rollout." not in section
    supervised = areal_lite("config", "--explain", "max_length").stdout
    assert "train_dataset.max_length  (integer >= 2; required)" in supervised
    file = str(Path(__file__).parents[2] / "configs/sft.yaml")
    value = areal_lite("config", file, "seed=${trainer.batch_size}", "--explain", "seed").stdout
    assert value.startswith("seed  (integer")
    assert f"value 8  ({file}, override 'seed=${{trainer.batch_size}}', from" in value
    unknown = areal_lite("config", "--explain", "rollout.grup_size")
    assert (unknown.returncode, unknown.stdout) == (64, "")
    assert "error: unknown key 'rollout.grup_size'; did you mean 'rollout.group_size'" in unknown.stderr


def test_the_command_has_the_same_order_of_sets_in_every_process() -> None:
    def hashes(**seed: str) -> list[str]:
        code = "print(hash('a'), flush=True); from areal_lite.__main__ import main; main()"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"} | seed
        words = [sys.executable, "-c", code, "--version"]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout.split()[:-1]

    (first, same, *name), (other, again, *_) = hashes(), hashes()
    assert first != other and same == again and name == ["areal-lite"]
    assert len(hashes(PYTHONHASHSEED="7")) == 2
