"""An agent that shows a picture in each of its two calls, and a reward function for its answers."""

from __future__ import annotations
import base64
import io
from typing import Any, ClassVar
from openai import AsyncOpenAI
from PIL import Image


class LooksTwice:
    """Shows the row's pictures, one in each call; scores the letters of its answers."""

    tint: ClassVar[int] = 0
    """Added to the red of each picture."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = []
        score = 0.0
        for red in data["reds"]:
            file = io.BytesIO()
            Image.new("RGB", (24, 16), (red + type(self).tint, 0, 0)).save(file, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
            messages.append({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
            completion = await client.chat.completions.create(model="default", messages=messages)
            text = completion.choices[0].message.content or ""
            score += sum(c.isalpha() for c in text)
            messages.append({"role": "assistant", "content": text})
        return score


def rows(size: int = 4) -> list[dict[str, Any]]:
    return [{"reds": [20 * i, 100 + 20 * i]} for i in range(1, size + 1)]


def placeholders(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Return how many tokens of images the prompt has, and the first picture's red, as thousands."""
    assert prompt.count("<|image_pad|>") == prompt_ids.count(5)
    return prompt_ids.count(5) + 1000.0 * row["reds"][0]
