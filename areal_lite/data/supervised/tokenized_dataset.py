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
import time
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset
from areal_lite.config.supervised_config import ConversationsConfig
from areal_lite.data.chat.chat_tokens import ChatText, Rendering, Shortfall
from areal_lite.data.chat.prompt_encoder import without_nulls
from areal_lite.data.rows.added_columns import collate_fn_of, rows_of_batch
from areal_lite.data.rows.load_rows import load_rows, select_rows
from areal_lite.data.rows.row_files import text_files
from areal_lite.data.rows.text_rows import located_rows
from areal_lite.data.vision.image_encoder import ImageEncoder
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import cached_file

logger = logging.getLogger(__name__)
Row = Mapping[str, Any]
Item = dict[str, Any]
Texts = tuple[ChatText, ...]  # text of one item: a sequence, or a pair of them
_CHUNK = 512
_LOG_EVERY_S = 15.0
_INDEX_FORMAT = 2  # part of an index's file name; raise it when a row may give other items than before


class BaseDataset(Dataset[Item], ABC):
    """The items of a run's rows.

    An item holds ``[T]`` int64 tensors of ids and masks, and ``row``, the number of its row from 0. It is rendered and
    tokenized when it is read. The constructor renders each row once to count the items, which also finds every row that
    cannot be trained, and keeps 12 bytes per item. For rows of files the cache has this index for the next start.
    ConfigError if there are no rows, one is damaged (with its number from 0), or all are skipped.

    Args:
        data_path: Paths as in ``config.path``, or the rows themselves: dicts, or a ``datasets.Dataset``.
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        max_length: Longest sequence in tokens; None uses ``config.max_length``.
        config: All settings except ``path``; needed if ``max_length`` is None. Rows given directly are all used, in
            their order. Workers import the main module again, so a script needs ``if __name__ == "__main__"``.
        seed: Chooses the rows if ``config`` sets ``max_samples`` and ``shuffle``.
        images: Encodes the images of rows, for a model that reads them.
    """

    config_class: type[ConversationsConfig] = ConversationsConfig

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        max_length: int | None = None,
        config: Any = None,
        *,
        seed: int = 1,
        images: ImageEncoder | None = None,
    ) -> None:
        if max_length is None and config is None:
            raise ConfigError("neither max_length nor config is given: give one")
        if max_length is not None and max_length < 2:
            raise ConfigError(f"max_length is {max_length}: the first token is never trained, so use 2 or more")
        if config is None:
            config = self.config_class(path="", max_length=max_length or 2)
        if not data_path:
            raise ConfigError("there are no rows: give at least one, or the path of a file")
        rows: Any = data_path
        paths: list[str] = []
        if isinstance(rows, str) or isinstance(rows[0], str):
            paths = [rows] if isinstance(rows, str) else list(rows)
            rows = load_rows(dataclasses.replace(config, path=rows if isinstance(rows, str) else paths), seed=seed)
        self._collate_fn = collate_fn_of(config)
        self.tokenizer = tokenizer
        self.images = images
        self.max_length = max_length or config.max_length
        self.config = dataclasses.replace(config, max_length=self.max_length)
        self.rows = rows
        schema = rows.features.arrow_schema if hasattr(rows, "features") else ()
        # Arrow fills keys that a record lacks with None.
        self._padded = {column.name for column in schema if "struct<" in str(column.type)}
        self._latest: tuple[int | None, Sequence[Texts]] = None, ()
        self._index = self._stored_index(paths)
        self.dropped = Counter(self._index.dropped)  # skipped sequences by reason
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not len(self):
            raise ConfigError(
                f"all {len(rows)} rows were skipped: {reasons}: raise max_length={self.max_length}, or fix the rows"
            )
        if reasons:
            logger.warning("some of %d rows were skipped: %s", len(rows), reasons)
        for shortfall, number in self._index.shortfalls.items():
            logger.warning("row %d, and perhaps others: %s", number, Shortfall[shortfall])

    def rendering(self, apply_chat_template: bool = True) -> Rendering:
        kwargs, in_system = self.config.apply_chat_template_kwargs, self.config.tools_in_system_prompt
        return Rendering(apply_chat_template, kwargs, in_system, self.config.end_of_turn)

    def __len__(self) -> int:
        return len(self._index.rows)

    def __getitem__(self, index: int) -> Item:
        number, sequence = int(self._index.rows[index]), int(self._index.places[index])
        latest, texts = self._latest
        if latest != number:
            texts = self._texts(self.rows[number])
            self._latest = number, texts
        return self.item(texts[sequence]) | {"row": torch.tensor(number)}

    def collate_fn(self, batch: Sequence[Item]) -> list[Item]:
        """Return the items, after the config's ``collate_fn``, as a list: the trainer packs them."""
        items = list(batch)
        needs = [name for name in items[0] if all(name in item for item in items)]  # images only if each has some
        return items if self._collate_fn is None else rows_of_batch(self._collate_fn(items), len(items), needs)

    @abstractmethod
    def texts(self, row: Row) -> Sequence[Texts]:
        """Return the rendered text of each item of a row."""

    @abstractmethod
    def skip_reason(self, texts: Texts) -> str | None:
        """Return why to skip an item, or None to train on it; tokenizes only if the text's length cannot tell."""

    @abstractmethod
    def item(self, texts: Texts) -> Item:
        """Return the tensors of an item."""

    def _texts(self, row: Row) -> Sequence[Texts]:
        return self.texts(
            {name: without_nulls(value) if name in self._padded else value for name, value in row.items()}
        )

    def _stored_index(self, paths: list[str]) -> _Index:
        """Return the index from the cache, or a new one. Its name there is a hash of all that decides which items the
        rows have. The loader compares items itself, so an accidentally equal hash cannot train other rows."""
        rows, tokenizer = self.rows, self.tokenizer
        fingerprint, backend = getattr(rows, "_fingerprint", None), getattr(tokenizer, "backend_tokenizer", None)
        if fingerprint is None or backend is None:
            return self._make_index(paths)
        used = {"path", "cache_dir", "num_workers", "shuffle", "max_samples", "kwargs"}
        settings = {name: value for name, value in dataclasses.asdict(self.config).items() if name not in used}
        kind = type(self).__name__ + ("" if self.images is None else self.images.processor.settings)
        facts = [_INDEX_FORMAT, kind, fingerprint, len(rows), settings]
        facts += [tokenizer.chat_template, tokenizer.special_tokens_map, backend.to_str()]
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
        folder = Path(self.config.cache_dir or "~/.cache/areal_lite").expanduser() / "indices"
        return _Index.load(cached_file(folder / f"{digest}.npz", lambda path: self._make_index(paths).save(path)))

    def _make_index(self, paths: list[str]) -> _Index:
        dropped = Counter[str]()
        shortfalls: dict[str, int] = {}
        numbers, places = array("q"), array("i")
        logged = time.monotonic()
        for number, row in enumerate(self._checked()):
            if time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                logger.info("checked %d of %d rows", number, len(self.rows))
            if row.error is not None:
                where = place_of_row(paths, self.rows[number], cache_dir=self.config.cache_dir)
                raise ConfigError(f"row {number}{f' ({where})' if where else ''}: {row.error}")
            dropped.update(reason for reason in row.reasons if reason)
            for sequence, reason in enumerate(row.reasons):
                if not reason:
                    numbers.append(number)
                    places.append(sequence)
            for shortfall in row.shortfalls:
                shortfalls.setdefault(shortfall.name, number)
        return _Index(np.array(numbers, np.int64), np.array(places, np.int32), dropped, shortfalls)

    def _checked(self) -> Iterator[_CheckedRow]:
        starts: Any = range(0, len(self.rows), _CHUNK)
        workers = self.config.num_workers
        chunks = DataLoader[list[_CheckedRow]](
            starts,
            batch_size=None,
            collate_fn=self._check,  # type: ignore[arg-type] # torch knows batches only
            generator=torch.Generator(),  # by default torch draws the workers' seeds from the state that training uses
            num_workers=workers,
            # A child forked from a process with tokenizer and torch threads may hang.
            multiprocessing_context="spawn" if workers else None,
        )
        return chain.from_iterable(chunks)

    def _check(self, start: int) -> list[_CheckedRow]:
        return list(map(self._check_row, select_rows(self.rows, range(start, min(start + _CHUNK, len(self.rows))))))

    def _check_row(self, row: Row) -> _CheckedRow:
        try:
            items = self._texts(row)
            reasons = [self.skip_reason(texts) or "" for texts in items]
        except ConfigError as error:
            return _CheckedRow(error=str(error))
        return _CheckedRow(reasons, frozenset(shortfall for text in chain(*items) for shortfall in text.shortfalls))


