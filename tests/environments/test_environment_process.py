"""Environments in processes: the same episodes as inline, failures with their kind, processes that come back."""

from __future__ import annotations
import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.api import episode_context
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.config.loader import load_config
from areal_lite.config.rules import check_rollouts
from areal_lite.config.run_config import RunConfig
from areal_lite.environments import Step, ToolCall, WrongAction
from areal_lite.environments.environment_agent import EnvironmentAgent
from areal_lite.environments.random_state import OwnRandom
from areal_lite.errors import ConfigError
from areal_lite.processes.call_pool import close_shared_pools, shared_pool
from tests.processes.clock import Clock
from tests.rollout.scripted import on_a_loop

ROW = {"number": 7}


@pytest.fixture(autouse=True, scope="module")
def closed() -> Iterator[None]:
    yield
    close_shared_pools()


def agent(game: str = "Troubled", isolation: str = "process", **options: Any) -> EnvironmentAgent:
    options = {"processes": 1, "timeout_s": 60.0} | options
    return EnvironmentAgent(f"tests.environments.games.{game}", isolation=isolation, **options)


async def play(player: EnvironmentAgent, *actions: Any, seed: int = 3) -> list[Any]:
    """Return what the agent's loop gets from its environment; a WrongAction as itself."""
    own = OwnRandom(seed)
    environment = await player._made(own, seed, player.env)
    try:
        seen: list[Any] = [await player.call("reset", own, environment.reset(ROW, seed))]
        for action in actions:
            try:
                seen.append(await player.call("step", own, environment.step(action)))
            except WrongAction as error:
                seen.append(str(error))
        return [*seen, getattr(environment, "players", 1), getattr(environment, "tools", list)()]
    finally:
        await player.call("close", own, environment.close())


@pytest.mark.parametrize("isolation", ["process", "inline"])
def test_a_process_gives_what_the_environment_gives_inline(isolation: str) -> None:
    call = ToolCall("id", "look", {"a": [1]})
    seen = asyncio.run(play(agent(isolation=isolation, kwargs={"text": "hello"}), [call], "wrong", "end"))
    first, looked, wrong, last, players, tools = seen
    assert (first.messages, first.player) == ([{"role": "user", "content": "hello 7 3"}], 1)
    assert looked == Step([call.result("{'a': [1]}")], player=0)
    assert (wrong, players, tools[0]["function"]["name"]) == ("say something else", 2, "look")
    assert (last.reward, last.truncated, last.done) == ({0: 0.25, 1: 0.5}, True, False)
    assert (last.info["pid"] == os.getpid()) == (isolation == "inline")


def test_a_process_draws_what_the_environment_draws_inline_episode_after_episode() -> None:
    def drawn(isolation: str, seed: int) -> Any:
        first, *steps, _, _ = asyncio.run(play(agent("Dice", isolation), "a", "b", "c", seed=seed))
        return getattr(first, "messages", first), [(step.messages, step.reward, step.done) for step in steps]

    episodes = [drawn("process", seed) for seed in (1, 2, 1)]
    assert episodes == [drawn("inline", seed) for seed in (1, 2, 1)]
    assert episodes[0] != episodes[1]


def test_a_process_draws_tools_from_the_episodes_random_state() -> None:
    names = [asyncio.run(play(agent("DrawsTools", kwargs={"steps": []}), seed=seed))[-1] for seed in (1, 2, 1)]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize(
    ("action", "options", "error", "says"),
    [
        ("crash", {}, RuntimeError, r"env tests.*Troubled: its worker process died \(exit code 3\)"),
        ("raise", {}, KeyError, "broken"),
        ("loop", {"timeout_s": 300.0}, TimeoutError, "step.. of env tests.* took longer than timeout_s 300"),
        ("hang", {"lease_s": 300.0}, RuntimeError, "died .it was lent for lease_s 300, which is over"),
        ("end", {"kwargs": {"closes": False}}, OSError, "cannot close"),
    ],
)
def test_what_breaks_is_a_failure_of_its_kind_and_the_place_comes_back(
    action: str, options: Any, error: Any, says: str, tmp_path: Path
) -> None:
    player, begun = agent(**{"timeout_s": 1000.0} | options), tmp_path / "begun"
    with asyncio.Runner(loop_factory=Clock) as runner:
        clock: Any = runner.get_loop()

        def when_it_hangs() -> None:
            if begun.exists():
                clock.now += 300
            elif not done:
                clock.call_soon(when_it_hangs)

        done: list[bool] = []
        clock.call_soon(when_it_hangs)
        with pytest.raises(error, match=says) as caught:
            runner.run(play(player, f"{action} {begun}"))
        done.append(True)
        assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT
        first, last, *_ = runner.run(play(agent(), "end"))
        assert last.truncated


