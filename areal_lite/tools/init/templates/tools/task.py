"""The task: products of two numbers, with a tool that multiplies."""

import json
import random
import re

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def rows(size, seed):
    """Return the dataset rows; an episode gets one as ``data``."""
    draws = random.Random(seed)
    pairs = [(draws.randint(2, 20), draws.randint(2, 20)) for _ in range(size)]
    return [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in pairs]


def call_tool(function):
    """Return the result of a call; the model's mistakes are text for it to read."""
    try:
        arguments = json.loads(function.arguments)
        return str(int(arguments["a"]) * int(arguments["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error!r}"[:200]


def reward(text, answer):
    """Return 1 if the last number of ``text`` is the answer, else 0."""
    return float(re.findall(r"\d+", text or "")[-1:] == [answer])
