"""The loop between model and environment: actions, rewards, ends, failures, seeds."""

from __future__ import annotations
import asyncio
import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
import numpy as np
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletionMessage
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.api import episode_context
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.environments import Step, ToolCall
from areal_lite.environments.environment_agent import EnvironmentAgent, episode_seed, read_action
from areal_lite.environments.random_player import tool_call as draw_call
from areal_lite.errors import ConfigError
from tests.agents.scripted_engine import ScriptedEngine, tokenizer
from tests.environments.games import DrawsTools, Scripted

ROW = {"number": 7}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> InferenceEngineConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return InferenceEngineConfig(tokenizer_path=str(path))


class ChatServer(ThreadingHTTPServer):
    """Another system's server with OpenAI's API."""

    daemon_threads = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ChatHandler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.models: list[str] = []


class ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send({"object": "list", "data": [{"id": "opponent", "object": "model", "created": 0, "owned_by": ""}]})

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.models.append(asked["model"])
        message = {"role": "assistant", "content": f"theirs {len(self.server.models)}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "opponent", "choices": [choice]}
        self._send(answer, self.server.status)

    def _send(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def chat_server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def names() -> list[str]:
    """Return the agents' names in the calls of the episode that :func:`play` played last."""
    return []


@pytest.fixture
def play(config: InferenceEngineConfig, names: list[str]) -> Callable[..., Any]:
    def play(answers: list[str], game: Scripted, **options: Any) -> Any:
        """Return the trajectory, the model's prompts and the counts of one episode."""
        agent = EnvironmentAgent("tests.environments.games.Scripted", kwargs={"steps": []}, **options)
        agent._make = {str(agent.env): lambda: game}
        engine, episode = ScriptedEngine(answers), Episode()

        async def run() -> Any:
            episode_context.enter(EpisodeContext(episode=episode))
            return await AgentWorkflow(agent, config).arun_episode(engine, dict(ROW))  # type: ignore[arg-type]

        made = asyncio.run(run())
        names[:] = [str(request.metadata["agent"]) for request in engine.requests]
        prompts = [tokenizer().decode(list(request.input_ids)) for request in engine.requests]
        return (None if made is None else trajectory_of(made, [])), prompts, episode.counts

    return play


def test_each_answer_has_the_reward_of_its_step(play: Any) -> None:
    game = Scripted([Step("go on", 0.25), Step("and on", 0.0, info={"score": 3}), Step("unread", 0.5, done=True)])
    trajectory, prompts, counts = play(["one", "two", "three"], game, system_prompt="You play.")
    assert [sequence.reward for sequence in trajectory.sequences] == [0.25, 0.0, 0.5]
    assert trajectory.reward == 0.75
    assert "You play." in prompts[0] and "begin" in prompts[0]
    assert "go on" in prompts[1] and "and on" in prompts[2] and prompts[2].startswith(prompts[1])
    assert game.calls[1:] == ["one", "two", "three", "close"]
    assert (counts["environment/turns"], counts["environment/truncated"]) == (3, 0)


def test_the_last_numbers_of_info_become_metrics(play: Any) -> None:
    info = {"won": True, "score": np.int64(2), "text": "x", "worst": float("nan")}
    *_, counts = play(["one"], Scripted([Step(done=True, info=info)]))
    found = {name: value for name, value in counts.items() if name.startswith("environment/")}
    assert found == {
        **{"environment/won": 1.0, "environment/score": 2.0},
        **{"environment/turns": 1, "environment/truncated": 0.0},
    }


@pytest.mark.parametrize(
    ("steps", "max_turns", "answers"),
    [([Step("on", 0.5)] * 9, 2, 2), ([Step("on", 0.5), Step("cut", 0.5, truncated=True)], 30, 2)],
    ids=["our limit", "the environment's"],
)
def test_an_episode_that_is_cut_keeps_its_rewards_and_is_truncated(
    play: Any, steps: Any, max_turns: int, answers: int
) -> None:
    trajectory, prompts, counts = play(["a"] * answers, Scripted(steps), max_turns=max_turns)
    assert (trajectory.reward, len(prompts)) == (1.0, answers)
    assert counts["environment/truncated"] == 1


def test_an_episode_that_ends_at_the_limit_is_not_truncated(play: Any) -> None:
    *_, counts = play(["a"], Scripted([Step(done=True)]), max_turns=1)
    assert counts["environment/truncated"] == 0


def test_a_wrong_action_is_answered_and_the_model_acts_again(play: Any) -> None:
    trajectory, prompts, _ = play(["what", "left"], Scripted(["write left or right", Step(reward=1.0, done=True)]))
    assert "write left or right" in prompts[1]
    assert [sequence.reward for sequence in trajectory.sequences] == [0.0, 1.0]


def test_a_wrong_action_costs_what_is_said(play: Any) -> None:
    game = Scripted(["write left or right", Step(reward=1.0, done=True)], tools=["add"])
    trajectory, *_ = play(["what", tool_call("sub", {}), "left"], game, wrong_action_reward=-0.5)
    assert [sequence.reward for sequence in trajectory.sequences] == [-0.5, -0.5, 1.0]


def tool_call(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"b": 1}, "add needs a"),
        ("sub", {"a": 1}, "there is no tool 'sub'; the tools are add"),
        ("add", [1], "the arguments must be a JSON object"),
    ],
)
def test_wrong_tool_arguments_go_back_as_the_result_of_the_call(
    play: Any, name: str, arguments: Any, says: str
) -> None:
    game = Scripted([Step("4"), Step(reward=1.0, done=True)], tools=["add"])
    trajectory, prompts, _ = play([tool_call(name, arguments), tool_call("add", {"a": 3}), "so 4"], game)
    assert f"<tool_response>\nError: {says}" in prompts[1]
    assert "<tool_response>\n4\n" in prompts[2]
    calls = [action for action in game.calls[1:] if isinstance(action, list)]
    assert [[(call.name, call.arguments) for call in action] for action in calls] == [[("add", {"a": 3})]]
    assert game.calls[-2:] == ["so 4", "close"]
    assert trajectory.reward == 1.0


