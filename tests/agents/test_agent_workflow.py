"""An agent's run() becomes rows with its reward, or a failure that says why."""

from __future__ import annotations
import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
import numpy as np
import openai
import pytest
import torch
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.api import episode_context
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.tensor_dict import tensor_dict_of
from areal_lite.api.trajectory import EpisodeStatus
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import ConfigError, ContextOverflowError, ServerError
from tests.agents.scripted_engine import ScriptedEngine, tokenizer

Run = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> InferenceEngineConfig:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return InferenceEngineConfig(tokenizer_path=str(path))


class FunctionAgent:
    def __init__(self, run: Run) -> None:
        self.run = run


def run_episode(config: InferenceEngineConfig, run: Run, answers: Any) -> Any:
    workflow = AgentWorkflow(FunctionAgent(run), config)
    return asyncio.run(workflow.arun_episode(ScriptedEngine(answers), {"question": "hello"}))  # type: ignore[arg-type]


async def two_turns(data: dict[str, Any], **extra_kwargs: Any) -> list[str]:
    client = openai.AsyncOpenAI(**extra_kwargs)
    messages: list[Any] = [{"role": "user", "content": data["question"]}]
    ids = []
    for _ in range(2):
        completion = await client.chat.completions.create(model="default", messages=messages)
        messages += [completion.choices[0].message, {"role": "user", "content": "again"}]
        ids.append(completion.id)
    return ids


@pytest.mark.parametrize(
    ("reward", "value"),
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.25), 0.25), (np.int64(2), 2.0), (np.bool_(True), 1.0),
     (torch.tensor(0.5), 0.5)],
)  # fmt: skip
def test_a_number_rewards_the_whole_episode_as_one_sequence(config: Any, reward: Any, value: float) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await two_turns(data, **extra_kwargs)
        return reward

    tensors = tensor_dict_of([trajectory_of(run_episode(config, run, ["one", "two"]), [])])
    assert tensors is not None
    assert tensors["rewards"].tolist() == [value]
    mask = tensors["loss_mask"][0].bool()
    text = tokenizer().decode(tensors["input_ids"][0][mask])
    assert text == "one<|im_end|>two<|im_end|>"
    assert tensors["versions"][0][~mask].unique().tolist() == [-1]


