"""Rows of conversations as items to train on, all tokenized at once.

Guarantees that items keep the order of the rows and say which row they are of, that an error in a row names it, and
that what is left out is counted by reason. What a row's sequences are, and which are left out, a subclass says. How
files become rows: ``row_files``. Knows nothing of batches or packing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset

from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Item = dict[str, torch.Tensor]
S = TypeVar("S")
"""What becomes one item: a sequence, or a pair of them."""
_CHUNK = 256
"""Rows that go to a worker process at once."""


class BaseDataset(Dataset[Item], ABC, Generic[S]):
    """The items of a run's rows.

    An item holds ``[T]`` int64 tensors of ids and masks, and ``row``, the number of its row from 0. Everything is
    tokenized at once, since only then is it known how many items there are: 2 milliseconds for a row of 3 answers and
    640 tokens, 22 for one of 20 and 4300, in one process. An item takes 5 bytes a token.

    Args:
        data_path: What ``row_files.load_dataset`` reads, or the rows: dicts, or a ``datasets.Dataset``.
        tokenizer: The model's Hugging Face tokenizer.
        max_length: Longest sequence in tokens.
        sequences_of: Makes the sequences of a row; a worker process gets a copy.
        cache_dir: Folder for copies of remote files and tables of read ones; None is ~/.cache/areal_lite.
        num_workers: Processes that tokenize; 0 is this one. Each imports the main module again, so a script
            needs ``if __name__ == "__main__"``.

    Raises:
        ConfigError: If ``max_length`` is below 2, there are no rows, one is damaged, or all are left out.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        max_length: int,
        sequences_of: Callable[[Row], Sequence[S]],
        *,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        if max_length < 2:
            raise ConfigError(
                f"max_length is {max_length}: the first token of a sequence is never trained, so use 2 or more"
            )
        if not data_path:
            raise ConfigError("there are no rows: give at least one, or the path of a file")
        rows: Any = [data_path] if isinstance(data_path, str) else data_path
        if isinstance(rows[0], str):
            from areal_lite.data.rows.row_files import load_dataset

            rows = load_dataset(rows, cache_dir=cache_dir)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.rows = rows
        self.dropped: Counter[str] = Counter()
        """What was left out, by reason."""
        self._items: list[Item] = []
        for number, found in enumerate(
            _map(_RowReader(sequences_of, _padded_columns(rows)), rows, num_workers)
        ):
            for sequences in found:
                item = self._item(sequences)
                if isinstance(item, str):
                    self.dropped[item] += 1
                else:
                    self._items.append(item | {"row": torch.tensor(number)})
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not self._items:
            raise ConfigError(
                f"nothing is trained, all of {len(rows)} rows are left out: {reasons}: raise max_length={max_length}, "
                "or mend the rows"
            )
        if reasons:
            logger.warning("of %d rows, some are left out: %s", len(rows), reasons)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return {name: tensor.long() for name, tensor in self._items[index].items()}

    def collate_fn(self, batch: Sequence[Item]) -> list[Item]:
        """Return the items as a list: they differ in length, and are packed where devices are known."""
        return list(batch)

    @abstractmethod
    def _item(self, sequences: S) -> Item | str:
        """Return the tensors of an item, int32 ids and bool masks, or the reason for which it is left out."""


def from_json(row: Row, key: str) -> Any:
    """Return a column that holds a list, or JSON text of one; ConfigError where its text is no JSON."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{key!r} is the text {value[:80]!r}, which is not JSON ({error}): it must be a list, or JSON text of one"
        ) from error


@dataclass(frozen=True, slots=True)
class _RowReader(Generic[S]):
    """What a worker process needs to turn a row into sequences."""

    sequences_of: Callable[[Row], Sequence[S]]
    padded: frozenset[str]

    def __call__(self, numbered: tuple[int, Row]) -> Sequence[S]:
        number, row = numbered
        try:
            return self.sequences_of(
                {name: _without_none(value) if name in self.padded else value for name, value in row.items()}
            )
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error


def _map(read: _RowReader[S], rows: Sequence[Row], num_workers: int) -> Iterator[Sequence[S]]:
    if num_workers == 0:
        yield from map(read, enumerate(rows))
        return
    # A forked child of a process with tokenizer and torch threads may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        yield from pool.map(read, enumerate(rows), chunksize=_CHUNK)


def _padded_columns(rows: Any) -> frozenset[str]:
    """Return the columns in which Arrow gave each record the keys of all others, with None for a value."""
    if not hasattr(rows, "features"):
        return frozenset()
    return frozenset(column.name for column in rows.features.arrow_schema if "struct<" in str(column.type))


def _without_none(value: Any) -> Any:
    """Return the value without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
