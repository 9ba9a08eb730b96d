"""Rows of a generator function: no dataset, no length, no shuffling."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.data.source.row_streams import RowStream
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError


class GeneratedRows(RowStream):
    """Draws the rows of an iterator, and makes a new one when it ends.

    The state names the number of rows drawn: a resumed stream skips as many, so the function must give the same rows
    again. Groups that are owed are saved with their rows, which must be JSON values.
    """

    def __init__(self, generate: Callable[[], Iterator[Any]], settings: SourceSettings) -> None:
        super().__init__(settings)
        self._generate = generate
        self._iterator = generate()

    def _read_ahead(self, count: int) -> None:
        rows = list(itertools.islice(self._iterator, self.settings.rows_at_once))
        if not rows:
            if self.sample_offset == 0:
                raise ConfigError(f"the generator {self.settings.name} yielded no row: yield at least one")
            self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
            self._iterator = self._generate()
            self._read_ahead(count)
            return
        self._ahead.extend(self.settings.in_mini_batches([None] * len(rows), rows))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``: skip the rows that were drawn."""
        super().load_state_dict(state)
        self._iterator = self._generate()
        drawn = self.sample_offset % self.settings.rows_at_once
        skipped = self.sample_offset - drawn
        if sum(1 for _ in itertools.islice(self._iterator, skipped)) < skipped:
            raise ConfigError(
                f"the generator {self.settings.name} ended before row {skipped}, which this run had drawn: a "
                "resumed run needs a function that yields the same rows again"
            )
        if drawn:  # the rest of a mini-batch
            self._read_ahead(drawn)
            for _ in range(drawn):
                self._ahead.popleft()


def generator_of(rows: DatasetConfig) -> Callable[[], Iterator[Any]]:
    """Return the generator function at ``rows.path``, with its arguments."""
    where = "rollout_global_dataset is false, so rows come from a generator function"
    path = rows.path
    if not isinstance(path, str):
        raise ConfigError(f"{where}, and train_dataset.path is {path!r}: write one dotted path")
    needs_rows = ("shuffle", "max_samples", "filter_overlong_prompts", "custom_cls", "sampler", "datagen")
    for name in needs_rows:
        if value := getattr(rows, name):
            fix = f"set train_dataset.{name}: false" if value is True else f"remove train_dataset.{name}"
            raise ConfigError(f"{where}, and train_dataset.{name} is {value!r}, which needs a dataset: {fix}")
    function = load_object(path, where="train_dataset.path")
    if not inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"{where}, and train_dataset.path {path!r} is none: name a function that yields rows, or set "
            "rollout_global_dataset: true for files and functions that return a list"
        )
    try:
        inspect.signature(function).bind(**rows.kwargs)
    except TypeError as error:
        raise ConfigError(f"train_dataset.kwargs {rows.kwargs} do not fit {path}: {error}") from None
    return lambda: function(**rows.kwargs)
