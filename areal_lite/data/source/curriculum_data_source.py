"""A data source whose rows come in the order of a curriculum, which learns from each batch that was trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.errors import ConfigError


class CurriculumDataSource(RolloutDataSourceWithBuffer):
    """Draws a row when its group is requested; groups that were given back still come first.

    Args:
        dataset: As for :class:`RolloutDataSource`.
        sampler: The order of each epoch; it need not give every row.
        **settings: Those of :class:`RolloutDataSourceWithBuffer`.
    """

    def __init__(self, dataset: Any, *, sampler: AbstractSampler, **settings: Any) -> None:
        super().__init__(dataset, **settings)
        self._sampler = sampler
        self._indices: Iterator[int] = iter(sampler)

    def update(self, batch: Any) -> None:
        """Let the curriculum learn from a batch that was trained."""
        with self._lock:
            self._sampler.update(batch)

    def __len__(self) -> int:
        """Return the number of rows in one epoch."""
        return len(self._sampler)

    def _read_ahead(self, count: int) -> None:
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
        (row,) = self._read([position])
        self._ahead.append((position, row))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values, with the curriculum's state if it has one."""
        with self._lock:
            state = getattr(self._sampler, "state_dict", None)
            return super().state_dict() | {"sampler": state() if callable(state) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; a curriculum without a state restarts its epoch and skips rows."""
        with self._lock:
            super().load_state_dict(state)
            if state.get("sampler") is None:
                self._indices = itertools.islice(iter(self._sampler), self.sample_offset, None)
            else:
                self._sampler.load_state_dict(state["sampler"])  # type: ignore[attr-defined]
                self._indices = iter(self._sampler)
