"""The user's own order of rows: a curriculum. Knows nothing of batches.

:class:`~areal_lite.data.source.row_streams.CurriculumRows` draws by it in a run, and
:class:`~areal_lite.data.rows.loader.ResumableLoader` in loops of your own; both count and restore the position.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized
from typing import Any
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


def make_curriculum(config: DatasetConfig, dataset: Sized) -> AbstractSampler | None:
    """Return the curriculum that ``config.sampler`` names, over the rows of ``dataset``; None if it names none.
    ConfigError if the class cannot be loaded, or does not implement :class:`AbstractSampler`."""
    if config.sampler is None:
        return None
    cls: type[AbstractSampler] = load_class(config.sampler, AbstractSampler, where="sampler")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(
            f"sampler: {config.sampler.name} of {config.sampler.path} has no {', '.join(missing)}: implement "
            "every method of the base class"
        )
    return cls(dataset, config)
