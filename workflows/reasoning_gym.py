"""An agent for any task of reasoning-gym; its rows come with ``path: reasoning-gym:TASK``."""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

from areal_lite.api import AsyncRewardWrapper

SYSTEM = (
    "Think step by step, then give the final answer between <answer> and </answer>, with no explanation inside. "
    "Where the question shows an example, follow its form exactly."
)


class ReasoningGymAgent:
    """Asks the row's question and scores the answer as reasoning-gym does, between 0 and 1.

    Args:
        task: Task whose scorer is used; None takes the one each row names.
        system_prompt: What the model is told about the form of its answer.
        timeout_seconds: Limit on scoring one answer; the scorer runs in a worker process.
    """

    def __init__(
        self, task: str | None = None, system_prompt: str = SYSTEM, timeout_seconds: float = 15
    ) -> None:
        self.task = task
        self.system_prompt = system_prompt
        self.score = AsyncRewardWrapper(score, timeout_seconds=timeout_seconds)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        completion = await client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": self.system_prompt},
                {"role": "user", "content": data["question"]},
            ],
        )
        answer = final_answer(completion.choices[0].message.content or "")
        return await self.score(self.task or data["task"], answer, data)


def final_answer(text: str) -> str:
    """Return the last ``<answer>``; without one, the number the last line ends with, or that line."""
    text = text.rpartition("</think>")[2]
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1]).strip()
    line = text.strip().rpartition("\n")[2].strip()
    number = re.search(r"(-?\d+(?:\.\d+)?)\.?$", line)
    return number.group(1) if number else line


def score(task: str, answer: str, row: dict[str, Any]) -> float:
    """Return reasoning-gym's score of an answer to ``row``, which has question, answer and metadata."""
    import reasoning_gym

    return float(reasoning_gym.get_score_answer_fn(task)(answer=answer, entry=row))
