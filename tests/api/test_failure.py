"""A failure has one kind, set at the innermost boundary, and building it never fails itself."""

from __future__ import annotations
import asyncio
from collections.abc import Iterator
from typing import Any
import orjson
import pytest
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.api import (
    Failure,
    FailureKind,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.api.failure import MAX_TRACEBACK, attributed_to
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.api.trajectory import Group
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ContextOverflowError, ServerError, StarvationError
from areal_lite.rollout.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from tests.agents.scripted_engine import ScriptedEngine, tokenizer
from tests.rollout.scripted import OneTurn, tensors_of
from tests.stub_server import StubServer, StubThread


def raised(error: BaseException, *kinds: FailureKind) -> BaseException:
    """Return ``error`` after it crossed the boundaries, the inner one first."""
    try:
        if not kinds:
            raise error
        with attributed_to(kinds[-1]):
            raise raised(error, *kinds[:-1])
    except BaseException as caught:
        return caught


class TestKind:
    def test_an_unclaimed_error_is_the_agents(self) -> None:
        failure = Failure.of(raised(KeyError("question")))
        assert (failure.kind, failure.type, failure.message) == (FailureKind.AGENT, "KeyError", "'question'")
        assert failure.text == failure.traceback and "in raised" in failure.text
        assert failure.summary == "KeyError: 'question'"

    def test_the_innermost_boundary_decides_the_kind(self) -> None:
        error = raised(ValueError("x"), FailureKind.REWARD, FailureKind.OUTPUT)
        assert Failure.of(error).kind is FailureKind.REWARD

    @pytest.mark.parametrize(
        ("error", "kind"), [(ServerError("x"), "engine"), (ContextOverflowError("x"), "context_overflow")]
    )
    def test_a_class_that_names_its_kind_keeps_it(self, error: Exception, kind: str) -> None:
        assert Failure.of(raised(error, FailureKind.REWARD)).kind == kind

    def test_an_exception_group_counts_as_its_first_leaf(self) -> None:
        inner = ExceptionGroup("inner", [raised(ValueError("first"), FailureKind.REWARD), KeyError("second")])
        failure = Failure.of(raised(ExceptionGroup("outer", [inner, ServerError("third")]), FailureKind.OUTPUT))
        assert (failure.kind, failure.type, failure.message) == ("reward", "ValueError", "first")
        assert "second" in failure.traceback and "third" in failure.traceback

    def test_an_exception_group_from_a_boundary_has_the_boundarys_kind(self) -> None:
        error = raised(ExceptionGroup("outer", [ExceptionGroup("inner", [ValueError("x")])]), FailureKind.DATA)
        assert Failure.of(error).kind is FailureKind.DATA

    def test_a_boundary_does_not_claim_a_cancellation(self) -> None:
        error = raised(asyncio.CancelledError(), FailureKind.REWARD)
        assert not hasattr(error, "failure_kind")

    @pytest.mark.parametrize("kind", ["mine", 3, None, ["reward"]])
    def test_an_unknown_kind_is_the_agents(self, kind: Any) -> None:
        class OwnError(Exception):
            failure_kind = kind

        assert Failure.of(OwnError("x")).kind is FailureKind.AGENT


class TestText:
    def test_an_error_with_a_broken_str_is_still_a_failure(self) -> None:
        class BrokenError(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no text")

        failure = Failure.of(raised(BrokenError()))
        assert (failure.type, failure.message) == ("BrokenError", "(its text cannot be read)")

    def test_an_error_without_attributes_gets_the_default_kind(self) -> None:
        class SealedError(Exception):
            def __setattr__(self, name: str, value: object) -> None:
                raise AttributeError(name)

        assert Failure.of(raised(SealedError("x"), FailureKind.REWARD)).kind is FailureKind.AGENT

    def test_a_long_traceback_keeps_its_end(self) -> None:
        failure = Failure.of(raised(ValueError("x" * 2 * MAX_TRACEBACK + "end")))
        assert len(failure.text) == MAX_TRACEBACK
        assert failure.text.endswith("end\n")

    def test_a_stopped_episode_has_a_reason_and_no_type(self) -> None:
        failure = Failure.cancelled("the run ended\nin order")
        assert (failure.kind, failure.type, failure.traceback) == ("cancelled", "", "")
        assert (failure.text, failure.summary) == ("the run ended\nin order", "the run ended")

    def test_a_summary_is_one_short_line(self) -> None:
        failure = Failure(FailureKind.AGENT, "E", "\n" + "y" * 500 + "\nmore")
        assert failure.summary == "E: " + "y" * 200


# -- each boundary of a run --------------------------------------------------------------------------------


def divide(prompt: Any, completions: Any) -> float:
    return 1 / 0


def no_number(prompt: Any, completions: Any) -> Any:
    return "much"


class Rewarded(RolloutWorkflow):
    """Answers, then asks a reward function."""

    def __init__(self, function: Any) -> None:
        self.reward = AsyncRewardWrapper(function, in_process=True)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2]))
        return tensors_of(response, reward=await self.reward("p", "c"))


