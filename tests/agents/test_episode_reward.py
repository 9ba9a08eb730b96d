"""What run() returns becomes rewards, their parts and the session's counts: in the record, the dump and the metrics."""

from __future__ import annotations
import asyncio
from typing import Any
import numpy as np
import pytest
from areal_lite.agents.agent_workflow import rewarded
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import RewardsConfig
from tests.agents.scripted_engine import ScriptedEngine, create

WEIGHTS = {"correct": 1.0, "format": 0.2}


def two_answers() -> ChatSession:
    async def play() -> ChatSession:
        engine = ScriptedEngine(["one", "two"])
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for _ in range(2):
            completion = await create(session, {"messages": messages})
            messages += [completion["choices"][0]["message"], {"role": "user", "content": "again"}]
        return session

    return asyncio.run(play())


def rewards_of(reward: Any, weights: Any = None) -> list[float | None]:
    sequences, _ = rewarded(two_answers(), reward, RewardsConfig(weights=weights))
    return [sequence.reward for sequence in sequences.values()]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (0.5, [0.5]),
        (np.array([0.25]), [0.25]),
        ([0.1, 1], [0.1, 1.0]),
        ([None, 1], [1.0]),
        ({"correct": 1, "format": True}, [1.2]),
        ({"format": 0.5}, [0.1]),
    ],
)
def test_forms_of_a_reward(reward: Any, expected: list[float]) -> None:
    assert rewards_of(reward, WEIGHTS) == pytest.approx(expected)


def test_one_part_is_the_reward_and_the_other_numbers_are_kept() -> None:
    reward = {"accuracy": 0.5, "length": np.float32(3), "answer": "42"}
    sequences, parts = rewarded(two_answers(), reward, RewardsConfig(key="accuracy"))
    assert [sequence.reward for sequence in sequences.values()] == [0.5]
    assert parts == {"accuracy": 0.5, "length": 3}
    session = two_answers()
    first, _ = session.interactions
    by_id, parts = rewarded(session, {first: 0.75}, RewardsConfig(key="accuracy"))
    assert [sequence.reward for sequence in by_id.values()] == [0.75] and parts == {}


def test_completions_are_rewarded_by_id_beside_named_parts() -> None:
    session = two_answers()
    first, _ = session.interactions
    sequences, parts = rewarded(session, {first: 0.75}, RewardsConfig(weights=WEIGHTS))
    assert [sequence.reward for sequence in sequences.values()] == [0.75]
    assert parts == {}


def test_parts_are_returned_unweighted() -> None:
    reward = {"correct": 1, "format": 0.5}
    assert rewarded(two_answers(), reward, RewardsConfig(weights=WEIGHTS))[1] == reward


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ([1.0], "returned 1 rewards for 2 answers"),
        ([None, None], "rewards no answer"),
        ({}, "empty dict"),
        ({"corect": 1.0}, "rollout.rewards.weights names"),
        ({"correct": float("nan")}, "finite number"),
        ("1", "finite number"),
    ],
)
def test_what_is_not_a_reward_is_refused(reward: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rewards_of(reward, WEIGHTS)


def test_only_the_chosen_agents_train() -> None:
    """Where one continues the conversation of another, what the other said is a prompt."""

    async def play() -> ChatSession:
        engine = ScriptedEngine(["one", "two", "three"])
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        for agent in ("planner", "main", "planner"):
            completion = await create(session, {"messages": messages, "metadata": {"agent": agent}})
            messages += [completion["choices"][0]["message"], {"role": "user", "content": "again"}]
        return session

    session = asyncio.run(play())
    first, second, third = session.interactions
    texts = {}
    for agents in (["main"], ["planner"], ["main", "planner"], None):
        sequences, _ = rewarded(session, 0.5, RewardsConfig(), agents)
        ((key, sequence),) = sequences.items()
        columns = sequence.columns()
        texts[str(agents)] = (
            key,
            session.renderer.tokenizer.decode(columns["input_ids"][columns["loss_mask"]], skip_special_tokens=True),
        )

    assert texts == {
        "['main']": (third, "two"),
        "['planner']": (third, "onethree"),
        "['main', 'planner']": (third, "onetwothree"),
        "None": (third, "onetwothree"),
    }
    assert list(rewarded(session, {first: 1.0, second: 0.5}, RewardsConfig(), ["main"])[0]) == [second]
    assert not rewarded(session, 0.5, RewardsConfig(), ["critic"])[0]


def test_forked_tokens_are_those_that_are_not_continued() -> None:
    async def play() -> None:
        engine = ScriptedEngine(["one", "two"])
        session = ChatSession(engine, ChatRenderer(engine.tokenizer), GenerationHyperparameters())  # type: ignore[arg-type]
        hello = {"role": "user", "content": "hello"}
        await create(session, {"messages": [hello]})
        assert session.counts() == {
            "answers": 1,
            "clean_turns": 1,
            "forks": 0,
            "forked_tokens": 0,
            "tool_calls": 0,
            "tool_parse_errors": 0,
            "cut_answers": 0,
        }
        edited = {"role": "assistant", "content": "two"}
        await create(session, {"messages": [hello, edited, hello]})
        first = engine.responses[0]
        ids = first.input_tokens + first.output_tokens
        common = next(i for i, (a, b) in enumerate(zip(ids, engine.requests[1].input_ids, strict=False)) if a != b)
        assert common >= first.input_len
        counts = session.counts()
        assert (counts["forks"], counts["forked_tokens"]) == (1, len(ids) - common)

    asyncio.run(play())
