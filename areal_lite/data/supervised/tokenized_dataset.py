"""Rows of conversations as items to train on, tokenized when they are read.

Guarantees that items keep the order of the rows and carry their row's number, that the number of items is known from
the start, that an error names its row, and that skipped sequences are counted by reason. Subclasses decide how a row
becomes sequences and which ones to skip. Knows nothing of batches or packing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from areal_lite.config.supervised_config import ConversationsConfig
from areal_lite.data.chat.chat_text import Shortfall
from areal_lite.data.chat.prompt_encoder import without_nulls
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.data.rows.row_files import place_of_row
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import cached_file

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Item = dict[str, torch.Tensor]
S = TypeVar("S")
"""Text of one item: a sequence, or a pair of them."""
C = TypeVar("C", bound=ConversationsConfig)
_CHUNK = 512
"""Rows checked at once."""
_LOG_EVERY_S = 15.0
_INDEX_FORMAT = 1
"""Part of an index's file name; raise it when a row may give other items than before."""


class RowTokenizer(ABC, Generic[S]):
    """How a row becomes items. Worker processes get a copy."""

    @abstractmethod
    def texts(self, row: Row) -> Sequence[S]:
        """Return the rendered sequences of a row, or pairs of them."""

    @abstractmethod
    def shortfalls(self, text: S) -> frozenset[Shortfall]:
        """Return what the chat template leaves out."""

    @abstractmethod
    def skip_reason(self, text: S) -> str | None:
        """Return why to skip this text, or None to train on it; tokenizes only if the text's length cannot tell."""

    @abstractmethod
    def item(self, text: S) -> Item:
        """Return the tensors of an item."""


