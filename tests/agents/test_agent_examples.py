"""Each agent in workflows/agents runs an episode with its real SDK. What works becomes the table in docs/agents.md."""

from __future__ import annotations
import asyncio
import functools
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
import pytest
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.http_transport import ServiceTransport
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.trajectory import Trajectory
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.embedded.grammar import GrammarCompiler
from areal_lite.embedded.sampling_params import SamplingParams
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from tests.agents.scripted_engine import ScriptedEngine, tokenizer
from tests.fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.agents
REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "workflows/agents"
DOCUMENT = REPOSITORY / "docs/agents.md"
BEGIN, END = "<!-- table of agents: begin -->", "<!-- table of agents: end -->"
COLUMNS = ("API", "in process", "by address", "whole", "stream", "tools", "structured", "history exact")
YES = "yes"
NODE = Path(sys.prefix) / "node"
QUESTION = {"question": "What is 17 * 23?", "answer": "391"}
RESULT = '{"result": 391}'
WRONG = '{"result": 400}'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


MULTIPLY = call("multiply", a=17, b=23)


@dataclass(frozen=True, kw_only=True)
class Example:
    """An agent, what its model says, and what it should leave."""

    sdk: str
    path: str
    """Module and class in workflows.agents."""
    answers: list[str]
    wrong: list[str]
    """Answers that earn 0."""
    doors: tuple[str, ...] = ("in process", "by address")
    streams: bool = True
    sequences: int = 1
    row: dict[str, Any] = field(default_factory=lambda: QUESTION)
    arguments: Callable[[], dict[str, Any]] = dict

    def agent(self, *, stream: bool = False) -> Any:
        """Return a new agent; its SDK is imported here."""
        module, _, name = self.path.partition(".")
        arguments = self.arguments() | ({"stream": True} if stream else {})
        return getattr(importlib.import_module(f"workflows.agents.{module}"), name)(**arguments)


def node_script() -> dict[str, Any]:
    if shutil.which("node") is None or not (NODE / "node_modules/openai").exists():
        pytest.skip("no node with npm's openai: install Node.js 20 or newer, then run `make test-agents`")
    script = NODE / "node_agent.mjs"
    shutil.copy(REPOSITORY / "workflows/agents/node_agent.mjs", script)
    return {"script": script}


REPAIR = {
    "question": "double(3) returns 9 and should return 6. Repair double.py.",
    "files": {"double.py": "def double(x):\n    return x * x\n"},
    "test": "import double; assert double.double(3) == 6",
}
SUBMIT = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
SIMPLE = [MULTIPLY, RESULT]
EXAMPLES = [
    Example(sdk="openai", path="openai_sdk.OpenAIAgent", answers=SIMPLE, wrong=[MULTIPLY, WRONG]),
    Example(
        sdk="openai-agents", path="openai_agents_handoff.HandoffAgent", sequences=2,
        answers=[call("transfer_to_calculator"), *SIMPLE], wrong=[RESULT],
    ),
    Example(
        sdk="langgraph, langchain-openai", path="langgraph_agent.LangGraphAgent", answers=SIMPLE, wrong=[WRONG]
    ),
    Example(sdk="anthropic", path="anthropic_sdk.AnthropicAgent", answers=SIMPLE, wrong=[MULTIPLY, WRONG]),
    Example(
        sdk="google-genai", path="gemini_sdk.GeminiAgent", doors=("by address",), answers=SIMPLE,
        wrong=[MULTIPLY, WRONG],
    ),
    Example(sdk="pydantic-ai", path="pydantic_ai_agent.PydanticAIAgent", answers=SIMPLE, wrong=[WRONG]),
    Example(
        sdk="smolagents", path="smolagents_agent.SmolAgent", doors=("by address",), sequences=2,
        answers=[MULTIPLY, call("final_answer", answer="391")], wrong=[call("final_answer", answer="no")],
    ),
    Example(
        sdk="litellm", path="litellm_agent.LiteLLMAgent", doors=("by address",), answers=SIMPLE, wrong=[WRONG]
    ),
    Example(
        sdk="curl", path="curl_script.CurlAgent", doors=("by address",),
        answers=["It is 391."], wrong=["It is 400."],
    ),
    Example(
        sdk="npm's openai", path="node_agent.NodeAgent", doors=("by address",), answers=SIMPLE, wrong=[WRONG],
        arguments=node_script,
    ),
    Example(
        sdk="mini-swe-agent", path="mini_swe_agent.MiniSweAgent", doors=("by address",), streams=False,
        row=REPAIR, wrong=[f"Done.\n{SUBMIT}"],
        answers=[
            f"I look.\n{call('bash', command='cat double.py')}",
            "I repair it.\n" + call("bash", command="sed -i 's/x \\* x/2 * x/' double.py && git diff"),
            f"It works.\n{SUBMIT}",
        ],
    ),
]  # fmt: skip