def test_a_good_call_beside_a_wrong_one_is_made(play: Any) -> None:
    game = Scripted([Step([ToolCall("x", "add", {}).result("7")]), Step(done=True)], tools=["add"])
    _, prompts, _ = play([tool_call("add", {}) + "\n" + tool_call("add", {"a": 1}), "end"], game)
    assert "add needs a" in prompts[1] and "<tool_response>\n7\n" in prompts[1]


@pytest.mark.parametrize("where", ["reset", "step", "close"])
@pytest.mark.parametrize("how", ["", " hangs"], ids=["raises", "hangs"])
def test_what_breaks_in_an_environment_is_a_failure_and_no_reward(play: Any, where: str, how: str) -> None:
    game = Scripted([Step(done=True)], fails_in=where + how)
    with pytest.raises((KeyError, TimeoutError)) as caught:
        play(["a"], game, timeout_s=0.05)
    failure = Failure.of(caught.value)
    assert failure.kind is FailureKind.ENVIRONMENT
    assert game.calls[-1] == "close"
    if how:
        assert failure.message.startswith(f"{where}() of env tests.environments.games.Scripted took longer than")


@pytest.mark.parametrize("step", [("", 1.0), Step(reward=None), Step(player=7)])  # type: ignore[arg-type]
def test_a_step_that_is_none_is_the_environments_failure(play: Any, step: Any) -> None:
    with pytest.raises((AttributeError, TypeError, IndexError)) as caught:
        play(["a"], Scripted([step]))
    assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT


class Mistaken(Scripted):
    """Has a method that is not what the loop awaits."""

    def __init__(self, name: str, method: Any) -> None:
        super().__init__([Step(done=True)])
        setattr(self, name, method)


async def gives(*_: Any) -> Any:
    return {"messages": "x"}


@pytest.mark.parametrize(
    ("name", "method", "says"),
    [
        ("reset", lambda *_: "begin", "^reset() of env .*Scripted is no coroutine: write `async def reset`$"),
        ("step", lambda *_: Step(), "^step() of env .* is no coroutine: write `async def step`$"),
        ("close", lambda *_: None, "^close() of env .* is no coroutine: write `async def close`$"),
        ("reset", gives, r"^reset() of env .* must return a text, messages or an Observation, not {'messages': 'x'}$"),
        ("step", gives, r"^step() of env .* must return a Step, not {'messages': 'x'}$"),
    ],
)
def test_a_method_that_is_not_as_documented_is_named_with_the_fix(play: Any, name: str, method: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says.replace("()", r"\(\)")) as caught:
        play(["a"], Mistaken(name, method))
    assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT


class NoClose:
    reset = step = Scripted.step


