"""AReaL's client: its names and semantics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from areal_lite.agents import ArealOpenAI
from tests.agents.scripted_engine import ScriptedEngine


def new_client(answers: Any, **kwargs: Any) -> ArealOpenAI:
    engine = ScriptedEngine(answers)
    return ArealOpenAI(engine=engine, tokenizer=engine.tokenizer, **kwargs)  # type: ignore[arg-type]


async def converse(client: ArealOpenAI, turns: int) -> list[ChatCompletion]:
    messages: list[Any] = []
    completions = []
    for _ in range(turns):
        messages.append({"role": "user", "content": "go on"})
        completions.append(await client.chat.completions.create(messages=messages))
        messages.append(completions[-1].choices[0].message)
    return completions


def test_rewards_are_passed_back_once_in_the_order_of_creation() -> None:
    async def play() -> None:
        client = new_client(["a", "b", "c"], tool_call_parser="qwen", chat_template_type="concat")
        completions = await converse(client, 3)
        with pytest.raises(ValueError, match="no reward to pass back"):
            client.apply_reward_discount()
        client.set_reward(completions[0].id, 0.5)
        client.set_last_reward(1)
        rewards = [i.reward for i in client.apply_reward_discount(turn_discount=0.5).values()]
        assert rewards == [0.5 + 0.5 * 0.5, 0.5, 1.0]
        with pytest.raises(RuntimeError, match="called before"):
            client.apply_reward_discount()
        rows = client.export_interactions(style="individual")
        assert list(rows) == [c.id for c in completions]
        assert [row.to_tensor_dict()["rewards"].item() for row in rows.values()] == rewards
        (leaf,) = client.export_interactions(style="concat").values()
        assert leaf.reward == 1.0
        tensors = leaf.to_tensor_dict()
        assert tensors["loss_mask"].sum() == sum(c.usage.completion_tokens for c in completions if c.usage)

    asyncio.run(play())


def test_interactions_are_found_by_completion_id() -> None:
    async def play() -> None:
        client = new_client(["hello"])
        with pytest.raises(ValueError, match="no completion"):
            client.set_last_reward(1.0)
        (completion,) = await converse(client, 1)
        interaction = client.get_interaction(completion.id)
        assert interaction.completion == completion
        assert interaction.messages == [{"role": "user", "content": "go on"}]
        assert interaction.output_message_list[0]["content"] == "hello"
        with pytest.raises(KeyError, match="it has"):
            client.get_interaction("chatcmpl-other")
        with pytest.raises(ValueError, match="finite"):
            client.set_reward(completion.id, float("nan"))
        with pytest.raises(ValueError, match="individual"):
            client.export_interactions(style="tree")  # type: ignore[arg-type]

    asyncio.run(play())


def test_the_workflows_own_sampling_is_followed() -> None:
    async def play() -> None:
        client = new_client(["hello"], engine_max_tokens=100)
        await client.chat.completions.create(
            messages=[{"role": "user", "content": "?"}], temperature=0.3, top_p=0.9, max_completion_tokens=200
        )
        gconfig = client.session._engine.requests[0].gconfig  # type: ignore[attr-defined]
        assert (gconfig.temperature, gconfig.top_p, gconfig.max_tokens) == (0.3, 0.9, 100)
        assert gconfig.max_new_tokens < 100

    asyncio.run(play())
