"""Rows of any iterable as a data source: no place that could be saved, and no order but its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from areal_lite.data.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.errors import ConfigError


class IterableDataSource(RolloutDataSourceWithBuffer):
    """An iterable is begun anew each time it ends; an iterator ends for good."""

    def __init__(self, rows: Iterable[Any], *, n_samples_per_prompt: int = 1) -> None:
        super().__init__(n_samples_per_prompt=n_samples_per_prompt)
        self._source = rows
        self._iterator: Iterator[Any] = iter(rows)
        self._endless = self._iterator is not rows
        self.ended = False
        """Whether no row will come any more."""

    def _draw(self, count: int) -> list[tuple[int | None, dict[str, Any]]]:
        """Take up to ``count`` rows; fewer once the iterable has ended.

        Raises:
            Exception: Whatever the iterable raises; it has ended then.
        """
        drawn: list[tuple[int | None, dict[str, Any]]] = []
        while len(drawn) < count and not self.ended:
            try:
                drawn.append((None, next(self._iterator)))
                self.sample_offset += 1
            except StopIteration:
                if not self._endless or self.sample_offset == 0:
                    self.ended = True
                else:
                    self._iterator, self.sample_offset = iter(self._source), 0
                    self.epoch_id += 1
            except BaseException:
                self.ended = True
                raise
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Refuse.

        Raises:
            ConfigError: Always: nobody knows where an iterable stands.
        """
        raise ConfigError(
            "rows of an iterable have no place to save: use RolloutDataSource over a list or dataset"
        )
