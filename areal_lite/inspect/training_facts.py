"""Training facts beside the dump: what the trainer computed for the tokens of a dumped line.

Reads the files of :mod:`areal_lite.trainer.token_facts`. A file that is missing or cannot be read has no rows here;
``areal-lite verify`` reports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
FOLDER = "training"
KEYS = ("task_id", "group_id", "member_idx", "sample_idx", "reward", "baseline", "token_idx")
"""Columns with one value per row, and the place of each trained token in its line."""


def fact_files(root: Path) -> dict[int, Path]:
    """Return the files of the run in ``root`` by step, in order."""
    found = {int(path.stem): path for path in (root / FOLDER).glob("*.parquet") if path.stem.isdecimal()}
    return dict(sorted(found.items()))


def facts_of(root: Path, record: Record) -> dict[str, Any] | None:
    """Return the row of an accepted line: its step, reward, and lists as long as the line; None if it has none."""
    if record.get("status") != "accepted" or record.get("scope") == "eval-rollout":
        return None
    key, tail = (str(record["task_id"]), record.get("sample_idx")), record.get("tail_version")
    for step, path in fact_files(root).items():
        if tail is None or step > tail:
            with contextlib.suppress(OSError, ValueError):  # pyarrow's errors are among them
                state = path.stat().st_mtime_ns
                if (place := _places(path, state).get(key)) is not None:
                    return {"step": step, **_aligned(_row(path, place), record)}
    return None


def with_facts(root: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with its facts: ``trained_step``, and lists of its answers, None where nothing trains."""
    facts = facts_of(root, record)
    if facts is None:
        return record
    lists = {name: values for name, values in facts.items() if isinstance(values, list)}
    turns, start = [], 0
    for turn in record["turns"]:
        end = start + len(turn.get("ids") or ())
        own = {name: values[start:end] for name, values in lists.items()} if turn.get("role") == "assistant" else {}
        turns.append({**turn, **own})
        start = end
    return {**record, "trained_step": facts["step"], "turns": turns}


def _aligned(row: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """Return the row with a value or None for every token of the line."""
    length = sum(len(turn.get("ids") or ()) for turn in record["turns"])
    aligned: dict[str, Any] = {"reward": row["reward"]}
    for name in [name for name in row if name not in (*KEYS, "behaviour_logprobs")]:
        values: list[float | None] = [None] * length
        for index, value in zip(row["token_idx"], row[name], strict=True):
            if index < length:
                values[index] = value
        aligned[name] = values
    return aligned


@lru_cache(maxsize=4096)
def _places(path: Path, state: int) -> dict[tuple[str, int | None], int]:
    """Return the row of each dumped line; ``state`` tells versions of the file apart."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    keys = parquet.read_table(path, columns=["task_id", "sample_idx"]).to_pydict()
    return {key: row for row, key in enumerate(zip(keys["task_id"], keys["sample_idx"], strict=True))}


def _row(path: Path, place: int) -> dict[str, Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        group = 0
        while place >= (size := file.metadata.row_group(group).num_rows):
            place, group = place - size, group + 1
        row: dict[str, Any] = file.read_row_group(group).slice(place, 1).to_pylist()[0]
        return row
