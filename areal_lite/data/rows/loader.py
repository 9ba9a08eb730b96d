"""Batches of a data set, from a place that can be saved and found again.

Guarantees that the place counts the batches that were handed out, not those that workers made ahead, and that
a loader with a restored place gives exactly the batches that were left. Torch's DataLoader does the loading.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import BaseContext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from areal_lite.data.rows.fingerprint import content_hash, spread_positions
from areal_lite.data.rows.samplers import AbstractSampler, EpochSampler
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)


class IndexedRows(Protocol):
    """A list, a torch ``Dataset`` with a length, a ``datasets.Dataset``."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class _HasState(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class ResumableLoader:
    """Each iteration gives what is left of the epoch; the next one is another epoch in an order of its own.

    Leaving an iteration early leaves the place where it is. One iteration can be under way at a time. A data
    set may grow: new rows are drawn from the next epoch on.

    Args:
        dataset: Rows by index. Worker processes get a pickled copy when an epoch begins.
        batch_size: Rows of a batch; None is the whole data set, as for validation.
        sampler: The order, as from :func:`areal_lite.data.rows.samplers.create_rl_sampler`. None: one that is made
            of ``shuffle`` and ``seed``.
        shuffle: Draw each epoch in another order; only without ``sampler``.
        seed: Makes the orders, and seeds the worker processes.
        num_workers: Processes that load rows; 0 loads them in this one, when they are asked for. They import the
            script that runs, which therefore needs its ``if __name__ == "__main__"``.
        drop_last: Leave out the rows at the end of an epoch that fill no batch: True to train, False to validate.
        collate_fn: Makes a batch of a list of rows; None is torch's own, which stacks.

    Raises:
        ConfigError: If an epoch would have no batch, or a curriculum is to have workers.
        ValueError: If ``batch_size`` is below 1, or both ``sampler`` and ``shuffle`` are given.
    """

    def __init__(
        self,
        dataset: IndexedRows,
        *,
        batch_size: int | None,
        sampler: EpochSampler | AbstractSampler | None = None,
        shuffle: bool = False,
        seed: int = 1,
        num_workers: int = 0,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: use 1 or more, or None for the whole data set")
        if sampler is not None and shuffle:
            raise ValueError(
                "both sampler and shuffle are given: the sampler decides the order; remove shuffle"
            )
        if isinstance(sampler, AbstractSampler) and num_workers:
            raise ConfigError(
                f"num_workers is {num_workers} with the curriculum {type(sampler).__name__}: workers draw rows before "
                "it has learnt from the batches under way. Set num_workers to 0"
            )
        if not len(dataset):
            raise ConfigError("the data set has no rows: give at least one")
        self._dataset = dataset
        self._batch_size = batch_size or len(dataset)
        self._sampler = EpochSampler(dataset, shuffle=shuffle, seed=seed) if sampler is None else sampler
        self._seed = seed
        self._num_workers = num_workers
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._iteration: object = None
        self._go_to(0, 0, len(dataset))
        if not len(self):
            raise ConfigError(
                f"an epoch of {len(self._sampler)} rows fills no batch of {self._batch_size}, and drop_last leaves out "
                f"what fills none: nothing would be trained. Use batches of at most {len(self._sampler)}, or more rows"
            )

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0; it ends when its iteration does."""
        return self._epoch

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        full, rest = divmod(len(self._sampler), self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def total_training_steps(self, epochs: int, *, override: int | None = None) -> int:
        """Return the batches of ``epochs`` epochs, or ``override`` where a run sets its steps itself."""
        return len(self) * epochs if override is None else override

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of this epoch.

        Raises:
            RuntimeError: If another iteration or a restored place has taken over.
        """
        self._iteration = mine = object()
        rows: Any = self._dataset
        place = np.random.SeedSequence([self._seed % 2**64, self._epoch, self._batches])
        loader = DataLoader[Any](
            rows,
            batch_sampler=BatchSampler(self._indices(), self._batch_size, self._drop_last),
            collate_fn=self._collate_fn,
            # Torch draws the workers' seeds, by default from the global state that training draws from too.
            generator=torch.Generator().manual_seed(int(place.generate_state(1)[0])),
            num_workers=self._num_workers,
            multiprocessing_context=_worker_context() if self._num_workers else None,
        )
        for batch in loader:
            self._batches += 1
            yield batch
            if self._iteration is not mine:
                raise RuntimeError(
                    "this iteration has ended, since another one began or a place was restored: go on with iter(loader)"
                )
        self._go_to(self._epoch + 1, 0, len(self._dataset))

    def update(self, batch: Any) -> None:
        """Let a curriculum learn from the batch that was just trained on; other orders take no notice."""
        if isinstance(self._sampler, AbstractSampler):
            self._sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the place as JSON values: epoch, batches handed out in it, its rows, and whose place it is.

        The state of a curriculum that has one is part of it. The data set's own state is not.
        """
        state = {
            "epoch": self._epoch,
            "batches": self._batches,
            "epoch_rows": self._epoch_rows,
            "fingerprint": self._fingerprint(),
        }
        if isinstance(self._sampler, _HasState):
            state["sampler"] = self._sampler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; a data set that grew must have its rows back before.

        Another data set is known by its number of rows and by what is in a few of them.

        Raises:
            ConfigError: If rows, batch size, sampler, shuffle or seed are not what they were then.
        """
        then, now = state["fingerprint"], self._fingerprint()
        if other := [name for name in {**then, **now} if then.get(name) != now.get(name)]:
            had, has = ({name: values.get(name) for name in other} for values in (then, now))
            raise ConfigError(
                f"the checkpoint's loader had {had}, this one has {has}: its place means nothing here. Use the same "
                "data set and settings, or start another trial"
            )
        self._iteration = None
        self._go_to(int(state["epoch"]), int(state["batches"]), int(state["epoch_rows"]))
        if isinstance(self._sampler, _HasState):
            self._sampler.load_state_dict(state["sampler"])
        elif isinstance(self._sampler, AbstractSampler):
            logger.warning(
                "the curriculum %s has no state_dict and load_state_dict: it starts anew, without what it learnt from "
                "the batches before",
                type(self._sampler).__name__,
            )

    def _go_to(self, epoch: int, batches: int, rows: int) -> None:
        self._epoch, self._batches, self._epoch_rows = epoch, batches, rows
        if isinstance(self._sampler, EpochSampler):
            self._sampler.set_epoch(epoch, rows)

    def _indices(self) -> Iterator[int]:
        given = 0 if isinstance(self._sampler, _HasState) else self._batches * self._batch_size
        return itertools.islice(self._sampler, given, None)

    def _fingerprint(self) -> dict[str, Any]:
        fingerprint = {
            "rows": len(self._dataset),
            "content": content_hash(self._dataset[row] for row in spread_positions(len(self._dataset))),
            "batch_size": self._batch_size,
            "drop_last": self._drop_last,
            "sampler": type(self._sampler).__qualname__,
        }
        if isinstance(self._sampler, EpochSampler):
            fingerprint |= {"shuffle": self._sampler.shuffle, "seed": self._sampler.seed}
        return fingerprint


def _worker_context() -> BaseContext:
    # A fork would copy the threads' locks of this process; the fork server has none, and imports torch once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
