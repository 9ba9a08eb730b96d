"""Rows of conversations as items to train on, all tokenized at once.

Guarantees that items keep the order of the rows and carry their row's number, that an error names its row, and that
skipped sequences are counted by reason. Subclasses decide how a row becomes sequences and which ones to skip. Knows
nothing of batches or packing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset

from areal_lite.api.supervised_config import ConversationsConfig
from areal_lite.data.chat.prompt_encoder import without_nulls
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Item = dict[str, torch.Tensor]
S = TypeVar("S")
"""Source of one item: a sequence, or a pair of them."""
C = TypeVar("C", bound=ConversationsConfig)
_CHUNK = 256
"""Rows sent to a worker process at once."""


class BaseDataset(Dataset[Item], ABC, Generic[S]):
    """The items of a run's rows.

    An item holds ``[T]`` int64 tensors of ids and masks, and ``row``, the number of its row from 0. The number of
    items is known only after tokenizing, so the constructor tokenizes everything. One process takes 2 ms for a row of
    3 answers and 640 tokens, 22 ms for 20 answers and 4300 tokens. An item takes 5 bytes per token.

    Args:
        data_path: Paths as in ``config.path``, or the rows themselves: dicts, or a ``datasets.Dataset``.
        tokenizer: The model's Hugging Face tokenizer.
        config: All settings except ``path``. Rows given directly are all used, in their order. With ``num_workers``
            above 0, each worker imports the main module again, so a script needs ``if __name__ == "__main__"``.
        sequences_of: Returns the sequences of a row; a worker process gets a copy.
        seed: Chooses the rows if ``config`` sets ``max_samples`` and ``shuffle``.

    Raises:
        ConfigError: If there are no rows, one is damaged, or all are skipped.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        config: ConversationsConfig,
        sequences_of: Callable[[Row], Sequence[S]],
        *,
        seed: int = 1,
    ) -> None:
        if not data_path:
            raise ConfigError("there are no rows: give at least one, or the path of a file")
        rows: Any = data_path
        if isinstance(rows, str):
            rows = load_rows(replace(config, path=rows), seed=seed)
        elif isinstance(rows[0], str):
            rows = load_rows(replace(config, path=list(rows)), seed=seed)
        self.tokenizer = tokenizer
        self.max_length = config.max_length
        self.rows = rows
        self.dropped: Counter[str] = Counter()
        """Skipped sequences by reason."""
        self._items: list[Item] = []
        read = _RowReader(sequences_of, _padded_columns(rows))
        for number, row_sequences in enumerate(_map(read, rows, config.num_workers)):
            for sequences in row_sequences:
                item = self._item(sequences)
                if isinstance(item, str):
                    self.dropped[item] += 1
                else:
                    self._items.append(item | {"row": torch.tensor(number)})
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not self._items:
            raise ConfigError(
                f"all {len(rows)} rows were skipped: {reasons}: raise max_length={self.max_length}, or fix the rows"
            )
        if reasons:
            logger.warning("some of %d rows were skipped: %s", len(rows), reasons)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return {name: tensor.long() for name, tensor in self._items[index].items()}

    def collate_fn(self, batch: Sequence[Item]) -> list[Item]:
        """Return the items as a list: they differ in length, and the trainer packs them."""
        return list(batch)

    @abstractmethod
    def _item(self, sequences: S) -> Item | str:
        """Return the tensors of an item (int32 ids and bool masks), or the reason to skip it."""


def config_with_length(record: type[C], config: C | None, max_length: int | None) -> C:
    """Return ``config`` (default: a plain ``record``), with ``max_length`` in place of its own unless that is None.

    Raises:
        ConfigError: If both are None, or ``max_length`` is below 2.
    """
    if max_length is None:
        if config is None:
            raise ConfigError("neither max_length nor config is given: give one")
        return config
    if max_length < 2:
        raise ConfigError(f"max_length is {max_length}: the first token is never trained, so use 2 or more")
    return record(path="", max_length=max_length) if config is None else replace(config, max_length=max_length)


def from_json(row: Row, key: str) -> Any:
    """Return a column that holds a list, or JSON text of a list."""
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
                {name: without_nulls(value) if name in self.padded else value for name, value in row.items()}
            )
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error


def _map(read: _RowReader[S], rows: Sequence[Row], num_workers: int) -> Iterator[Sequence[S]]:
    if num_workers == 0:
        yield from map(read, enumerate(rows))
        return
    # A child forked from a process with tokenizer and torch threads may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        yield from pool.map(read, enumerate(rows), chunksize=_CHUNK)


def _padded_columns(rows: Any) -> frozenset[str]:
    """Return the columns in which Arrow fills keys that a record lacks with None."""
    if not hasattr(rows, "features"):
        return frozenset()
    return frozenset(column.name for column in rows.features.arrow_schema if "struct<" in str(column.type))
