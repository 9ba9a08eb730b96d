"""``reasoning-gym:TASK``: questions with a verifier, one answer each. Rows are generated: row i from ``seed + i``."""

import re
from functools import cache, partial
from typing import Any
import reasoning_gym
from reasoning_gym.factory import DATASETS
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.environments.environment import Step
from areal_lite.environments.random_state import OwnRandom
from areal_lite.errors import ConfigError, did_you_mean

_NUMBER_AT_END = re.compile(r"(?:^(?:[^=]*=)?|[\d\s)]=|[$]|[^\W\d_]\s|:\s)\s*(-?\d+(?:\.\d+)?)\.?$")


class ReasoningGymTask:
    """Asks the row's question; the reward is reasoning-gym's score from 0 to 1, computed in a worker process.

    Args:
        task: Name of the task.
        instruction: What follows the question.
        timeout_s: Limit on scoring one answer, in seconds.
    """

    def __init__(self, task: str, *, instruction: str = "", timeout_s: float = 15.0) -> None:
        self._task, self._instruction, self._score = task, instruction, _scorer(timeout_s)

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self._row = row
        return f"{row['question']}\n\n{self._instruction}".strip()

    async def step(self, action: Any) -> Step:
        return Step(reward=await self._score(self._task, final_answer(action), self._row), done=True)

    async def close(self) -> None:
        pass

    def solution(self, row: dict[str, Any]) -> str:
        return f"<answer>{row['answer']}</answer>"

    @staticmethod
    def rows(task: str, **kwargs: Any) -> list[dict[str, Any]]:
        path = f"reasoning-gym:{task}"
        if task not in DATASETS:
            hint = did_you_mean(task, DATASETS, f"; the tasks are {', '.join(sorted(DATASETS))}", count=3)
            raise ConfigError(f"dataset {path}: reasoning-gym has no task {task!r}{hint}")
        if "seed" not in kwargs:
            raise ConfigError(
                f"dataset {path}: kwargs has no seed, so each start would generate different rows: set "
                "kwargs: {seed: 1}, and for held-out rows a seed at least size away"
            )
        try:
            with OwnRandom(kwargs["seed"] % 2**32).in_place():
                return [{**row, "task": task} for row in reasoning_gym.create_dataset(task, **kwargs)]
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"dataset {path}: kwargs {kwargs}: {error}") from None


def final_answer(text: str) -> str:
    """Return the last ``<answer>``, else the number that ends the last line, alone or after words, ``:`` or ``=``, else
    that line. A text without words, such as a grid of numbers, is the answer as a whole."""
    text = text.rpartition("</think>")[2].strip()
    if tagged := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tagged[-1]).strip()
    line = text.rpartition("\n")[2].strip()
    if number := _NUMBER_AT_END.search(line):
        return number[1]
    return line if re.search(r"[^\W\d_]{2}", text) else text


def score(task: str, answer: str, row: dict[str, Any]) -> float:
    """Return reasoning-gym's score of an answer; ``row`` has question, answer and metadata."""
    return float(reasoning_gym.get_score_answer_fn(task)(answer=answer, entry=row))


_scorer = cache(partial(AsyncRewardWrapper, score))
"""Returns the shared wrapper of :func:`score` with a limit in seconds."""
