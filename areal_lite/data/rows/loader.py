"""Batches of a dataset, with a position that can be saved and restored.

Guarantees that an epoch's order depends only on (seed, epoch), or is the user's curriculum; that the position counts
batches handed out, not those that workers prefetched; and that a restored loader yields exactly the remaining ones.
"""

import itertools
import logging
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.rows.fingerprint import content_hash, differences, spread_positions
from areal_lite.data.rows.samplers import AbstractSampler, make_curriculum
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)


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
    """Return the curriculum that ``config.sampler`` names, else an :class:`EpochSampler`; raises ConfigError."""
    curriculum = make_curriculum(config, dataset)
    return EpochSampler(dataset, shuffle=config.shuffle, seed=seed) if curriculum is None else curriculum


class ResumableLoader:
    """Each iteration yields the rest of the current epoch; the next iteration starts a new epoch in its own order.

    Breaking out of an iteration keeps the position. Only one iteration can run at a time. The dataset may grow: new
    rows are drawn from the next epoch on. ConfigError if an epoch would have no batch, or a curriculum is combined with
    workers; ValueError if ``batch_size`` is below 1, or both ``sampler`` and ``shuffle`` are given.

    Args:
        dataset: Rows by index: a list, a torch ``Dataset``, a ``datasets.Dataset``; pickled for workers at each epoch.
        batch_size: Rows per batch; None means the whole dataset, e.g. for validation.
        sampler: The order. None uses an :class:`EpochSampler` with ``shuffle`` and ``seed``.
        shuffle: Draw each epoch in a new order; only without ``sampler``.
        num_workers: Processes that load rows; 0 loads them on demand in this process. Workers import the main script,
            so it needs ``if __name__ == "__main__"``.
        read_ahead: Without workers and curriculum, load the next batch in a thread while this one is used.
        drop_last: Drop an incomplete last batch of an epoch: True for training, False for validation.
        collate_fn: Turns a list of rows into a batch; None uses torch's default, which stacks.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None,
        sampler: EpochSampler | AbstractSampler | None = None,
        shuffle: bool = False,
        seed: int = 1,
        num_workers: int = 0,
        read_ahead: bool = False,
        drop_last: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: use 1 or more, or None for the whole dataset")
        if sampler is not None and shuffle:
            raise ValueError("both sampler and shuffle are set: the sampler sets the order, remove shuffle")
        if isinstance(sampler, AbstractSampler) and num_workers:
            raise ConfigError(
                f"num_workers is {num_workers} with the curriculum {type(sampler).__name__}: workers would draw rows "
                "before it has learned from earlier batches. Set num_workers to 0"
            )
        if not len(dataset):
            raise ConfigError("the dataset has no rows: give at least one")
        self._dataset = dataset
        self._batch_size = batch_size or len(dataset)
        self._sampler: Any = EpochSampler(dataset, shuffle=shuffle, seed=seed) if sampler is None else sampler
        self._sampler_has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._seed = seed
        self._num_workers = num_workers
        self._read_ahead = read_ahead and not num_workers and not isinstance(sampler, AbstractSampler)
        self._drop_last = drop_last
        self._collate_fn = collate_fn
        self._iteration: object = None
        self._set_position(0, 0, len(dataset))
        if not len(self):
            raise ConfigError(
                f"an epoch of {len(self._sampler)} rows has no full batch of {self._batch_size}, and drop_last "
                f"drops incomplete ones: nothing would be trained. Set batch_size to at most {len(self._sampler)}, or "
                "add rows"
            )

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; it ends with its iteration."""
        return self._epoch

    def __len__(self) -> int:
        """Return the number of batches in a full epoch."""
        full, rest = divmod(len(self._sampler), self._batch_size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch; RuntimeError if another iteration began or a position was restored since."""
        self._iteration = mine = object()
        context = multiprocessing.get_context("forkserver")
        if self._num_workers:
            context.set_forkserver_preload([__name__])
        position = random.Random(f"{self._seed} {self._epoch} {self._batches}")
        skipped = 0 if self._sampler_has_state else self._batches * self._batch_size
        loader = DataLoader[Any](
            self._dataset,
            batch_sampler=BatchSampler(
                itertools.islice(self._sampler, skipped, None), self._batch_size, self._drop_last
            ),
            collate_fn=self._collate_fn,
            # By default torch draws the workers' seeds from the global state that training uses too.
            generator=torch.Generator().manual_seed(position.getrandbits(63)),
            num_workers=self._num_workers,
            # A fork would copy locks held by this process's threads; the fork server has none and imports torch once.
            multiprocessing_context=context if self._num_workers else None,
        )
        for batch in _one_ahead(loader) if self._read_ahead else loader:
            self._batches += 1
            yield batch
            if self._iteration is not mine:
                raise RuntimeError(
                    "this iteration has ended, because another one began or a position was restored: use iter(loader)"
                )
        self._set_position(self._epoch + 1, 0, len(self._dataset))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values: epoch, batches handed out, rows of the epoch, and a data fingerprint.
        Includes the state of a curriculum that has one, but not the state of the dataset."""
        position = {"epoch": self._epoch, "batches": self._batches, "epoch_rows": self._epoch_rows}
        sampler = {"sampler": self._sampler.state_dict()} if self._sampler_has_state else {}
        return {**position, "fingerprint": self._fingerprint(), **sampler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; restore the rows of a dataset that grew first. ConfigError if rows (their number, or
        the content of a few of them), batch size, sampler, shuffle or seed have changed."""
        if changed := differences(state["fingerprint"], self._fingerprint()):
            raise ConfigError(
                f"the checkpoint's loader does not fit: {changed}. Use the same dataset and settings, or another trial"
            )
        self._iteration = None
        self._set_position(int(state["epoch"]), int(state["batches"]), int(state["epoch_rows"]))
        if self._sampler_has_state:
            self._sampler.load_state_dict(state["sampler"])
        elif isinstance(self._sampler, AbstractSampler):
            logger.warning(
                "the curriculum %s has no state_dict and load_state_dict: it restarts without what it learned from "
                "earlier batches",
                type(self._sampler).__name__,
            )

    def _set_position(self, epoch: int, batches: int, rows: int) -> None:
        self._epoch, self._batches, self._epoch_rows = epoch, batches, rows
        if isinstance(self._sampler, EpochSampler):
            self._sampler.set_epoch(epoch, rows)

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


def _one_ahead(batches: Iterable[Any]) -> Iterator[Any]:
    made, end = iter(batches), object()
    with ThreadPoolExecutor(1, thread_name_prefix="areal-lite-rows") as thread:
        coming = thread.submit(next, made, end)
        while (batch := coming.result()) is not end:
            coming = thread.submit(next, made, end)
            yield batch