class Passes:
    """Hands all calls on."""

    def __getattr__(self, name: str) -> Any:
        return gives


def test_a_class_without_a_method_is_refused_before_it_plays() -> None:
    with pytest.raises(ConfigError, match=r"NoClose has no close\(\): write each as `async def` in its class$"):
        EnvironmentAgent(f"{__name__}.NoClose")
    with pytest.raises(ConfigError, match=r"env .*\.dict has no reset\(\) and no step\(\) and no close\(\): write"):
        EnvironmentAgent("builtins.dict")
    assert EnvironmentAgent(f"{__name__}.Passes")


def test_tools_are_drawn_from_the_episodes_random_state_and_fail_as_the_environment(play: Any) -> None:
    prompts = [play(["a"], DrawsTools([Step(done=True)]))[1] for _ in range(2)]
    assert prompts[0] == prompts[1] and "tool-0." in prompts[0][0]
    with pytest.raises(KeyError) as caught:
        play(["a"], DrawsTools([], fails_in="tools"))
    assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT


def test_each_seat_reads_its_own_conversation_and_one_trains(play: Any) -> None:
    seen = [Step("to 1", player=1), Step("to 0", player=0), Step(reward={0: -1.0, 1: 1.0}, done=True)]
    trained = episode_seed(1, ROW) % 2
    trajectory, prompts, _ = play(["first", "second", "third"], Scripted(seen, players=2))
    assert "to 1" in prompts[1] and "begin" not in prompts[1] and "first" not in prompts[1]
    assert "first" in prompts[2] and "to 0" in prompts[2] and "second" not in prompts[2]
    expected = [[0.0, -1.0], [1.0]][trained]
    assert [sequence.reward for sequence in trajectory.sequences] == expected


def turns_of_two(count: int = 4) -> list[Any]:
    """Return the steps of a game of two in which the seats take turns, and the trained one wins."""
    trained = episode_seed(1, ROW) % 2
    steps = [Step(f"to {turn % 2}", player=turn % 2) for turn in range(1, count)]
    return [*steps, Step(reward={trained: 1.0, 1 - trained: -1.0}, done=True)]


def test_calls_have_the_names_of_their_seats(play: Any, names: list[str]) -> None:
    play(["a", "b", "c", "d"], Scripted(turns_of_two(), players=2))
    assert names == ["seat-0", "seat-1", "seat-0", "seat-1"]
    play(["a"], Scripted([Step(done=True)]))
    assert names == ["main"]


def test_an_older_policy_answers_the_other_seat_by_its_own_name(play: Any, names: list[str]) -> None:
    game = Scripted(turns_of_two(), players=2)
    trajectory, _, _ = play(["a", "b", "c", "d"], game, opponent="older")
    trained = episode_seed(1, ROW) % 2
    assert names[1 - trained :: 2] == [OLDER_POLICY] * 2 and names[trained::2] == [f"seat-{trained}"] * 2
    assert [sequence.reward for sequence in trajectory.sequences] == [0.0, 1.0]


def test_a_random_opponent_takes_its_words_from_what_it_reads(play: Any) -> None:
    played = []
    for _ in range(2):
        game = Scripted(turns_of_two(), players=2)
        trajectory, prompts, counts = play(["mine"] * 2, game, opponent="random")
        played.append([action for action in game.calls[1:-1] if action != "mine"])
        assert len(prompts) == 2
        assert [sequence.reward for sequence in trajectory.sequences] == [0.0, 1.0]
        assert counts["environment/turns"] == 4
    assert played[0] == played[1]  # the seed decides
    assert len(played[0]) == 2
    assert {*played[0]} <= {"begin", "to", "0", "1"}


def test_another_server_plays_by_its_address_and_is_not_recorded(play: Any, chat_server: Any) -> None:
    game = Scripted(turns_of_two(), players=2)
    trajectory, prompts, _ = play(["mine"] * 2, game, opponent=chat_server.url)
    assert [action for action in game.calls[1:-1] if action != "mine"] == ["theirs 1", "theirs 2"]
    assert len(prompts) == 2
    assert [sequence.reward for sequence in trajectory.sequences] == [0.0, 1.0]
    assert chat_server.models == ["opponent"] * 2


