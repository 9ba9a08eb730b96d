"""Rows of any iterable as a data source, in its order; the position cannot be saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.errors import ConfigError


class IterableDataSource(RolloutDataSourceWithBuffer):
    """An iterable restarts each time it ends; an iterator ends for good.

    Args:
        rows: Rows, or batches of rows as a data loader gives them: a list is a batch.
        n_samples_per_prompt: Samples in a group.
    """

    def __init__(self, rows: Iterable[Any], *, n_samples_per_prompt: int = 1) -> None:
        super().__init__(n_samples_per_prompt=n_samples_per_prompt)
        self._source = rows
        self._iterator: Iterator[Any] = iter(rows)
        self._endless = self._iterator is not rows
        self.ended = False
        """Whether the rows have ended."""

    def _read_ahead(self, count: int) -> None:
        """Read one row or batch, if there is one.

        Raises:
            Exception: Any exception of the iterable, which has then ended.
        """
        while not self._ahead and not self.ended:
            try:
                item = next(self._iterator)
            except StopIteration:
                if not self._endless or self.sample_offset == 0:
                    self.ended = True
                else:
                    self._iterator, self.sample_offset = iter(self._source), 0
                    self.epoch_id += 1
            except BaseException:
                self.ended = True
                raise
            else:
                self._ahead.extend((None, row) for row in (item if isinstance(item, list) else [item]))

    def state_dict(self) -> dict[str, Any]:
        """Raise: an iterable has no position to save.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "rows of an iterable have no position to save: use RolloutDataSource over a list or dataset"
        )