class Watch:
    """Sees the calls of an episode where they reach the service."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.session: ChatSession | None = None
        self.path = ""
        self.in_process = 0
        self.requests: list[ChatRequest] = []
        watch = self
        opened, handled, answered = AgentService.open, AgentService.handle, ChatSession.answer
        transported = ServiceTransport.handle_async_request

        def open_(self: AgentService, session: ChatSession) -> str:
            watch.session = session
            return opened(self, session)

        async def handle(self: AgentService, method: str, path: str, headers: Any, body: bytes) -> Any:
            reply = await handled(self, method, path, headers, body)
            assert reply.status == 200, (path, body, reply)
            watch.path = path
            return reply

        async def answer(self: ChatSession, request: ChatRequest, answer_id: str, **options: Any) -> Any:
            watch.requests.append(request)
            return await answered(self, request, answer_id, **options)

        async def transport(self: ServiceTransport, request: Any) -> Any:
            watch.in_process += 1
            return await transported(self, request)

        monkeypatch.setattr(AgentService, "open", open_)
        monkeypatch.setattr(AgentService, "handle", handle)
        monkeypatch.setattr(ChatSession, "answer", answer)
        monkeypatch.setattr(ServiceTransport, "handle_async_request", transport)

    def used_a_tool(self) -> bool:
        """Whether a call of the model got its result back."""
        assert self.session is not None
        answers = [message for row in self.session.interactions.values() for message in row.output_message_list]
        results = [message for message in self.requests[-1].messages if message["role"] in ("tool", "user")]
        return any(message.get("tool_calls") for message in answers) and len(results) > 1

    def num_prompts(self) -> int:
        """Return how many different beginnings the conversations have: one for each agent."""
        return len({(request.conversation.keys[0], request.render_key) for request in self.requests})


class ByAddress:
    """An agent without the in-process client."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any) -> Any:
        return await self.agent.run(data, base_url=base_url, api_key=api_key)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM downloads prices when imported


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> InferenceEngineConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return InferenceEngineConfig(tokenizer_path=str(path))


def play(
    example: Example, config: InferenceEngineConfig, answers: list[Any], *, stream: bool, door: str
) -> tuple[Trajectory, ScriptedEngine]:
    """Run an episode; the model repeats its last answer if it is asked more often."""
    agent = example.agent(stream=stream)
    script = iter(answers)
    engine = ScriptedEngine(lambda request: constrained(request, next(script, answers[-1])))
    workflow = AgentWorkflow(agent if door == "in process" else ByAddress(agent), config)
    rows = asyncio.run(workflow.arun_episode(engine, dict(example.row)))  # type: ignore[arg-type]
    return trajectory_of(rows, []), engine


def constrained(request: ModelRequest, answer: Any) -> Any:
    """Return an answer as a model under the request's grammar writes it; ids are an answer that was cut."""
    schema = request.gconfig.json_schema
    if schema is None:
        return answer
    if isinstance(answer, str):
        answer = answer.partition("<tool_call>\n")[2].partition("\n</tool_call>")[0] or answer
        answer = [*tokenizer().encode(answer, add_special_tokens=False), tokenizer().eos_token_id]
    grammar = compiler().grammar(SamplingParams(json_schema=schema))
    assert grammar is not None and grammar.advance(answer) is None
    return answer


@functools.cache
def compiler() -> GrammarCompiler:
    """Return the embedded server's constrained decoding."""
    end = frozenset([tokenizer().eos_token_id])
    return GrammarCompiler(tokenizer(), vocab_size=len(tokenizer()), eos_ids=end)


CASES = [
    pytest.param(example, door, stream, id=f"{example.sdk}-{door}-{'stream' if stream else 'whole'}")
    for example in EXAMPLES
    for door in example.doors
    for stream in (False, True)[: 1 + example.streams]
]
observed: dict[str, dict[str, str]] = {}
"""The rows of the table, by SDK."""


