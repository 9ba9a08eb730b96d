"""Agents of the tests: two calls, in a conversation or in two."""

from __future__ import annotations
from typing import Any, ClassVar
from openai import AsyncOpenAI


class TwoCallsAgent:
    """Asks twice; where ``data["forks"]`` is set, the second call forgets the first answer."""

    clock: ClassVar[int] = 0
    """What the agent says between its calls depends on it."""

    async def ask(self, data: dict[str, Any], extra_kwargs: dict[str, Any]) -> list[float]:
        """Return a score for each answer."""
        client = AsyncOpenAI(**extra_kwargs)
        messages = [{"role": "user", "content": data["question"]}]
        scores = []
        for number in range(2):
            completion = await client.chat.completions.create(model="default", messages=messages)  # type: ignore[arg-type]
            text = completion.choices[0].message.content or ""
            scores.append(sum(c.islower() for c in text) / 8 + 0.1 * number)
            answer = "forgotten" if data["forks"] else text
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"again at {type(self).clock}"},
            ]
        return scores

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return the mean of the scores."""
        scores = await self.ask(data, extra_kwargs)
        return sum(scores) / len(scores)


class RewardedTurns(TwoCallsAgent):
    """Rewards each answer."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> list[float]:  # type: ignore[override]
        """Return the scores."""
        return await self.ask(data, extra_kwargs)


def rows(size: int = 6) -> list[dict[str, Any]]:
    """Return rows that differ; in every second one the agent forks."""
    return [{"question": f"say {i}", "forks": bool(i % 2)} for i in range(size)]
