"""Agents for the end-to-end tests; named in their configs by dotted path."""

from __future__ import annotations

import uuid
from typing import Any

from openai import AsyncOpenAI

from areal_lite.data.dynamic_dataset import AbstractDataGenerator


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


class BrokenAgent:
    """Raises in every episode."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Raise."""
        raise RuntimeError("the agent is broken")


def rows(size: int = 16) -> list[dict[str, str]]:
    """Return rows that differ."""
    return [{"question": f"say {i}"} for i in range(size)]


class MoreQuestions(AbstractDataGenerator):
    """Adds a question that nobody could guess after each step."""

    def generate(self, dataset: Any) -> list[dict[str, str]]:
        """Return one row."""
        return [{"question": f"say {uuid.uuid4()}"}]
