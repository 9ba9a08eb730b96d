"""The task: which of four numbers is the largest?"""

import random
import re


def rows(size, seed):
    """Return the dataset rows; an episode gets one as ``data``."""
    draws = random.Random(seed)
    numbers = [draws.sample(range(1, 100), 4) for _ in range(size)]
    return [{"question": f"Which is the largest number: {n}?", "answer": str(max(n))} for n in numbers]


def reward(text, answer):
    """Return 1 if the last number of ``text`` is the answer, else 0."""
    return float(re.findall(r"\d+", text or "")[-1:] == [answer])
