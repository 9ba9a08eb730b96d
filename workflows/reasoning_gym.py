"""An agent for any reasoning-gym task; get rows with ``path: reasoning-gym:TASK``."""

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
    """Ask the row's question; the reward is reasoning-gym's score from 0 to 1.

    Args:
        task: Task that scores the answers. None uses the task named in each row.
        system_prompt: Describes the answer format.
        timeout_seconds: Time limit for scoring an answer, which runs in a worker process.
    """

    def __init__(self, task: str | None = None, system_prompt: str = SYSTEM, timeout_seconds: float = 15) -> None:
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
    """Return the last ``<answer>``, else the number at the end of the last line, else that line."""
    text = text.rpartition("</think>")[2]
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1]).strip()
    line = text.strip().rpartition("\n")[2].strip()
    number = re.search(r"(-?\d+(?:\.\d+)?)\.?$", line)
    return number.group(1) if number else line


def score(task: str, answer: str, row: dict[str, Any]) -> float:
    """Return reasoning-gym's score of an answer; ``row`` has question, answer and metadata."""
    import reasoning_gym

    return float(reasoning_gym.get_score_answer_fn(task)(answer=answer, entry=row))