@pytest.mark.parametrize(("example", "door", "stream"), CASES)
def test_an_example_earns_its_reward_and_each_token_is_recorded_once(
    example: Example, door: str, stream: bool, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    trajectory, engine = play(example, config, example.answers, stream=stream, door=door)
    assert trajectory.reward == 1.0
    sampled = [logprob for response in engine.responses for logprob in response.output_logprobs]
    assert len(engine.responses) == len(example.answers)
    trained = [
        logprob
        for sequence in trajectory.sequences
        for logprob in sequence.logprobs[sequence.loss_mask.astype(bool)].tolist()  # type: ignore[index]
    ]
    assert sorted(trained) == sorted(sampled)  # each token has a log-prob of its own
    assert len(trajectory.sequences) == example.sequences
    assert watch.session is not None and watch.session.tool_parse_errors == 0
    assert {request.options.stream for request in watch.requests} == {stream}
    assert bool(watch.in_process) == (door == "in process")

    row = observed.setdefault(example.sdk, {"API": f"`{watch.path}`", "history exact": YES})
    row[door] = row["stream" if stream else "whole"] = YES
    if watch.used_a_tool():
        row["tools"] = YES
    if any('"result"' in request.grammar.get("json_schema", "") for request in watch.requests):
        row["structured"] = YES
    if len(trajectory.sequences) > watch.num_prompts():
        row["history exact"] = "no"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.sdk)
def test_a_wrong_answer_and_an_answer_that_was_cut_earn_nothing(example: Example, config: Any) -> None:
    cut = tokenizer().encode('{"', add_special_tokens=False)
    for answers in (example.wrong, [cut]):
        trajectory, _ = play(example, config, answers, stream=False, door=example.doors[-1])
        assert trajectory.reward == 0.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteInfEngine]:
    """An embedded server with a random model, whose template shows no tools."""
    model = build_tiny_model(tmp_path_factory.mktemp("tiny"), context=16384)
    with EmbeddedServer(model_path=str(model)) as server:
        sampling = GenerationHyperparameters(max_new_tokens=32)
        config = InferenceEngineConfig(
            addresses=[server.address],
            tokenizer_path=str(model),
            agents={"tools_in_system_prompt": True},
            gconfig=sampling,
        )
        with RemoteInfEngine(config) as engine:
            yield engine


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.sdk)
def test_mistakes_of_a_real_model_fail_no_episode(example: Example, engine: RemoteInfEngine) -> None:
    agent = example.agent()
    (group,) = engine.rollout_batch([example.row], agent, group_size=2)
    assert group.failure is None, group.error
    assert group.rewards == [0.0, 0.0] and sum(s.num_trained_tokens for s in group.sequences) > 0


@pytest.mark.parametrize("name", ["claude", "codex", "gemini"])
def test_a_coding_agent_from_npm_plays_an_episode(name: str, config: Any) -> None:
    program = NODE / "node_modules/.bin" / name
    if not program.exists():
        pytest.skip(f"no {name}: install Node.js 20 or newer, then run `make test-agents`")
    room = replace(config, gconfig=GenerationHyperparameters(max_tokens=500_000, max_new_tokens=1000))
    engine = ScriptedEngine(lambda request: "It is 391.")
    workflow = AgentWorkflow(importlib.import_module("workflows.agents.cli_agent").CliAgent(str(program)), room)
    trajectory = trajectory_of(asyncio.run(workflow.arun_episode(engine, dict(QUESTION))), [])  # type: ignore[arg-type]
    assert trajectory.reward == 1.0
    assert sum(one.num_trained_tokens for one in trajectory.sequences) == sum(r.output_len for r in engine.responses)


def test_every_example_is_short_and_has_a_test() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".py", ".mjs")]
    assert {path.stem for path in files} == {example.path.partition(".")[0] for example in EXAMPLES} | {"cli_agent"}
    assert all(len(path.read_text().splitlines()) <= 60 for path in files)


def test_the_table_in_the_documentation_is_what_was_observed() -> None:
    """`UPDATE_TABLE=1 make test-agents` writes the table."""
    if missing := [example.sdk for example in EXAMPLES if example.sdk not in observed]:
        pytest.skip(f"no observation of {', '.join(missing)}: run this file whole, with Node.js")
    lines = [f"| SDK | file | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for example in EXAMPLES:
        cells = [observed[example.sdk].get(column, "-") for column in COLUMNS]
        file = example.path.partition(".")[0]
        lines.append(f"| {example.sdk} | `{file}.py` | {' | '.join(cells)} |")
    table = "\n".join(lines) + "\n"
    text = DOCUMENT.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if os.environ.get("UPDATE_TABLE"):
        DOCUMENT.write_text(f"{before}{begin}\n{table}{end}{after}")
    assert f"{begin}\n{table}{end}" in DOCUMENT.read_text()
