"""Conversations about made-up animals, which a model can only know from training on them."""

from __future__ import annotations
import random
from collections.abc import Iterator
from typing import Any

ANIMALS = ("glimp", "farlow", "snorrick", "mubbet", "quillop", "dreven", "tazzle", "ombry")
PARTS = ("ears", "teeth", "feathers", "feet")
COLOURS = ("red", "green", "violet", "silver", "orange", "black", "white", "blue")
DAYS = ("Monday", "Tuesday", "Friday", "Sunday")


def conversations(size: int = 32, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows with ``messages``: a question and its answer. There are 32 distinct questions."""
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in _facts(size, seed)
    ]


def pairs(size: int = 32, seed: int = 1) -> list[dict[str, Any]]:
    """Return rows with ``prompt``, ``chosen`` (a direct answer) and ``rejected`` (a wordy one)."""
    return [
        {
            "prompt": question,
            "chosen": answer,
            "rejected": f"Well, that is a good question, and as everyone knows: {answer}",
        }
        for question, answer in _facts(size, seed)
    ]


def _facts(size: int, seed: int) -> Iterator[tuple[str, str]]:
    rng = random.Random(seed)
    subjects = [(animal, part) for animal in ANIMALS for part in PARTS]
    rng.shuffle(subjects)
    for animal, part in subjects[:size]:
        colour, other = rng.sample(COLOURS, 2)
        yield (
            f"Which colour are the {part} of the {animal}?",
            f"The {animal}'s {part} are {colour}, but {other} on a {rng.choice(DAYS)}.",
        )
