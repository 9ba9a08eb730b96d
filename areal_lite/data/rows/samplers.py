"""The order in which rows of a dataset are drawn.

Guarantees that an epoch's order depends only on (seed, epoch), or is the user's curriculum. Knows nothing of batches:
:class:`areal_lite.data.rows.loader.ResumableLoader` counts and restores the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_class
from areal_lite.errors import ConfigError


class AbstractSampler(Sampler[int], ABC):
    """Base class of a curriculum, which can choose rows by how training went on earlier ones.

    To make a curriculum resumable, return what ``update`` changes and the position in the epoch from ``state_dict()``
    as JSON values, and restore them in ``load_state_dict(state)``; ``__iter__`` then continues from there. Without
    these methods, a resumed run redraws the epoch and skips as many rows as were handed out.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, config: DatasetConfig) -> None:
        """Take the dataset and its config section."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Yield the indices of one epoch, each when its batch is needed."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of indices in an epoch."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Learn from the batch that was just trained on."""


class EpochSampler(Sampler[int]):
    """Every row once per epoch, in a new random order each epoch or in the order of the rows."""

    def __init__(self, data_source: Sized, *, shuffle: bool, seed: int) -> None:
        self.shuffle = shuffle
        self.seed = seed
        self._data_source = data_source
        self.set_epoch(0)

    def set_epoch(self, epoch: int, num_rows: int | None = None) -> None:
        """Set the epoch of the next iteration, over the first ``num_rows`` rows or all rows."""
        self._epoch = epoch
        self._num_rows = len(self._data_source) if num_rows is None else num_rows

    def __iter__(self) -> Iterator[int]:
        if not self.shuffle:
            return iter(range(self._num_rows))
        random = np.random.default_rng([self.seed % 2**64, self._epoch])  # leaves global random states alone
        return iter(random.permutation(self._num_rows).tolist())

    def __len__(self) -> int:
        return self._num_rows


def create_rl_sampler(config: DatasetConfig, dataset: Sized, *, seed: int) -> EpochSampler | AbstractSampler:
    """Return the curriculum that ``config.sampler`` names; by default an :class:`EpochSampler`.

    Raises:
        ConfigError: If the class cannot be loaded, or does not implement :class:`AbstractSampler`.
    """
    if config.sampler is None:
        return EpochSampler(dataset, shuffle=config.shuffle, seed=seed)
    cls: type[AbstractSampler] = load_class(config.sampler, AbstractSampler, where="sampler")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(
            f"sampler: {config.sampler.name} of {config.sampler.path} has no {', '.join(missing)}: implement "
            "every method of the base class"
        )
    return cls(dataset, config)
