"""What was asked, answered and scored at one training step, as JSON lines to look at.

Guarantees that a file appears whole, and that none is ever replaced: a step that is trained again after a
resume gets a file of its own. The trajectories themselves are dumped by the engine; here are the scores
that the trainer saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from areal_lite.data.rows.collate import form_of
from areal_lite.data.whole_file import write_whole
from areal_lite.errors import StorageError

_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def dump_rollouts(
    directory: Path | str,
    step: int,
    *,
    inputs: Sequence[Any],
    outputs: Sequence[str],
    gts: Sequence[Any],
    scores: Sequence[float],
    extra: Mapping[str, Sequence[Any]] | None = None,
) -> Path:
    """Write ``{step}.jsonl``, one line per row, and return its path; ``{step}.1.jsonl`` and so on if it is there.

    A line has ``input``, ``output``, ``gts``, ``score``, ``step`` and what ``extra`` holds. Numbers and arrays
    of numpy are written as JSON; what is not finite is null.

    Args:
        directory: Where the files of all steps are.
        step: The training step.
        inputs: ``[B]`` prompts, text or messages.
        outputs: ``[B]`` answers.
        gts: ``[B]`` what the answers are judged by (ground truths).
        scores: ``[B]`` rewards.
        extra: More columns ``[B]`` by name.

    Raises:
        ValueError: If a column has another length, the name of a field above, or a value that JSON has no word for.
        StorageError: If the disk is full or not writable.
    """
    columns = {"input": inputs, "output": outputs, "gts": gts, "score": scores, "step": [step] * len(inputs)}
    if taken := columns.keys() & (extra or {}).keys():
        raise ValueError(f"extra has {sorted(taken)}, which every line has already: leave out or rename")
    columns |= extra or {}
    for name, column in columns.items():
        if len(column) != len(inputs):
            raise ValueError(
                f"step {step}: {name} has {len(column)} entries for {len(inputs)} inputs: give one per row"
            )
    rows = zip(*columns.values(), strict=True)
    content = b"".join(
        orjson.dumps({name: _json(name, value) for name, value in zip(columns, row, strict=True)}) + b"\n"
        for row in rows
    )
    folder = Path(directory)
    names = (f"{step}{f'.{number}' if number else ''}.jsonl" for number in count())
    path = next(folder / name for name in names if not (folder / name).exists())
    try:
        write_whole(path, content)
    except OSError as error:
        raise StorageError(
            f"the rollouts of step {step} cannot be written to {path}: {error}: free disk space or mend its permissions"
        ) from error
    return path


def _json(name: str, value: Any) -> orjson.Fragment:
    try:
        return orjson.Fragment(orjson.dumps(value, default=_plain, option=_JSON))
    except TypeError as error:
        raise ValueError(
            f"{name} is {form_of(value)} that cannot be written as JSON ({error.__cause__ or error}): give numbers, "
            "text, lists, dicts or arrays"
        ) from error


def _plain(value: Any) -> Any:
    """Return arrays of objects and tensors as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{form_of(value)} has no JSON form")
