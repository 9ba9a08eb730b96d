"""The conversations to train on: replace them by yours, or name your files in config.yaml."""

import random

COLORS = ["red", "green", "blue", "yellow", "white", "black"]


def rows(size, seed):
    """Return conversations; the assistant's messages are trained."""
    draws = random.Random(seed)
    return [
        {
            "messages": [
                {"role": "user", "content": f"Which color has bird number {number}?"},
                {"role": "assistant", "content": f"Bird number {number} is {draws.choice(COLORS)}."},
            ]
        }
        for number in range(size)
    ]
