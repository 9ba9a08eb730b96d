"""Rows in the order they are drawn, epoch after epoch: of a dataset, a curriculum, an iterable or a generator.

Guarantees that every epoch of a dataset gives each row once, in an order that depends on (seed, epoch) alone. A stream
counts what was drawn and can be moved there again; which rows are still owed is the data source's to know. Calls are
made under the data source's lock, except :meth:`CurriculumRows.update`.
"""

import hashlib
import inspect
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
import numpy as np
from numpy.typing import NDArray
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.rows.fingerprint import FINGERPRINT_ROWS, content_hash, spread_positions
from areal_lite.data.rows.load_rows import check_arguments
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.data.source.source_settings import DrawnRow, SourceSettings, checked_row
from areal_lite.errors import ConfigError

_AHEAD = 64  # minimum rows read at once: from disk, many rows cost little more than one


class RowStream(ABC):
    """Draws rows; a subclass reads them."""

    has_position = True  # False if there is no position to save

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.epoch_id = 0
        self.sample_offset = 0
        self._ahead: deque[DrawnRow] = deque()

    def draw(self, count: int) -> Iterator[DrawnRow]:
        """Yield the next ``count`` rows, fewer if they end; a row counts as drawn when the next is requested."""
        for left in range(count, 0, -1):
            if not self._ahead:
                self._read_ahead(left)
            if not self._ahead:
                return
            yield self._ahead[0]
            self._ahead.popleft()
            self.sample_offset += 1

    @abstractmethod
    def _read_ahead(self, count: int) -> None:
        """Read at least one row, if there is one; ``count`` are needed."""

    def read(self, positions: list[int]) -> Iterable[Any]:
        """Return the rows at ``positions``; only a dataset's rows have one."""
        return []

    def __len__(self) -> int:
        """Return the number of rows in one epoch; 0 if it is unknown."""
        return 0

    def content(self) -> dict[str, Any]:
        """Return the number of rows, and a hash that changes with them."""
        return {"rows": 0, "content": content_hash([[]])}

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return {"epoch_id": self.epoch_id, "epoch_size": len(self), "sample_offset": self.sample_offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of ``state``."""
        self.epoch_id = int(state.get("epoch_id", 0))
        self.sample_offset = int(state.get("sample_offset", 0))
        self._ahead.clear()


def empty_rows() -> Iterator[dict[str, Any]]:
    """Yield rows without columns: ``train_dataset.path`` of a run whose workflow makes its own prompts."""
    while True:
        yield {}


class DatasetRows(RowStream):
    """The rows of a dataset, or of its attribute ``rows``; rows added at its end are drawn from the next epoch on."""

    def __init__(self, dataset: Any, settings: SourceSettings) -> None:
        super().__init__(settings)
        self.dataset = dataset
        if len(self._rows) == 0:
            raise ConfigError(f"the dataset {settings.name} has no rows: give at least one")
        self._order = self._epoch_order(len(self._rows))

    @property
    def _rows(self) -> Any:
        return getattr(self.dataset, "rows", self.dataset)

    def _read_ahead(self, count: int) -> None:
        if self.sample_offset == len(self._order):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order = self._epoch_order(len(self._rows))
        size = self.settings.rows_at_once
        drawn = self.sample_offset % size  # rows of a mini-batch that were drawn before a restart
        end = self.sample_offset + max(count, _AHEAD)
        positions = self._order[self.sample_offset - drawn : end + -end % size].tolist()
        self._ahead.extend(self.settings.in_mini_batches(positions, list(self.read(positions)))[drawn:])

    def read(self, positions: list[int]) -> Iterable[Any]:
        rows = self._rows
        if hasattr(rows, "__getitems__"):
            return rows.__getitems__(positions)  # type: ignore[no-any-return]
        return [rows[position] for position in positions]

    def _epoch_order(self, size: int) -> NDArray[np.int64]:
        if not self.settings.shuffle:
            return np.arange(size)
        digest = hashlib.sha256(f"{self.settings.seed}-{self.epoch_id}".encode()).digest()
        return np.random.default_rng(list(digest[:16])).permutation(size)

    def __len__(self) -> int:
        return len(self._order)

    def content(self) -> dict[str, Any]:
        """Return the number of rows, and a hash of a few of them and of the beginning of the first epoch. Rows that the
        dataset adds during a run are left out: its own state has them."""
        rows = getattr(self._rows, "on_disk", self._rows) or ()
        size = len(rows)
        order = self._order if size == len(self._order) else self._epoch_order(size)
        some = [checked_row(rows[position]) for position in spread_positions(size)]
        return {"rows": size, "content": content_hash([order[:FINGERPRINT_ROWS].tolist(), *some])}

    def state_dict(self) -> dict[str, Any]:
        state = getattr(self.dataset, "state_dict", None)
        return super().state_dict() | {"epoch_size": len(self._order), "dataset": state() if callable(state) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of ``state``; the epoch has the rows that it began with."""
        if state.get("dataset") is not None:
            self.dataset.load_state_dict(state["dataset"])
        super().load_state_dict(state)
        self._order = self._epoch_order(int(state.get("epoch_size", len(self._rows))))


class CurriculumRows(DatasetRows):
    """The rows of a dataset in the order of a curriculum, each chosen when needed; it need not give every row."""

    def __init__(self, dataset: Any, settings: SourceSettings, sampler: AbstractSampler) -> None:
        super().__init__(dataset, settings)
        self._sampler = sampler
        self._indices: Iterator[int] = iter(sampler)
        self._lock = threading.Lock()  # held while the sampler works: the trainer's thread updates it while others draw

    def update(self, batch: Any) -> None:
        """Let the curriculum learn from a batch that was trained; any thread may call this."""
        with self._lock:
            self._sampler.update(batch)

    def __len__(self) -> int:
        return len(self._sampler)

    def _read_ahead(self, count: int) -> None:
        with self._lock:
            position = next(self._indices, None)
            if position is None:
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
                self._indices = iter(self._sampler)
                position = next(self._indices, None)
        if position is None:
            raise ConfigError(
                f"train_dataset.sampler: {type(self._sampler).__name__} gives no row in epoch {self.epoch_id}: its "
                "__iter__ must yield at least one index"
            )
        (row,) = self.read([position])
        self._ahead.append(DrawnRow(position, row))

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            state = getattr(self._sampler, "state_dict", None)
            return super().state_dict() | {"sampler": state() if callable(state) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Move to the position of ``state``; a curriculum without a state restarts its epoch and skips rows."""
        super().load_state_dict(state)
        with self._lock:
            if state.get("sampler") is None:
                self._indices = itertools.islice(iter(self._sampler), self.sample_offset, None)
            else:
                self._sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
                self._indices = iter(self._sampler)


class GeneratedRows(RowStream):
    """The rows of a generator function, which is called again each time it ends. The state names the number of rows
    drawn: a resumed stream skips as many, so the function must give the same rows again. Groups that are owed are saved
    with their rows, which must be JSON values."""

    def __init__(self, generate: Callable[[], Iterator[Any]], settings: SourceSettings) -> None:
        super().__init__(settings)
        self._generate = generate
        self._iterator = generate()
        self._ended = False

    def _read_ahead(self, count: int) -> None:
        while not self._ahead and not self._ended:
            self._ended = True  # an iterator that raises is not asked again
            rows = list(itertools.islice(self._iterator, self.settings.rows_at_once))
            self._ended = not rows and not self._begins_again()
            self._ahead.extend(self.settings.in_mini_batches([None] * len(rows), rows))

    def _begins_again(self) -> bool:
        if self.sample_offset == 0:
            raise ConfigError(f"the generator {self.settings.name} yielded no row: yield at least one")
        self.epoch_id, self.sample_offset, self._iterator = self.epoch_id + 1, 0, self._generate()
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``: skip the rows that were drawn."""
        super().load_state_dict(state)
        epoch, drawn = self.epoch_id, self.sample_offset
        self.sample_offset, self._iterator, self._ended = 0, self._generate(), False
        for _ in self.draw(drawn):
            pass
        if self.epoch_id != epoch:
            raise ConfigError(
                f"the generator {self.settings.name} ended before row {drawn}, which this run had drawn: a "
                "resumed run needs a function that yields the same rows again"
            )


class IterableRows(GeneratedRows):
    """The rows of an iterable, which restarts each time it ends; an iterator ends for good. A list is a batch."""

    has_position = False

    def __init__(self, rows: Iterable[Any], settings: SourceSettings) -> None:
        self._endless = not isinstance(rows, Iterator)
        super().__init__(
            lambda: (row for item in rows for row in (item if isinstance(item, list) else [item])), settings
        )

    def _begins_again(self) -> bool:
        return self._endless and self.sample_offset > 0 and super()._begins_again()

    def state_dict(self) -> dict[str, Any]:
        raise ConfigError("an iterable has no position to save: use RolloutDataSource over a list or dataset")


def generator_of(rows: DatasetConfig) -> Callable[[], Iterator[Any]]:
    """Return the generator function at ``rows.path``, with its arguments."""
    path = str(rows.path)
    function = load_object(path, where="train_dataset.path")
    if not inspect.isgeneratorfunction(function):
        raise ConfigError(
            "rollout_global_dataset is false, so rows come from a generator function, and train_dataset.path "
            f"{path!r} is none: name a function that yields rows, or set rollout_global_dataset: true for files and "
            "functions that return a list"
        )
    check_arguments(function, rows.kwargs, where=f"train_dataset.path {path}: train_dataset.kwargs")
    return lambda: function(**rows.kwargs)