def test_processes_are_used_again_replaced_after_their_uses_and_ended_when_unused() -> None:
    player, never = agent(uses=2), agent(uses=None)
    close_shared_pools()
    with asyncio.Runner(loop_factory=Clock) as runner:
        clock: Any = runner.get_loop()

        def pid(player: EnvironmentAgent = player, later: float = 0.0) -> Any:
            clock.now += later
            clock.turn()
            return runner.run(play(player, "end"))[1].info["pid"]

        pids = [pid() for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
        assert pid(never) == pid(never) == pid(never) != pids[3]
        kept = pid(never, later=player.idle_s - 1)
        assert pid(never, later=player.idle_s - 1) == kept
        os.kill(kept, signal.SIGKILL)
        while any(slot.is_warm for slot in shared_pool(1)._slots):
            time.sleep(0.01)
        replaced = pid(never)
        assert replaced != kept
        assert pid(never, later=player.idle_s) != replaced


@on_a_loop
async def test_an_episode_waits_for_a_process_without_a_limit() -> None:
    player = agent()
    held = await player._made(OwnRandom(1), 1, player.env)
    player.timeout_s = 0.0
    waiting = asyncio.create_task(player._made(OwnRandom(2), 2, player.env))
    await asyncio.sleep(0)
    assert not waiting.done()
    await held.close()
    await (await waiting).close()


def test_a_process_has_one_order_of_sets_and_the_variables_of_no_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the user's")
    monkeypatch.delenv("PYTHONHASHSEED")

    async def last(key: str) -> Any:
        with AgentAccess(base_url="", anthropic_base_url="", api_key=key, http_client=None).given():
            assert os.environ["OPENAI_API_KEY"] == key
            return (await play(agent(uses=1), "end"))[1].info

    close_shared_pools()
    seen = [asyncio.run(last(key)) for key in ("episode-1", "episode-2", "episode-3")]
    assert {each["key"] for each in seen} == {"the user's"}
    assert len({each["first"] for each in seen}) == 1 < len({each["pid"] for each in seen})


@on_a_loop
async def test_an_environment_that_cannot_be_made_fails_its_episode_and_no_other() -> None:
    player = agent(kwargs={"wrong": 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        await play(player)
    assert (await play(agent(), "end"))[1].truncated


def test_an_episode_in_a_process_has_the_failure_kind_of_environments() -> None:
    async def run() -> None:
        await agent(kwargs={"wrong": 1}).run(ROW, base_url="http://127.0.0.1:1", api_key="k")

    with pytest.raises(TypeError) as caught:
        asyncio.run(run())
    assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT


def other_python(folder: Path, *packages: str) -> Path:
    """Make a virtual environment that finds ``packages``."""
    here, site = Path(sysconfig.get_path("purelib")), folder / f"lib/python3.{sys.version_info.minor}/site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(
        f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = false\n"
    )
    for package in packages:
        (site / package).symlink_to(here / package)
    (site / "elsewhere.py").write_text(
        "import sys\nfrom tests.environments.games import Dice\n"
        "class Where(Dice):\n    async def reset(self, row, seed):\n        self.seen = []\n        return sys.prefix\n"
    )
    return folder / "bin/python"


NEEDED = (
    "numpy",
    "numpy.libs",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions.py",
    "typing_inspection",
)


def test_another_interpreter_plays_with_its_own_packages(tmp_path: Path) -> None:
    python = other_python(tmp_path, *NEEDED)
    player = EnvironmentAgent("elsewhere.Where", isolation=f"python: {python}", processes=1, timeout_s=60.0)
    assert asyncio.run(play(player, "a"))[0].messages == str(tmp_path)


@pytest.mark.parametrize(
    ("isolation", "says"),
    [
        (
            "processes",
            "is 'processes': it is inline, process or python:PATH; an environment on another machine is env: openenv",
        ),
        ("python:", "it is inline, process or python:PATH"),
        ("python:/nowhere/python", "python:/nowhere/python, which cannot play env tests.*No such file"),
    ],
)
def test_an_isolation_that_cannot_be_is_refused_with_the_fix(isolation: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        agent(isolation=isolation)


def test_an_interpreter_without_the_packages_is_refused_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="cannot play env .*No module named 'pydantic'. It needs Python 3.11, numpy, pyd"
    ):
        agent(isolation=f"python:{other_python(tmp_path, 'numpy', 'numpy.libs')}")


def test_environments_in_threads_of_agents_are_refused(load: Any) -> None:
    kind = "rollout.agents.isolation=thread"
    with pytest.raises(
        ConfigError, match=r"isolation is thread, and environments .* set workflow_kwargs.isolation: pr"
    ):
        check_rollouts(load(kind, env="tests.environments.games.Dice"))
    check_rollouts(load(env="tests.environments.games.Dice"))
    check_rollouts(load(kind, workflow="workflows.largest_number.LargestNumberAgent", train_dataset={"path": "x"}))


@pytest.mark.parametrize("kwargs", ["{env: 'mcp:a b'}", "{isolation: process}", "{isolation: 'python:/x'}"])
def test_docker_is_refused_around_environments(kwargs: str) -> None:
    values = [f"workflow_kwargs={kwargs}", "rollout.agents.sandbox=docker:x"]
    config = load_config("configs/on_policy.yaml", values, root=RunConfig)
    with pytest.raises(ConfigError, match="sandbox is docker:x, which is for the programs of an agent alone"):
        check_rollouts(config)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
@pytest.mark.parametrize("isolation", ["process", "python"])
def test_a_sandbox_is_around_an_environment_and_all_that_it_starts(
    isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hidden")
    place = isolation if isolation == "process" else f"python:{other_python(tmp_path, *NEEDED)}"
    access = AgentAccess(base_url="", anthropic_base_url="", api_key="", http_client=None, sandbox="bubblewrap")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = ["bash", "-c", f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}"]
        limits, secrets = (
            ["bash", "-c", "[ $(ulimit -d) = 8388608 ]"],
            ["bash", "-c", "cat /proc/*/environ | grep -q hidden"],
        )
        programs = map(shlex.join, [["true"], ["touch", "tests/escaped"], connect, limits, secrets])

        async def run() -> list[Any]:
            episode_context.enter(EpisodeContext(agent=access))
            return await play(agent("Starts", place), *programs)

        codes = [step.messages for step in asyncio.run(run())[1:-2]]
    assert codes == ["0", "1", "1", "0", "1"] and not Path("tests/escaped").exists()
