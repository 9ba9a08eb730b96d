"""Training facts beside the dump: what the trainer computed for the tokens of a dumped line. Reads
:mod:`areal_lite.trainer.rl.token_facts`. A missing or unreadable file has no rows here; ``verify`` reports it."""

import contextlib
import errno
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from areal_lite.tools.foreign_files import MAX_TENSORS, open_inside

MAX_TABLE = 1 << 33
"""Bytes of a table when it is unpacked: facts of 100 million tokens of a step."""
FOLDER = "training"
_NOT_SHOWN = ("token_idx", "behaviour_logprobs")
"""Lists that the turns have already."""
_MEANS = ("advantages", "entropy", "clipped")


def fact_files(root: Path) -> dict[int, Path]:
    """Return the files of the run in ``root`` by step, in order."""
    found = {int(path.stem): path for path in (root / FOLDER).glob("*.parquet") if path.stem.isdecimal()}
    return dict(sorted(found.items()))


def with_facts(root: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the facts of its ``trained_step``: lists of its answers, None where nothing trains."""
    if (row := _row(root, record)) is None:
        return record
    positions = {index: position for position, index in enumerate(row["token_idx"])}
    lists = {name: values for name, values in row.items() if isinstance(values, list) and name not in _NOT_SHOWN}
    turns, start = [], 0
    for turn in record["turns"]:
        end = start + len(turn.get("ids") or ())
        if turn.get("role") == "assistant":
            at = [positions.get(index) for index in range(start, end)]
            own = {name: [None if each is None else values[each] for each in at] for name, values in lists.items()}
            turn = {**turn, **own}
        turns.append(turn)
        start = end
    return {**record, "turns": turns}


def fact_means(path: Path, root: Path) -> Iterator[tuple[tuple[str, int | None], list[float | None]]]:
    """Yield task and sample of each line in a file of facts, and the means of its tokens: advantage, entropy, and
    whether it was clipped; None without one. Yields nothing of a file that cannot be read."""
    with contextlib.suppress(OSError, ValueError, LookupError), open_table(path, root) as file:
        table = file.read(["task_id", "sample_idx", *_MEANS])  # those of them that it has
        lists = {name: table[name].to_numpy() for name in _MEANS if name in table.column_names}
        for row, key in enumerate(zip(table["task_id"].to_pylist(), table["sample_idx"].to_pylist(), strict=True)):
            yield key, [_mean(lists[name][row], name) if name in lists else None for name in _MEANS]


def _mean(values: Any, name: str) -> float | None:
    known: Any = [] if values is None else values[values == values]  # without NaN
    return float((abs(known) if name == "clipped" else known).mean()) if len(known) else None


def _row(root: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts of a line; None without any, or if their file cannot be read."""
    path = root / FOLDER / f"{record.get('trained_step')}.parquet"
    # pyarrow's errors are among these
    with contextlib.suppress(OSError, ValueError, LookupError), open_table(path, root) as file:
        keys = file.read(["task_id", "sample_idx"]).to_pydict()
        lines = list(zip(keys["task_id"], keys["sample_idx"], strict=True))
        index, group = lines.index((str(record["task_id"]), record.get("sample_idx"))), 0
        while index >= (size := file.metadata.row_group(group).num_rows):
            index, group = index - size, group + 1
        row: dict[str, Any] = file.read_row_group(group).slice(index, 1).to_pylist()[0]
        return row
    return None


@contextlib.contextmanager
def open_table(path: Path, folder: Path) -> Iterator[Any]:
    """Open a file of facts as :func:`open_inside` does; raises OSError if it unpacks to too many bytes."""
    from pyarrow import parquet  # type: ignore[import-untyped]

    with open_inside(path, folder, most=MAX_TENSORS) as stream, parquet.ParquetFile(stream) as file:
        groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
        if (size := sum(group.total_byte_size for group in groups)) > MAX_TABLE:
            raise OSError(errno.EFBIG, f"{size} bytes when unpacked, of which at most {MAX_TABLE} are read", str(path))
        yield file
