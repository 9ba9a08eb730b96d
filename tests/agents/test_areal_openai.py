"""AReaL's client: its names and semantics."""

from __future__ import annotations
import asyncio
from typing import Any
import pytest
from openai import BadRequestError
from openai.types.chat import ChatCompletion
from areal_lite.agents import ArealOpenAI
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.tensor_dict import concat_padded_tensors
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.rollout_config import InferenceEngineConfig
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
        assert trajectory_of(rows, []).reward == rewards[0]  # their sum would count later ones again
        assert trajectory_of(concat_padded_tensors([row.to_tensor_dict() for row in rows.values()]), []).reward == 0.75
        (leaf,) = client.export_interactions(style="concat").values()
        assert leaf.reward == trajectory_of({"leaf": leaf}, []).reward == 1.0
        tensors = leaf.to_tensor_dict()
        assert tensors["loss_mask"].sum() == sum(c.usage.completion_tokens for c in completions if c.usage)

    asyncio.run(play())


def test_rewards_that_are_not_passed_back_are_summed_and_those_of_forks_are_not() -> None:
    async def play() -> None:
        client = new_client(["a", "b", "c"])
        completions = await converse(client, 2)
        await converse(client, 1)  # another conversation
        for completion, reward in zip(completions, (0.5, 1.0), strict=True):
            client.set_reward(completion.id, reward)
        client.set_last_reward(2.0)
        assert trajectory_of(client.export_interactions(), []).reward == 3.5
        client.apply_reward_discount(turn_discount=0.5)
        assert trajectory_of(client.export_interactions(), []).reward == 1.5
        assert trajectory_of(client.export_interactions(style="concat"), []).reward == 1.5

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


def test_responses_and_streamed_answers_are_rewarded_too() -> None:
    async def play() -> None:
        client = new_client(["a", "b", "c"])
        response = await client.responses.create(model="m", input="go on")
        client.set_last_reward(0.25)
        (completion,) = await converse(client, 1)
        stream: Any = await client.chat.completions.create(messages=[{"role": "user", "content": "?"}], stream=True)
        streamed = [chunk.id async for chunk in stream][0]
        assert client.get_interaction(response.id).completion == {"id": response.id}
        client.set_reward(streamed, 1.0)
        rewards = {key: row.reward for key, row in client.export_interactions().items()}
        assert rewards == {response.id: 0.25, streamed: 1.0}  # an answer without a reward does not train
        assert list(client.apply_reward_discount()) == [response.id, completion.id, streamed]
        assert [row.reward for row in client.export_interactions().values()] == [1.25, 1.0, 1.0]

    asyncio.run(play())


def test_without_any_reward_all_answers_are_exported_and_fail_the_episode() -> None:
    async def play() -> None:
        client = new_client(["a", "b"])
        await converse(client, 2)
        exported = client.export_interactions()
        assert len(exported) == 2
        with pytest.raises(ValueError, match="has the reward None"):
            trajectory_of(exported, [])

    asyncio.run(play())


def test_what_a_client_counted_is_recorded_once() -> None:
    async def play() -> None:
        episode = Episode()
        episode_context.enter(EpisodeContext(episode=episode))
        client = new_client(["a", "b"])
        await converse(client, 2)
        client.set_last_reward(1.0)
        for style in ("individual", "concat"):
            client.export_interactions(style)  # type: ignore[arg-type]
        assert (episode.counts["answers"], episode.counts["clean_turns"], episode.counts["forks"]) == (2, 2, 0)

    asyncio.run(play())


def test_tools_are_shown_as_the_run_says() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    async def play(tools_in_system_prompt: bool) -> str:
        engine = ScriptedEngine(["a"], "llama3")  # its template shows no tools
        engine.config = InferenceEngineConfig(agents={"tools_in_system_prompt": tools_in_system_prompt})  # type: ignore[attr-defined]
        client = ArealOpenAI(engine, engine.tokenizer)  # type: ignore[arg-type]
        await client.chat.completions.create(messages=[{"role": "user", "content": "?"}], tools=[tool])
        prompt: str = engine.tokenizer.decode(engine.requests[0].input_ids)
        return prompt

    assert '"name": "add"' in asyncio.run(play(True))
    with pytest.raises(BadRequestError, match="tools_in_system_prompt"):
        asyncio.run(play(False))


def test_the_workflows_own_sampling_is_followed() -> None:
    async def play() -> None:
        client = new_client(["hello"], engine_max_tokens=100)
        await client.chat.completions.create(
            messages=[{"role": "user", "content": "?"}], temperature=0.3, top_p=0.9, max_completion_tokens=200
        )
        gconfig = client.session.engine.requests[0].gconfig  # type: ignore[attr-defined]
        assert (gconfig.temperature, gconfig.top_p, gconfig.max_tokens) == (0.3, 0.9, 100)
        assert gconfig.max_new_tokens < 100

    asyncio.run(play())