def test_agents_of_whom_none_trains_are_named(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        await two_turns(data, **extra_kwargs)
        return 1.0

    chosen = dataclasses.replace(config, agents=dataclasses.replace(config.agents, train_agents=["planner"]))
    with pytest.raises(ValueError, match=r"train_agents \['planner'\]: the episode's agents are \['main'\]"):
        run_episode(chosen, run, ["one", "two"])


@pytest.mark.parametrize("chosen", [None, ["main", OLDER_POLICY]])
def test_answers_of_the_older_policy_never_train(config: Any, chosen: list[str] | None) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = openai.AsyncOpenAI(**extra_kwargs)
        for name in ("main", OLDER_POLICY):
            messages: Any = [{"role": "user", "content": f"{name}?"}]
            await client.chat.completions.create(model="default", messages=messages, metadata={"agent": name})
        return 1.0

    config = dataclasses.replace(config, agents=dataclasses.replace(config.agents, train_agents=chosen))
    (sequence,) = trajectory_of(run_episode(config, run, ["mine", "theirs"]), []).sequences
    assert tokenizer().decode(sequence.input_ids[sequence.loss_mask]) == "mine<|im_end|>"


def test_calls_of_the_older_policy_sample_as_they_ask(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = openai.AsyncOpenAI(**extra_kwargs)
        for name in ("main", OLDER_POLICY):
            messages: Any = [{"role": "user", "content": f"{name}?"}]
            metadata = {"agent": name}
            await client.chat.completions.create(model="m", messages=messages, metadata=metadata, temperature=0.0)
        return 1.0

    engine = ScriptedEngine(["mine", "theirs"])
    asyncio.run(AgentWorkflow(FunctionAgent(run), config).arun_episode(engine, {}))  # type: ignore[arg-type]
    assert [request.gconfig.effective_temperature for request in engine.requests] == [1.0, 0.0]


def test_a_number_counts_once_however_many_conversations_the_agent_had(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> Any:
        client = openai.AsyncOpenAI(**extra_kwargs)
        for question in ("one?", "two?"):
            messages: Any = [{"role": "user", "content": question}]
            await client.chat.completions.create(model="default", messages=messages)
        return 0.5

    trajectory = trajectory_of(run_episode(config, run, ["one", "two"]), [])
    assert ([s.reward for s in trajectory.sequences], trajectory.reward) == ([0.5, 0.5], 0.5)


def test_a_dict_rewards_each_completion_as_a_row_of_its_own(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> Any:
        first, second = await two_turns(data, **extra_kwargs)
        return {second: 1, first: 0.5}

    trajectory = trajectory_of(run_episode(config, run, ["one", "two"]), [])
    assert trajectory.reward == 1.5
    tensors = tensor_dict_of([trajectory])
    assert tensors is not None
    assert tensors["rewards"].tolist() == [0.5, 1.0]
    trained = [
        tokenizer().decode(ids[mask.bool()])
        for ids, mask in zip(tensors["input_ids"], tensors["loss_mask"], strict=True)
    ]
    assert trained == ["one<|im_end|>", "two<|im_end|>"]


def test_a_list_has_the_order_of_the_choices_whichever_ends_first(config: Any) -> None:
    class SlowFirst(ScriptedEngine):
        async def agenerate(self, req: Any) -> Any:
            place = len(self.requests)
            made = await super().agenerate(req)
            for _ in range(0 if place else 50):
                await asyncio.sleep(0)
            return made

    async def run(data: dict[str, Any], **extra_kwargs: Any) -> list[float]:
        client = openai.AsyncOpenAI(**extra_kwargs)
        completion = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "x"}], n=3
        )
        return [float(choice.message.content == "right") for choice in completion.choices]

    engine: Any = SlowFirst(["right", "wrong", "bad"])
    workflow = AgentWorkflow(FunctionAgent(run), config)
    trajectory = trajectory_of(asyncio.run(workflow.arun_episode(engine, {})), [])
    tensors = tensor_dict_of([trajectory])
    assert tensors is not None
    rows = zip(tensors["input_ids"], tensors["loss_mask"], tensors["rewards"].tolist(), strict=True)
    rewards = {tokenizer().decode(ids[mask.bool()]): reward for ids, mask, reward in rows}
    assert rewards == {"right<|im_end|>": 1.0, "wrong<|im_end|>": 0.0, "bad<|im_end|>": 0.0}


@pytest.mark.parametrize(
    ("reward", "says"),
    [(float("nan"), "the reward is nan"), (float("inf"), "the reward is inf"), ("1.0", "finite"),
     ([1.0], "1 rewards for 2 answers"), ({}, "empty dict"), (1j, "must be a finite number"),
     ({"fmt": 1.0}, "not one of its completions.*rollout.rewards.weights")],
)  # fmt: skip
def test_what_is_no_reward_fails_the_episode(config: Any, reward: Any, says: str) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await two_turns(data, **extra_kwargs)
        return reward

    with pytest.raises(ValueError, match=says):
        run_episode(config, run, ["one", "two"])


def test_none_rejects_and_a_reward_without_a_model_call_fails(config: Any) -> None:
    async def nothing(data: dict[str, Any], **extra_kwargs: Any) -> None:
        return None

    async def reward_only(data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0

    assert run_episode(config, nothing, []) is None
    with pytest.raises(ValueError, match="the agent called no model"):
        run_episode(config, reward_only, [])


def test_an_engine_that_failed_fails_the_episode_whatever_the_agent_makes_of_it(config: Any) -> None:
    async def swallows(data: dict[str, Any], **extra_kwargs: Any) -> float:
        try:
            await two_turns(data, **extra_kwargs)
        except openai.APIError:
            return 0.0
        return 1.0

    for run in (swallows, two_turns):
        with pytest.raises(ServerError, match="no server is left"):
            run_episode(config, run, ["one", ServerError("no server is left")])


def test_an_episode_that_outgrew_the_context_may_end_with_its_reward(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        try:
            await two_turns(data, **extra_kwargs)
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded"
            return 0.5
        raise AssertionError

    rows = run_episode(config, run, ["one", ContextOverflowError("longer than the context length")])
    assert [row.reward for row in rows.values()] == [0.5]


def test_an_agent_that_recovered_from_a_refusal_fails_by_its_own_error(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        with contextlib.suppress(openai.BadRequestError):
            await two_turns(data, **extra_kwargs)
        await two_turns(data, **extra_kwargs)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_episode(config, run, ["one", ContextOverflowError("longer than the context length"), "two", "three"])


def test_the_key_ends_with_the_episode(config: Any) -> None:
    kept: list[openai.AsyncOpenAI] = []

    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        kept.append(openai.AsyncOpenAI(**extra_kwargs))
        raise RuntimeError("the agent's own bug")

    with pytest.raises(RuntimeError, match="own bug"):
        run_episode(config, run, [])
    with pytest.raises(openai.APIStatusError, match="has ended"):
        asyncio.run(kept[0].chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}]))


def test_training_takes_gconfig_and_evaluation_eval_gconfig(config: Any) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        await two_turns(data, **extra_kwargs)
        return 1.0

    sampling = InferenceEngineConfig(
        tokenizer_path=config.tokenizer_path, gconfig=GenerationHyperparameters(temperature=0.7)
    )
    workflow = AgentWorkflow(FunctionAgent(run), sampling)
    engine = ScriptedEngine(["a", "b", "c", "d"])

    async def play() -> None:
        for is_eval, temperature in ((False, 0.7), (True, 0.0)):
            episode_context.enter(EpisodeContext(is_eval=is_eval))
            await workflow.arun_episode(engine, {"question": "?"})  # type: ignore[arg-type]
            assert engine.requests[-1].gconfig.effective_temperature == temperature

    asyncio.run(play())


def test_the_tokenizer_is_loaded_once_and_a_bad_path_is_named(config: Any, tmp_path: Path) -> None:
    async def run(data: dict[str, Any], **extra_kwargs: Any) -> float:
        await two_turns(data, **extra_kwargs)
        return 1.0

    workflow = AgentWorkflow(FunctionAgent(run), config)

    async def play() -> None:
        engines = [ScriptedEngine(["a", "b"]) for _ in range(50)]
        await asyncio.gather(*(workflow.arun_episode(engine, {"question": "?"}) for engine in engines))  # type: ignore[arg-type]
        assert len({id(engine.requests[0].tokenizer) for engine in engines}) == 1

    asyncio.run(play())
    for path, says in (
        (None, "tokenizer_path is null"),
        (str(tmp_path / "absent"), "no tokenizer can be loaded"),
    ):
        with pytest.raises(ConfigError, match=says):
            run_episode(InferenceEngineConfig(tokenizer_path=path), run, ["a", "b"])


def test_counts_and_parts_are_in_the_record(config: Any) -> None:
    weighted = dataclasses.replace(config, rewards={"weights": {"correct": 1.0, "short": 0.5}})

    async def run(data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        await two_turns(data, **extra_kwargs)
        return {"correct": 1.0, "short": 0.5}

    async def play() -> None:
        episode = Episode()
        episode_context.enter(EpisodeContext(episode=episode))
        workflow = AgentWorkflow(FunctionAgent(run), weighted)
        returned = await workflow.arun_episode(ScriptedEngine(["1", "2"]), {"question": "x"})  # type: ignore[arg-type]
        assert [interaction.reward for interaction in (returned or {}).values()] == [1.25]
        trajectory = episode.end(EpisodeStatus.ACCEPTED)
        assert trajectory.counts["answers"] == 2 and trajectory.counts["reward/short"] == 0.5

    asyncio.run(play())