class Calls(RolloutWorkflow):
    """Sends one request, in a task group."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(engine.agenerate(ModelRequest(input_ids=[1] * data["prompt_len"])))
        return tensors_of(task.result())


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[RemoteInfEngine]:
    timeout_s = 0.5 if "deadline" in request.node.name else 30.0
    with StubThread(StubServer()) as stub:
        config = InferenceEngineConfig(
            backend="sglang",
            addresses=[stub.address],
            consumer_batch_size=1,
            faults={"episode_timeout_s": timeout_s, "max_empty_batches": 1, "failed_group_retries": 0},
        )
        with RemoteInfEngine(config) as engine:
            yield engine


def one(engine: RemoteInfEngine, workflow: Any, **row: Any) -> Group:
    (group,) = engine.rollout_batch([row], workflow, group_size=1)
    return group


@pytest.mark.parametrize(
    ("workflow", "row", "kind", "type_"),
    [
        (Rewarded(divide), {}, "reward", "ZeroDivisionError"),
        (Rewarded(no_number), {}, "reward", "ValueError"),
        (Calls(), {"prompt_len": 50_000}, "context_overflow", "ContextOverflowError"),
        (OneTurn(), {"do": "raise"}, "agent", "KeyError"),
        (OneTurn(), {"do": "exit"}, "agent", "SystemExit"),
        (OneTurn(), {"do": "self-cancel"}, "agent", "CancelledError"),
        (OneTurn(), {"do": "bad"}, "output", "ValueError"),
        (OneTurn(), {"do": "hang"}, "deadline", ""),
    ],
    ids=["reward raises", "no number", "overflow", "agent", "exit", "self-cancel", "output", "deadline"],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_each_boundary_names_its_kind(
    engine: RemoteInfEngine,
    grouped: bool,
    workflow: RolloutWorkflow,
    row: dict[str, Any],
    kind: str,
    type_: str,
) -> None:
    group = one(engine, GroupedRolloutWorkflow(workflow, 2) if grouped else workflow, **row)
    assert group.status == "failed" and group.failure is not None
    # Nothing but an Exception leaves a group of episodes.
    wrapped = grouped and type_ in ("SystemExit", "CancelledError")
    assert (group.failure.kind, group.failure.type) == (kind, "RuntimeError" if wrapped else type_)
    assert group.error == group.failure.text and (group.rewards, group.trajectory) == ([], None)
    assert len(group.trajectories) == 1 + grouped
    for trajectory in group.trajectories:
        assert trajectory.status == "failed" and trajectory.failure is not None
        assert (trajectory.failure.kind, trajectory.failure.type) == (kind, type_)


def test_a_failing_server_is_an_engine_failure() -> None:
    with StubThread(StubServer(fault=lambda number: "garbage")) as stub:
        config = InferenceEngineConfig(backend="sglang", addresses=[stub.address], request_retries=1)
        with RemoteInfEngine(config) as engine:
            group = one(engine, Calls(), prompt_len=3)
    assert group.failure is not None and group.failure.kind == "engine"


def test_a_filter_that_raises_fails_the_whole_group(engine: RemoteInfEngine) -> None:
    def broken(trajectory: dict[str, Any]) -> bool:
        raise LookupError("no threshold")

    (group,) = engine.rollout_batch([{}], OneTurn, should_accept_fn=broken, group_size=2)
    assert (group.status, group.sequences, group.rewards, group.head_version) == ("failed", [], [], None)
    assert group.failure is not None and group.failure.type == "LookupError"
    assert [t.status for t in group.trajectories] == ["failed"] * 2
    assert all(t.num_sampled_tokens for t in group.trajectories)


def test_tensor_dicts_with_different_keys_break_the_output(engine: RemoteInfEngine) -> None:
    class Uneven(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
            tensors = tensors_of(await engine.agenerate(ModelRequest(input_ids=[1, 2])))
            if not hasattr(self, "first"):
                self.first = tensors.pop("versions")
            return tensors

    (group,) = engine.rollout_batch([{}], Uneven(), group_size=2)
    assert group.failure is not None and (group.failure.kind, group.status) == ("output", "failed")


def test_a_packer_that_cannot_read_a_row_is_a_data_failure(engine: RemoteInfEngine) -> None:
    class Picky(DecoderOnlyLLMDataPacker):
        def get_rollout_input(self, item: Any) -> Any:
            raise KeyError("question")

    ended: list[Group] = []
    engine._executor.ended.on_end = ended.append
    with pytest.raises(StarvationError):
        engine.prepare_batch(RolloutDataSource([{"n": 1}], SourceSettings(packer=Picky())), OneTurn)
    assert {group.failure.kind for group in ended if group.failure is not None} == {"data"}


def test_episodes_that_the_run_stops_are_cancelled(engine: RemoteInfEngine) -> None:
    ended: list[Group] = []
    engine._executor.ended.on_end = ended.append
    engine.submit({"do": "hang"}, OneTurn)
    engine.destroy()
    (group,) = ended
    assert group.failure is not None and (group.status, group.failure.kind) == ("cancelled", "cancelled")
    assert [t.status for t in group.trajectories] == ["cancelled"]


class Wrapper(RolloutWorkflow):
    """A workflow around a group, which keeps some of what the group returned."""

    def __init__(self, keep: int) -> None:
        self.group, self.keep = GroupedRolloutWorkflow(OneTurn(), 2), keep

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        returned = await self.group.arun_episode(engine, data)
        assert returned is not None
        return {key: value[: self.keep] for key, value in returned.items()} if self.keep else None


@pytest.mark.parametrize(("keep", "status"), [(2, "accepted"), (1, "accepted"), (0, "rejected")])
def test_a_group_workflow_may_drop_an_episode(engine: RemoteInfEngine, keep: int, status: str) -> None:
    group = one(engine, Wrapper(keep))
    assert (group.status, len(group.sequences), len(group.rewards)) == (status, keep, keep)
    assert [t.status for t in group.trajectories] == ["accepted"] * keep + ["rejected"] * (2 - keep)
    assert all(t.num_sampled_tokens == 8 for t in group.trajectories)


@pytest.mark.parametrize("on_error", ["drop_episode", "drop_group"])
def test_with_a_dropped_group_the_siblings_are_cancelled(engine: RemoteInfEngine, on_error: Any) -> None:
    (group,) = engine.rollout_batch([{"do": "odd"}], GroupedRolloutWorkflow(OneTurn(), 2, on_error))
    if on_error == "drop_episode":
        assert [t.status for t in group.trajectories] == ["accepted", "failed"]
        assert (group.status, group.failure) == ("accepted", None)
    else:
        assert [t.status for t in group.trajectories] == ["cancelled", "failed"]
        assert group.failure is not None and (group.status, group.failure.type) == ("failed", "ValueError")


# -- agents ------------------------------------------------------------------------------------------------


def agent_failure(tmp_path: Any, run: Any, answers: Any) -> Failure:
    tokenizer().save_pretrained(tmp_path)
    agent = type("Agent", (), {"run": staticmethod(run)})()
    workflow = AgentWorkflow(agent, InferenceEngineConfig(tokenizer_path=str(tmp_path)))
    with pytest.raises(Exception) as caught:
        asyncio.run(workflow.arun_episode(ScriptedEngine(answers), {}))  # type: ignore[arg-type]
    return Failure.of(caught.value)


async def ask(**client: Any) -> None:
    from openai import AsyncOpenAI

    messages: Any = [{"role": "user", "content": "hi"}]
    await AsyncOpenAI(**client, max_retries=0).chat.completions.create(model="m", messages=messages)


class TestAgents:
    @pytest.mark.parametrize("reward", ["much", float("nan"), {"no such id": 1.0}, {}])
    def test_an_invalid_reward_is_a_reward_failure(self, tmp_path: Any, reward: Any) -> None:
        async def run(data: Any, **client: Any) -> Any:
            await ask(**client)
            return reward

        assert agent_failure(tmp_path, run, ["answer"]).kind == "reward"

    def test_an_agent_without_a_model_call_is_an_agent_failure(self, tmp_path: Any) -> None:
        async def run(data: Any, **client: Any) -> float:
            return 1.0

        assert agent_failure(tmp_path, run, []).kind == "agent"

    @pytest.mark.parametrize("swallow", [False, True])
    def test_an_engine_error_stays_an_engine_failure_if_the_agent_wraps_it(self, tmp_path: Any, swallow: bool) -> None:
        def broken(request: ModelRequest) -> str:
            raise RuntimeError("cuda")

        async def run(data: Any, **client: Any) -> float:
            try:
                await ask(**client)
            except Exception as error:
                if not swallow:
                    raise KeyError("mine") from error
            return 1.0

        failure = agent_failure(tmp_path, run, broken)
        assert (failure.kind, failure.type) == ("engine", "RuntimeError")


def test_a_text_that_has_no_json_form_is_made_to_have_one() -> None:
    failure = Failure.of(raised(FileNotFoundError("no file a \ud83d")))
    assert failure.message == "no file a ?" and "no file a ?" in orjson.loads(orjson.dumps(failure.text))
