"""An agent for any reasoning-gym task; get rows with ``path: reasoning-gym:TASK``."""

from __future__ import annotations
from typing import Any
from openai import AsyncOpenAI
from areal_lite.api import AsyncRewardWrapper
from areal_lite.environments.adapters.reasoning_gym import final_answer, score

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
