"""Pictures of coloured squares, with a question that only the picture answers: which colour, or how many."""

from __future__ import annotations
import base64
import io
import random
from typing import Any
from openai import AsyncOpenAI
from PIL import Image

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
CELLS = 2  # squares along an edge
CELL = 8  # pixels along an edge of a square


def rows(size: int = 256, seed: int = 1, task: str = "colour", hidden: str = "") -> list[dict[str, Any]]:
    """Return rows with ``messages`` and ``images``; ``task`` is colour or count. ``hidden: squares`` gives blank
    pictures, ``hidden: answers`` random answers, which teach the words alone."""
    rng = random.Random(seed)
    made = [_row(rng, task, blank=hidden == "squares") for _ in range(size)]
    if hidden == "answers":
        answers = [row["messages"][1] for row in made]
        rng.shuffle(answers)
        for row, answer in zip(made, answers, strict=True):
            row["messages"][1] = answer
    return made


def questions(size: int = 256, seed: int = 1, task: str = "colour", hidden: str = "") -> list[dict[str, Any]]:
    """Return the same rows for the agent below: ``question``, ``answer`` and ``image``, a data URL."""
    return [
        {
            "question": row["messages"][0]["content"].removeprefix("<image>"),
            "answer": row["messages"][1]["content"],
            "image": f"data:image/png;base64,{base64.b64encode(row['images'][0]).decode()}",
        }
        for row in rows(size, seed, task, hidden)
    ]


class SquaresAgent:
    """Sends the picture with its question; reward 1 if the answer is right."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": data["image"]}},
            {"type": "text", "text": data["question"]},
        ]
        completion = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": parts}]
        )
        return float((completion.choices[0].message.content or "").strip() == data["answer"])


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
