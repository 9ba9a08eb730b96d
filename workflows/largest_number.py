"""A minimal agent that asks for the largest of four numbers. Copy it and change ``run``."""

from __future__ import annotations
import random
import re
from typing import Any
from openai import AsyncOpenAI


class LargestNumberAgent:
    """Reward 1 if the last number of the answer is the largest one."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        completion = await client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": "Reply with a number only."},
                {"role": "user", "content": data["question"]},
            ],
        )
        numbers = re.findall(r"\d+", completion.choices[0].message.content or "")
        return float(bool(numbers) and numbers[-1] == data["answer"])


def rows(size: int = 1000, seed: int = 1) -> list[dict[str, str]]:
    """Return ``size`` rows of ``question`` and ``answer``, each with four distinct numbers from 1 to 99."""
    rng = random.Random(seed)
    draws = [rng.sample(range(1, 100), 4) for _ in range(size)]
    return [
        {"question": f"Which is the largest number: {', '.join(map(str, s))}?", "answer": str(max(s))} for s in draws
    ]
