"""A reward function in a worker process, and a filter that keeps groups with differing rewards.

    python examples/04_custom_reward_filter.py [MODEL_FOLDER]

If the reward function hangs or crashes, the episode fails with the cause; it never gets a reward of 0.
In a YAML, the filter is `should_accept_fn: my_file.rewards_differ`.
"""

from __future__ import annotations
import re
import sys
from typing import Any
from openai import AsyncOpenAI
from areal_lite.api import AsyncRewardWrapper, GenerationHyperparameters, InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer


def word_lengths(text: str, max_letters: int) -> float:
    """Return the share of words with at most ``max_letters`` letters."""
    words = re.findall(r"\w+", text)
    return sum(len(word) <= max_letters for word in words) / len(words) if words else 0.0


def rewards_differ(trajectory: dict[str, Any]) -> bool:
    """Return whether the rewards of a group differ. If they are equal, every advantage is 0."""
    return bool(trajectory["rewards"].max() > trajectory["rewards"].min())


class ShortWordsAgent:
    def __init__(self, max_letters: int) -> None:
        self.max_letters = max_letters
        self.reward = AsyncRewardWrapper(word_lengths, timeout_seconds=5)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        completion = await AsyncOpenAI(**extra_kwargs).chat.completions.create(
            model="default", messages=[{"role": "user", "content": data["question"]}]
        )
        return await self.reward(completion.choices[0].message.content or "", self.max_letters)


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct") -> None:
    rows = [{"question": question} for question in ("What is a cat?", "What is rain?", "Say yes.")]
    gconfig = GenerationHyperparameters(max_new_tokens=24)
    with EmbeddedServer(model_path=model_path) as server:
        config = InferenceEngineConfig(
            addresses=[server.address], tokenizer_path=model_path, gconfig=gconfig, group_size=4
        )
        with RemoteInfEngine(config) as engine:
            agent = ShortWordsAgent(max_letters=4)
            for group in engine.rollout_batch(rows, agent, should_accept_fn=rewards_differ):
                print(f"{group.data['question']}  {group.status}  {group.error or group.rewards}")


if __name__ == "__main__":  # guarded, because a worker process imports this file
    main(*sys.argv[1:])