class BaseDataset(Dataset[Item], Generic[S]):
    """The items of a run's rows.

    An item holds ``[T]`` int64 tensors of ids and masks, and ``row``, the number of its row from 0. It is rendered and
    tokenized when it is read. The constructor renders each row once to learn how many items there are, which also
    finds every row that cannot be trained, and keeps 12 bytes per item. For rows of files this index is stored in the
    cache, so a second start with the same rows, tokenizer and settings reads it instead.

    Args:
        data_path: Paths as in ``config.path``, or the rows themselves: dicts, or a ``datasets.Dataset``.
        tokenizer: The model's Hugging Face tokenizer.
        config: All settings except ``path``. Rows given directly are all used, in their order. With ``num_workers``
            above 0, each worker imports the main module again, so a script needs ``if __name__ == "__main__"``.
        tokenize: How a row becomes items.
        seed: Chooses the rows if ``config`` sets ``max_samples`` and ``shuffle``.

    Raises:
        ConfigError: If there are no rows, one is damaged, or all are skipped.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        config: ConversationsConfig,
        tokenize: RowTokenizer[S],
        *,
        seed: int = 1,
    ) -> None:
        if not data_path:
            raise ConfigError("there are no rows: give at least one, or the path of a file")
        rows: Any = data_path
        paths: list[str] = []
        if isinstance(rows, str) or isinstance(rows[0], str):
            paths = [rows] if isinstance(rows, str) else list(rows)
            rows = load_rows(replace(config, path=rows if isinstance(rows, str) else paths), seed=seed)
        self.tokenizer = tokenizer
        self.max_length = config.max_length
        self.rows = rows
        self._tokenize = tokenize
        self._padded = _padded_columns(rows)
        self._latest: tuple[int | None, Sequence[S]] = None, ()
        self._index = self._stored_index(config, paths)
        self.dropped = Counter(self._index.dropped)
        """Skipped sequences by reason."""
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not len(self):
            raise ConfigError(
                f"all {len(rows)} rows were skipped: {reasons}: raise max_length={self.max_length}, or fix the rows"
            )
        if reasons:
            logger.warning("some of %d rows were skipped: %s", len(rows), reasons)
        for shortfall, number in self._index.shortfalls.items():
            logger.warning("row %d, and perhaps others: %s", number, Shortfall[shortfall])

    def __len__(self) -> int:
        return len(self._index.rows)

    def __getitem__(self, index: int) -> Item:
        number, sequence = int(self._index.rows[index]), int(self._index.places[index])
        latest, texts = self._latest
        if latest != number:
            texts = self._texts(self.rows[number])
            self._latest = number, texts
        return self._tokenize.item(texts[sequence]) | {"row": torch.tensor(number)}

    def collate_fn(self, batch: Sequence[Item]) -> list[Item]:
        """Return the items as a list: they differ in length, and the trainer packs them."""
        return list(batch)

    def _texts(self, row: Row) -> Sequence[S]:
        return self._tokenize.texts(
            {name: without_nulls(value) if name in self._padded else value for name, value in row.items()}
        )

    def _stored_index(self, config: ConversationsConfig, paths: list[str]) -> _Index:
        made_from = _identity(self.rows, self.tokenizer, config, type(self).__name__)
        if made_from is None:
            return self._make_index(config, paths)
        folder = Path(config.cache_dir or "~/.cache/areal_lite").expanduser() / "indices"
        file = folder / f"{made_from}.npz"
        if file.exists():
            return _Index.load(file)
        index = self._make_index(config, paths)
        cached_file(file, index.save)
        return index

    def _make_index(self, config: ConversationsConfig, paths: list[str]) -> _Index:
        dropped = Counter[str]()
        shortfalls: dict[str, int] = {}
        numbers: list[NDArray[np.int64]] = []
        places: list[NDArray[np.int32]] = []
        logged = time.monotonic()
        for first, checked in self._checked(config.num_workers):
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                logger.info("checked %d of %d rows", first, len(self.rows))
            kept: list[tuple[int, int]] = []
            for number, row in enumerate(checked, first):
                if row.error is not None:
                    where = place_of_row(paths, self.rows[number], cache_dir=config.cache_dir)
                    raise ConfigError(f"row {number}{f' ({where})' if where else ''}: {row.error}")
                dropped.update(reason for reason in row.reasons if reason)
                kept += [(number, sequence) for sequence, reason in enumerate(row.reasons) if not reason]
                for shortfall in row.shortfalls:
                    shortfalls.setdefault(shortfall.name, number)
            numbers.append(np.array([number for number, _ in kept], np.int64))
            places.append(np.array([sequence for _, sequence in kept], np.int32))
        return _Index(np.concatenate(numbers), np.concatenate(places), dropped, shortfalls)

    def _checked(self, num_workers: int) -> Iterator[tuple[int, list[_CheckedRow]]]:
        starts = range(0, len(self.rows), _CHUNK)
        if num_workers == 0:
            yield from ((start, self._check(start)) for start in starts)
            return
        # A child forked from a process with tokenizer and torch threads may hang.
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(num_workers, mp_context=spawn, initializer=_share, initargs=(self,))
        try:
            yield from zip(starts, pool.map(_check_in_worker, starts), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)

    def _check(self, start: int) -> list[_CheckedRow]:
        stop = min(start + _CHUNK, len(self.rows))
        select = getattr(self.rows, "select", None)
        chunk = self.rows[start:stop] if select is None else select(range(start, stop))
        return [self._check_row(row) for row in chunk]

    def _check_row(self, row: Row) -> _CheckedRow:
        try:
            texts = self._texts(row)
            reasons = [self._tokenize.skip_reason(text) or "" for text in texts]
        except ConfigError as error:
            return _CheckedRow(error=str(error))
        return _CheckedRow(reasons, frozenset[Shortfall]().union(*map(self._tokenize.shortfalls, texts)))


class _CheckedRow(NamedTuple):
    reasons: Sequence[str] = ()
    """Reason for skipping each sequence; empty to train on it."""
    shortfalls: frozenset[Shortfall] = frozenset()
    error: str | None = None


class _Index(NamedTuple):
    rows: NDArray[np.int64]
    places: NDArray[np.int32]
    dropped: Counter[str]
    shortfalls: dict[str, int]
    """Name of each shortfall, and the first row with it."""

    def save(self, path: Path) -> None:
        facts = json.dumps([self.dropped, self.shortfalls])
        np.savez(path, rows=self.rows, places=self.places, facts=np.array(facts))

    @classmethod
    def load(cls, path: Path) -> _Index:
        with np.load(path) as stored:
            dropped, shortfalls = json.loads(str(stored["facts"]))
            return cls(stored["rows"], stored["places"], Counter(dropped), shortfalls)


_shared: list[BaseDataset[Any]] = []
"""The dataset of a worker process."""


def _share(dataset: BaseDataset[Any]) -> None:
    _shared[:] = [dataset]


def _check_in_worker(start: int) -> list[_CheckedRow]:
    return _shared[0]._check(start)


def config_with_length(record: type[C], config: C | None, max_length: int | None) -> C:
    """Return ``config`` (default: a plain ``record``), with ``max_length`` instead of its own unless that is None."""
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


def surely_within(text: str, max_length: int) -> bool:
    """Return whether ``text`` has at most ``max_length`` tokens, as no token is shorter than a byte."""
    return len(text.encode()) + 8 <= max_length  # a tokenizer may add a few of its own


def _identity(rows: Any, tokenizer: Any, config: ConversationsConfig, kind: str) -> str | None:
    """Return a hash of all that decides which items the rows have; None for rows or tokenizers without a fingerprint.

    The loader compares the content of items itself, so a hash that is the same by accident cannot train other rows.
    """
    fingerprint, backend = getattr(rows, "_fingerprint", None), getattr(tokenizer, "backend_tokenizer", None)
    if fingerprint is None or backend is None:
        return None
    used = {"path", "cache_dir", "num_workers", "shuffle", "max_samples", "kwargs"}
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name not in used}
    facts = [_INDEX_FORMAT, kind, fingerprint, len(rows), settings]
    facts += [tokenizer.chat_template, tokenizer.special_tokens_map, backend.to_str()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _padded_columns(rows: Any) -> frozenset[str]:
    """Return the columns in which Arrow fills keys that a record lacks with None."""
    if not hasattr(rows, "features"):
        return frozenset()
    return frozenset(column.name for column in rows.features.arrow_schema if "struct<" in str(column.type))
