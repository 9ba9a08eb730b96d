"""Agents for the end-to-end tests; named in their configs by dotted path."""

from __future__ import annotations
import uuid
from collections.abc import Iterator
from typing import Any
from openai import AsyncOpenAI
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.prompt_rows import AbstractDataGenerator
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.rollout import workflow_context


class LetterAgent:
    """Rewards answers by how many of their characters are lower-case letters: learnable from random weights."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once and score."""
        client = AsyncOpenAI(**extra_kwargs)
        completion = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": data["question"]}]
        )
        text = completion.choices[0].message.content or ""
        return sum(c.islower() for c in text) / 8


class TwoTurns:
    """Asks twice in one conversation, and rewards each answer as :class:`LetterAgent` does."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> list[float]:
        """Ask twice and score both answers."""
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        rewards = []
        for _ in range(2):
            completion = await client.chat.completions.create(model="default", messages=messages)
            text = completion.choices[0].message.content or ""
            rewards.append(0.25 + sum(c.islower() for c in text) / 8)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
        return rewards


class BrokenAgent:
    """Raises in every episode."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Raise."""
        raise RuntimeError("the agent is broken")


class WordyAgent(LetterAgent):
    """Rewards with a word."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        """Ask once."""
        await super().run(data, **extra_kwargs)
        return "good"


class SilentAgent:
    """Calls no model."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Score nothing."""
        return 1.0


class WithoutGreedyAnswers(LetterAgent):
    """Raises in every episode that is not trained, and rewards the others by 2 and more."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Ask once and score."""
        if workflow_context.get().is_eval:
            raise RuntimeError("no greedy answer")
        return 2 + await super().run(data, **extra_kwargs)


def rows(size: int = 16) -> list[dict[str, str]]:
    """Return rows that differ."""
    return [{"question": f"say {i}"} for i in range(size)]


class MoreQuestions(AbstractDataGenerator):
    """Adds a question that nobody could guess after each step."""

    def generate(self, dataset: Any) -> list[dict[str, str]]:
        """Return one row."""
        return [{"question": f"say {uuid.uuid4()}"}]


class InOrder(AbstractSampler):
    """Gives rows in order, and keeps the trained batches."""

    batches: list[Any] = []

    def __init__(self, data_source: Any, config: DatasetConfig) -> None:
        self.size = len(data_source)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))

    def __len__(self) -> int:
        return self.size

    def update(self, batch: Any) -> None:
        """Keep the batch."""
        self.batches.append(batch)


class CountsItsCalls(AbstractDataGenerator):
    """Makes no rows."""

    calls = 0

    def generate(self, dataset: Any) -> list[dict[str, str]]:
        """Count the call."""
        type(self).calls += 1
        return []
