"""Pictures of coloured squares, with a question that only the picture answers: which colour, or how many."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
CELLS = 2  # squares along an edge
CELL = 8  # pixels along an edge of a square


def rows(size: int = 256, seed: int = 1, task: str = "colour", blank: bool = False) -> list[dict[str, Any]]:
    """Return rows with ``messages`` and ``images``; ``task`` is colour or count, ``blank`` hides the squares."""
    rng = random.Random(seed)
    return [_row(rng, task, blank) for _ in range(size)]


def _row(rng: random.Random, task: str, blank: bool) -> dict[str, Any]:
    count = rng.randint(1, CELLS**2)
    name = rng.choice(list(COLOURS))
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (rng.randint(0, 40),) * 3)
    for place in rng.sample(range(CELLS**2), 0 if blank else count):
        left, top = CELL * (place % CELLS), CELL * (place // CELLS)
        picture.paste(
            tuple(part + rng.randint(-15, 15) for part in COLOURS[name]), (left, top, left + CELL, top + CELL)
        )
    file = io.BytesIO()
    picture.save(file, "PNG")
    question, answer = ("Which colour?", name) if task == "colour" else ("How many?", str(count))
    messages = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [file.getvalue()]}