class _CheckedRow(NamedTuple):
    reasons: Sequence[str] = ()  # reason for skipping each sequence; empty to train on it
    shortfalls: frozenset[Shortfall] = frozenset()
    error: str | None = None


class _Index(NamedTuple):
    rows: NDArray[np.int64]  # row of each item, and the number of its sequence there
    places: NDArray[np.int32]
    dropped: Counter[str]
    shortfalls: dict[str, int]  # name of each shortfall, and the first row with it

    def save(self, path: Path) -> None:
        np.savez(path, rows=self.rows, places=self.places, facts=np.array(json.dumps([self.dropped, self.shortfalls])))

    @classmethod
    def load(cls, path: Path) -> _Index:
        with np.load(path) as stored:
            dropped, shortfalls = json.loads(str(stored["facts"]))
            return cls(stored["rows"], stored["places"], Counter(dropped), shortfalls)


def surely_within(text: str, max_length: int) -> bool:
    """Return whether ``text`` has at most ``max_length`` tokens, as no token is shorter than a byte."""
    return len(text.encode()) + 8 <= max_length  # a tokenizer may add a few of its own


def place_of_row(paths: Sequence[str], row: Row, *, cache_dir: str | None) -> str:
    """Return file and line of the first row of the text files in ``paths`` that equals ``row``; empty if none does."""
    try:
        files = text_files(paths, cache_dir=cache_dir)
    except ConfigError:  # a function or a task
        return ""
    rows = (located for file in files for located in located_rows(file))
    return next((where for where, found in rows if all(found.get(key) == value for key, value in row.items())), "")