def test_an_opponent_that_fails_is_the_environments_failure(play: Any, chat_server: Any) -> None:
    chat_server.status = 400
    with pytest.raises(BadRequestError) as caught:
        play(["mine"] * 2, Scripted(turns_of_two(), players=2), opponent=chat_server.url)
    assert Failure.of(caught.value).kind is FailureKind.ENVIRONMENT


def test_the_row_chooses_among_opponents(play: Any) -> None:
    seen = set()
    for seed in range(20):
        game = Scripted(turns_of_two(), players=2)
        play(["mine"] * 4, game, opponent=["self", "random"], seed=seed)
        seen.add(game.calls[1:-1].count("mine"))
    assert seen == {2, 4}


def test_an_opponent_that_is_none_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="opponent is 'elder': write self, older, random or http://HOST:PORT/v1"):
        EnvironmentAgent("tests.environments.games.Dice", opponent=["self", "elder"])


def test_an_episode_whose_trained_seat_never_acts_is_rejected(play: Any) -> None:
    trained = episode_seed(1, ROW) % 3
    game = Scripted([Step(reward={trained: 1.0}, done=True)], players=3)
    game.reset = lambda row, seed: at_seat((trained + 1) % 3)  # type: ignore[method-assign]
    assert play(["a"], game)[0] is None


async def at_seat(player: int) -> Any:
    from areal_lite.environments import Observation

    return Observation("begin", player)


def test_an_agent_can_be_sent_to_a_process() -> None:
    agent = pickle.loads(pickle.dumps(EnvironmentAgent("tests.environments.games.Dice", kwargs={"turns": 9})))
    assert agent._make[agent.env]().turns == 9


def test_the_seed_follows_from_the_run_and_the_row_alone(play: Any) -> None:
    games = [Scripted([Step(done=True)]) for _ in range(3)]
    for game, seed in zip(games, (1, 1, 2), strict=True):
        play(["a"], game, seed=seed)
    (_, row, first), (_, _, again), (_, _, other) = (game.calls[0] for game in games)
    assert row == ROW
    assert first == again == episode_seed(1, {"number": 7}) != other
    assert len({episode_seed(1, {"number": number}) for number in range(1000)}) == 1000
    assert episode_seed(1, {"a": 1, "b": 2}) == episode_seed(1, {"b": 2, "a": 1}) < 2**31


def test_arguments_nested_too_deep_go_back_to_the_model() -> None:
    message = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "[" * 100_000}}],
        }
    )
    calls, (problem,) = read_action(message, [{"function": {"name": "add"}}])
    assert calls == [] and "the arguments are not JSON" in problem["content"]


@pytest.mark.parametrize(
    "wrong",
    [{"max_turns": "4"}, {"max_turns": None}, {"processes": -1}, {"uses": 0}, {"timeout_s": 0}, {"idle_s": "1h"}],
)
def test_a_setting_that_is_no_number_above_0_is_refused(wrong: Any) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"workflow_kwargs.{name} is {value!r}: it must be a number above 0"):
        EnvironmentAgent("tests.environments.games.Scripted", **wrong)


def test_a_row_has_its_seed_though_it_holds_an_object() -> None:
    assert episode_seed(1, {"image": object()}) == episode_seed(1, {"image": object()})
    assert episode_seed(1, {"image": object()}) != episode_seed(1, {"image": object(), "number": 1})


def test_an_environment_that_is_not_there_is_refused_with_the_fix() -> None:
    for env, says in (
        ("gymnasim:X-v0", r"env is 'gymnasim:X-v0'; did you mean 'gymnasium'\?"),
        ("zzz:X", "the prefixes are gymnasium, harbor, mcp"),
        ("textarena:", "the prefixes are"),
        ("tests.environments.games.Nothing", "has no 'Nothing'"),
    ):
        with pytest.raises(ConfigError, match=says):
            EnvironmentAgent(env)


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, lambda value: type(value) is int),
        ({"oneOf": [{"type": "array", "items": {"type": "boolean"}}]}, lambda value: type(value[0]) is bool),
        ({"type": ["null", "string"]}, lambda value: value is None),
        ({"const": 5}, lambda value: value == 5),
        ({"type": "string", "enum": ["x", "y"]}, lambda value: value in ("x", "y")),
    ],
)
def test_a_drawn_call_fits_its_schema(schema: Any, fits: Any) -> None:
    tool = {"function": {"name": "look", "parameters": {"properties": {"depth": schema}}}}
    assert all(fits(draw_call(tool, random.Random(seed)).arguments["depth"]) for seed in range(20))
