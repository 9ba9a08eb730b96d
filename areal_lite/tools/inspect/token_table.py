"""A record token by token, and where two records begin to differ."""

from __future__ import annotations
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from os.path import commonprefix
from pathlib import Path
from typing import Any
from areal_lite.api.image_span import ImageSpan
from areal_lite.tools.inspect.dumped_images import dumped_images
from areal_lite.tools.inspect.last_answer import run_tokenizer

Record = Mapping[str, Any]
FACTS = (
    *("advantages", "importance_weights", "clipped", "policy_logprobs", "proximal_logprobs", "reference_logprobs"),
    *("entropy", "values", "returns"),
)
"""Lists of a turn with training facts (:mod:`.training_facts`)."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a record; None where the dump does not say."""

    index: int
    turn: int
    role: str | None
    id: int | None
    text: str | None
    mask: int | None
    """1 where the token trains."""
    logprob: float | None
    version: int | None
    image: ImageSpan | None = None
    """The image that it is a part of, with the offset in the record."""
    facts: dict[str, float | None] = field(default_factory=dict)


def tokens(record: Record, decode: Callable[[int], str] | None = None) -> Iterator[Token]:
    """Yield the tokens of a record; ``decode`` gives the text of an id."""
    index = 0
    for turn_index, turn in enumerate(record["turns"]):
        columns = [turn.get(name) or () for name in ("ids", "loss_mask", "logprobs", "versions")]
        known = [name for name in FACTS if turn.get(name)]
        images = [image.moved(index) for image in dumped_images(turn)]
        for id, mask, logprob, version, *values in zip_longest(*columns, *(turn[name] for name in known)):
            text = None if decode is None or id is None else decode(id)
            facts = dict(zip(known, values, strict=True))
            image = next((each for each in images if each.offset <= index < each.end), None)
            yield Token(index, turn_index, turn.get("role"), id, text, mask, logprob, version, image, facts)
            index += 1


def decoder(root: Path) -> Callable[[int], str] | None:
    """Return the function from an id to its text, by the tokenizer of the run in ``root``; None without one."""
    tokenizer = run_tokenizer(root)
    return None if tokenizer is None else lambda id: str(tokenizer.decode([id], skip_special_tokens=False))


def first_token_difference(first: Record, second: Record) -> tuple[int, Token | None, Token | None] | None:
    """Return the first index where ids or images differ, and both tokens (None past the end); None if all agree."""
    for index, (a, b) in enumerate(zip_longest(tokens(first), tokens(second))):
        if a is None or b is None or (a.id, a.image) != (b.id, b.image):
            return index, a, b
    return None


def first_text_difference(first: Record, second: Record) -> tuple[int, str, str] | None:
    """Return the first index where the texts of two records differ, and both texts; None if they are equal."""
    a, b = ("".join(turn.get("text") or "" for turn in record["turns"]) for record in (first, second))
    return None if a == b else (len(commonprefix([a, b])), a, b)
