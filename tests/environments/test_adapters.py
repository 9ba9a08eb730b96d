"""Each adapter against its library, a server of its protocol, or a program: text in, text out, rewards, ends."""

from __future__ import annotations
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import aiohttp.web
import pytest
from aiohttp.test_utils import TestServer
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.api import episode_context
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.environments import Step, ToolCall, WrongAction
from areal_lite.environments.catalog import environment_maker, rows
from areal_lite.environments.environment import Observation
from areal_lite.errors import ConfigError

CALCULATOR = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("calculator")
@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
@server.tool()
def die() -> None:
    import os
    os._exit(3)
server.run("stdio")
'''


WRITER = '''
from mcp.server.mcpserver import MCPServer
server = MCPServer("writer")
@server.tool()
def write() -> str:
    """Write a file."""
    open("written", "w").close()
    return "done"
server.run("stdio")
'''


async def play(environment: Any, *actions: Any, row: Any = None, seed: int = 3) -> list[Any]:
    """Return what reset and each action gave; a WrongAction as itself."""
    try:
        seen = [await environment.reset(row or {}, seed)]
        for action in actions:
            try:
                seen.append(await environment.step(action))
            except WrongAction as error:
                seen.append(error)
        return seen
    finally:
        await environment.close()


def run(env: str, *actions: Any, kwargs: Any = None, **options: Any) -> list[Any]:
    return asyncio.run(play(environment_maker(env, kwargs or {})(), *actions, **options))


def test_gymnasium_draws_its_text_and_takes_names_or_numbers() -> None:
    pytest.importorskip("gymnasium")
    first, moved, wrong, last = run("gymnasium:FrozenLake-v1", "so: down", "??", "left or 2", kwargs={"is_slippery": 0})
    assert "left, down, right, up" in first
    assert isinstance(wrong, WrongAction) and "left, down, right, up" in str(wrong)
    assert not moved.done and (last.reward, last.truncated) == (0.0, False)
    begin = run("gymnasium:FrozenLake-v1")[0]
    assert begin.startswith("[S]FFF\nFHFH\n")


def test_gymnasium_spaces_of_numbers_take_a_json_list() -> None:
    pytest.importorskip("gymnasium")
    first, moved, wrong = run("gymnasium:Pendulum-v1", "I push [0.5]", "[9.0]")
    assert "a JSON list of 1 number, from -2 to 2" in first
    assert moved.reward < 0 and isinstance(wrong, WrongAction)


def test_gymnasium_takes_several_choices_as_a_json_list() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Dials(gymnasium.Env):  # type: ignore[misc]
        action_space = gymnasium.spaces.MultiDiscrete([3, 4])
        observation_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            return 0, {}

        def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
            return 1, float(list(action) == [2, 3]), True, False, {}

    gymnasium.register("Dials-v0", entry_point=Dials)
    try:
        _, right = run("gymnasium:Dials-v0", "[2, 3]")
        _, wrong = run("gymnasium:Dials-v0", "2")
    finally:
        del gymnasium.registry["Dials-v0"]
    assert right.reward == 1 and isinstance(wrong, WrongAction)


def test_gymnasium_refuses_a_step_after_the_end_until_it_is_reset() -> None:
    pytest.importorskip("gymnasium")

    async def go() -> None:
        game: Any = environment_maker("gymnasium:CartPole-v1", {})()
        for _ in range(2):
            await game.reset({}, 3)
            while not (await game.step("left")).done:
                pass
            with pytest.raises(RuntimeError, match="step after the end"):
                await game.step("left")

    asyncio.run(go())


def test_gymnasium_asks_functions_of_the_users() -> None:
    pytest.importorskip("gymnasium")
    functions = {"to_text": "tests.environments.games.shout", "to_action": "tests.environments.games.always_down"}
    first, moved = run("gymnasium:FrozenLake-v1", "anything", kwargs=functions)
    assert first.startswith("AT 0!") and moved.messages.startswith("AT ")


def test_minigrid_shows_what_the_player_sees_in_words() -> None:
    pytest.importorskip("minigrid")
    first, moved = run("gymnasium:MiniGrid-DoorKey-5x5-v0", "turn left")
    assert first.startswith("Mission: use the key to open the door")
    assert "yellow key" in first and "left, right, forward, pickup" in first
    facing = ["(east)", "(south)", "(west)", "(north)"]
    before, after = ([place for place in facing if place in text] for text in (first, moved.messages))
    assert after == [facing[facing.index(before[0]) - 1]]
    assert first.splitlines()[8].split(" | ")[3] == "."  # where the player stands: the middle of the last line


def test_unknown_names_say_what_there_is() -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match="env gymnasium:FrozenLak-v1: .*FrozenLake"):
        rows("gymnasium:FrozenLak-v1", {})
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match="no game 'KuhnPokr-v0'; did you mean 'KuhnPoker-v0'"):
        environment_maker("textarena:KuhnPokr-v0", {})


def test_textarena_tells_each_player_what_is_new_and_rewards_all_at_the_end() -> None:
    pytest.importorskip("textarena")
    environment = environment_maker("textarena:TicTacToe-v0", {})()
    first, *steps = asyncio.run(play(environment, *(f"<think>[8]</think>[{cell}]" for cell in (0, 3, 1, 4, 2))))
    assert environment.players == 2  # type: ignore[attr-defined]
    assert isinstance(first, Observation) and "Tic Tac Toe" in first.messages
    other = 1 - first.player
    assert [step.player for step in steps[:2]] == [other, first.player]
    assert "[0]" in steps[0].messages and "Tic Tac Toe" not in steps[1].messages
    assert steps[-1] == Step(reward={first.player: 1, other: -1}, done=True)


def test_a_reasoning_gym_answer_is_scored_and_the_solution_has_full_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("areal_lite.environments.adapters.reasoning_gym")
    monkeypatch.setattr(module, "_scorer", lambda timeout_s: AsyncRewardWrapper(module.score, in_process=True))
    row = rows("reasoning-gym:chain_sum", {"size": 1, "seed": 4})[0]
    environment: Any = environment_maker("reasoning-gym:chain_sum", {"instruction": "A number only."})()
    seen, step = asyncio.run(play(environment, environment.solution(row), row=row))
    assert seen == f"{row['question']}\n\nA number only." and step == Step(reward=1.0, done=True)


def test_scienceworld_begins_by_seed_and_gives_points_as_they_come() -> None:
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    actions = "<think>hm</think> open door to hallway", "look around", "focus on agent"
    first, *steps = run("scienceworld:find-animal", *actions, row={"number": 7})
    assert "focus on" in first and "Reply with one action" in first
    assert "The door is already open" in steps[0].messages and "You also see" in steps[1].messages
    # Looking around has found the first room already; the wrong thing in focus loses at once.
    assert [(step.reward, step.done) for step in steps] == [(0.08, False), (0.0, False), (-1.08, True)]
    assert run("scienceworld:find-animal", *actions, row={"number": 7}) == [first, *steps]
    seeds = {run("scienceworld:find-animal", row={"number": 7}, seed=seed)[0] for seed in range(4)}
    assert len(seeds) > 1
    with pytest.raises(ConfigError, match="did you mean 'boil'"):
        environment_maker("scienceworld:boill", {})


def test_scienceworlds_side_by_side_are_as_alone_and_their_simulators_serve_again() -> None:
    pytest.importorskip("scienceworld")
    if shutil.which("java") is None:
        pytest.skip("Java is not installed")
    from areal_lite.environments.adapters.scienceworld import ScienceWorldTask

    games = [
        ("scienceworld:boil", ("look around", "wait", "inventory"), 1),
        ("scienceworld:find-plant", ("open door to hallway", "wait", "look around"), 2),
    ]
    alone = [run(env, *actions, row={"number": 0}, seed=seed) for env, actions, seed in games]

    async def both() -> list[list[Any]]:
        made = [
            play(environment_maker(env, {})(), *actions, row={"number": 0}, seed=seed) for env, actions, seed in games
        ]
        return list(await asyncio.gather(*made))

    assert asyncio.run(both()) == alone
    assert len(ScienceWorldTask._idle) == 2  # as many as were played at once


def test_skyrl_gym_gives_its_messages_and_turn_rewards() -> None:
    pytest.importorskip("skyrl_gym")
    row = {"prompt": "1+2?", "reward_spec": {"ground_truth": "3"}, "extra_info": {"max_turns": 2}}
    seen, wrong, right = run("skyrl-gym:gsm8k_multi_turn", "#### 4", "#### 3", row=row)
    assert seen == [{"role": "user", "content": "1+2?"}]
    assert (wrong.reward, wrong.done, wrong.messages[0]["role"]) == (pytest.approx(0.1), False, "user")
    assert (right.reward, right.done) == (1.0, True)


@pytest.fixture
def mcp_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the calculator's command line, or the address at which it runs."""
    pytest.importorskip("mcp")
    program, paths = tmp_path / "calculator.py", ":".join(path for path in sys.path if path)
    program.write_text(CALCULATOR)
    if request.param == "stdio":
        yield f"env PYTHONPATH={paths} {sys.executable} {program}"
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program.write_text(CALCULATOR.replace('"stdio"', f'"streamable-http", host="127.0.0.1", port={port}'))
    process = subprocess.Popen(
        [sys.executable, program], env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr
        for line in process.stderr:
            if "running on" in line:
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


@pytest.mark.parametrize("mcp_server", ["stdio", "http"], indirect=True)
def test_mcp_tools_are_called_until_the_model_answers(mcp_server: str) -> None:
    row = {"prompt": "1+2?", "answer": "3"}

    async def calculate() -> None:
        kwargs = {"reward": lambda answer, row: float(answer == row["answer"])}
        environment: Any = environment_maker(f"mcp:{mcp_server}", kwargs)()
        assert await environment.reset(row, 1) == "1+2?"
        assert environment.tools()[0]["function"]["parameters"]["required"] == ["a", "b"]
        good, bad = ToolCall("x", "add", {"a": 1, "b": 2}), ToolCall("y", "add", {"a": "one"})
        one, other = (await environment.step([good, bad])).messages
        assert one == {"role": "tool", "tool_call_id": "x", "content": "3"}
        assert other["tool_call_id"] == "y" and other["content"].startswith("Error: ")
        assert await environment.step("3") == Step(reward=1.0, done=True)
        with pytest.raises(Exception, match="[Cc]onnection closed|[Tt]imed out|disconnected"):
            await environment.step([ToolCall("z", "die", {})])
        await environment.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(calculate())


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
def test_an_mcp_server_runs_in_the_sandbox_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    (tmp_path / "writer.py").write_text(WRITER)
    monkeypatch.chdir(tmp_path)

    async def write(sandbox: str) -> str:
        access = AgentAccess(base_url="", anthropic_base_url="", api_key="", http_client=None, sandbox=sandbox)
        episode_context.enter(EpisodeContext(agent=access))
        command = f"mcp:env PYTHONPATH={':'.join(filter(None, sys.path))} {sys.executable} writer.py"
        _, wrote = await play(
            environment_maker(command, {"reward": print})(), [ToolCall("x", "write", {})], row={"prompt": "?"}
        )
        return str(wrote.messages[0]["content"])

    assert asyncio.run(write("bubblewrap")).startswith("Error") and not Path("written").exists()
    assert asyncio.run(write("none")) == "done" and Path("written").exists()


def test_an_mcp_server_that_does_not_start_fails_the_reset_and_one_without_reward_is_refused() -> None:
    pytest.importorskip("mcp")
    with pytest.raises(FileNotFoundError):
        run("mcp:/no/such/program", kwargs={"reward": print}, row={"prompt": "x"})
    with pytest.raises(ValueError, match="No closing quotation"):
        run("mcp:python server.py --name 'x", kwargs={"reward": print}, row={"prompt": "x"})
    with pytest.raises(ConfigError, match="has no reward: name a function of answer and row"):
        environment_maker("mcp:/no/such/program", {})()
    with pytest.raises(ConfigError, match="tools and no rows: set train_dataset.path"):
        rows("mcp:/no/such/program", {})


def test_openenv_sends_the_seed_and_text_or_json_actions() -> None:
    got: list[Any] = []

    async def serve(request: aiohttp.web.Request) -> aiohttp.web.WebSocketResponse:
        socket = aiohttp.web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = message.json()
            got.append(asked)
            data: dict[str, Any] = {"observation": {"text": "seen", "done": False}, "reward": None, "done": False}
            kind = "observation"
            if asked["data"].get("message") == "right":
                data |= {"reward": 1.0, "done": True}
            elif asked["data"].get("message") == "boom":
                kind, data = "error", {"message": "boom", "code": "EXECUTION_ERROR"}
            elif "nope" in asked["data"]:
                kind, data = "error", {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": "no nope"}
            await socket.send_json({"type": kind, "data": data})
        return socket

    async def go() -> None:
        app = aiohttp.web.Application()
        app.router.add_get("/ws", serve)
        async with TestServer(app) as server:
            make = environment_maker(f"openenv:{server.make_url('/')}", {"options": {"level": 2}})
            first, wrong, _, right = await play(make(), '{"nope": 1}', "[" * 100_000, "<think>x</think> right")
            assert first == '{"text": "seen"}'
            assert isinstance(wrong, WrongAction) and "no nope" in str(wrong)
            assert (right.reward, right.done) == (1.0, True)
            assert got[0] == {"type": "reset", "data": {"level": 2, "seed": 3}}
            assert [each["data"] for each in got[2:4]] == [{"message": "[" * 100_000}, {"message": "right"}]
            with pytest.raises(RuntimeError, match=r"refused step: boom \(EXECUTION_ERROR\)"):
                await play(make(), "boom")

    asyncio.run(go())
