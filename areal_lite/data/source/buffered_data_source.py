"""Data sources that also take samples back: stopped groups with their tokens, surplus groups, finished ones.

Rows come from a dataset, in the order of a curriculum, or from any iterable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from areal_lite.config.dotted_path import load_object
from areal_lite.data.rows.samplers import AbstractSampler
from areal_lite.data.source.data_source_state import group_to_json
from areal_lite.data.source.rollout_data_source import DrawnRow, RolloutDataSource, SampleGroup, group_index_of
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError

BufferFilter = Callable[[Any, int | None, list[SampleGroup], int], list[SampleGroup]]
"""``filter(source, rollout_id, buffer, num_samples)`` returns at most ``num_samples`` groups of ``buffer``.

``source`` is the data source, whose ``update_metadata`` keeps what a filter must remember, also over a restart; one
made from slime's ``args`` passes them instead. ``rollout_id`` is None. It may leave the buffer alone or delete from it:
what it returns is handed out and leaves the buffer; what it deletes and does not return is dropped.
"""


def pop_first(source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """Take the groups that were added first."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def highest_reward_first(
    source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Take the groups of the highest mean reward; those without a reward yet come last."""
    reward_key = getattr(source, "reward_key", None)
    return sorted(buffer, key=partial(_mean_reward, reward_key), reverse=True)[:num_samples]


def _mean_reward(reward_key: str | None, group: SampleGroup) -> float:
    rewards = [
        sample.get_reward_value(None if isinstance(sample.reward, Real) else reward_key)
        for sample in group
        if isinstance(sample.reward, Real) or (reward_key is not None and sample.reward is not None)
    ]
    return sum(rewards) / len(rewards) if rewards else -math.inf


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Hands out its buffer first.

    Args:
        buffer_filter: Chooses from the buffer: a function or its dotted path; None is :func:`pop_first`.
        **settings: Those of :class:`RolloutDataSource`.
    """

    supports_buffer = True

    def __init__(
        self, dataset: Any = None, *, buffer_filter: BufferFilter | str | None = None, **settings: Any
    ) -> None:
        super().__init__(dataset, **settings)
        if self.args is not None:
            return  # made from slime's args, buffer and filter included
        if isinstance(buffer_filter, str):
            buffer_filter = load_object(buffer_filter, where="buffer_filter")
        if buffer_filter is not None and not callable(buffer_filter):
            raise ConfigError(f"buffer_filter is {buffer_filter!r}: it must be a function or its dotted path")
        self.buffer: list[SampleGroup] = []
        self._buffered: set[int] = set()
        """Numbers of the groups in the buffer."""
        self.buffer_filter: BufferFilter = buffer_filter or pop_first

    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Append groups to the buffer, all or, on an error, none.

        Samples of one group that share an index count as one member; groups and samples without a number get one.

        Raises:
            ValueError: If it is not a list of groups, or a group does not have ``n_samples_per_prompt`` members,
                is already in the buffer, or has a non-finite reward.
        """
        if not isinstance(samples, list) or not all(isinstance(group, list) for group in samples):
            kinds = samples if not isinstance(samples, list) else [type(group).__name__ for group in samples]
            raise ValueError(f"samples must be a list of lists of Sample, got {kinds!r}"[:500])
        with self._lock:
            added: set[int] = set()
            for place, group in enumerate(samples):
                self._check_group(place, group)
                if group[0].group_index is None:
                    continue
                number = group_index_of(group)
                if number in self._buffered or number in added:
                    raise ValueError(f"group {number} is in the buffer already: add each group once")
                added.add(number)
            for group in samples:
                if group[0].group_index is None:
                    for sample in group:
                        sample.group_index = self._next_group
                for sample in group:
                    if sample.index is None:
                        sample.index, self.sample_index = self.sample_index, self.sample_index + 1
                number = group_index_of(group)
                self._next_group = max(self._next_group, number + 1)
                self._owed.pop(number, None)
                self._buffered.add(number)
                self.buffer.append(group)

    def _check_group(self, place: int, group: SampleGroup) -> None:
        if not all(isinstance(sample, Sample) for sample in group):
            raise ValueError(f"group {place} holds {[type(sample).__name__ for sample in group]}, not Sample")
        indices = [sample.index for sample in group]
        members = len({*indices} - {None}) + indices.count(None)
        if members != self.n_samples_per_prompt:
            raise ValueError(
                f"group {place} has {members} members and n_samples_per_prompt is {self.n_samples_per_prompt}: add "
                "whole groups"
            )
        for sample in group:
            values = sample.reward.values() if isinstance(sample.reward, dict) else [sample.reward]
            if any(isinstance(value, float | np.floating) and not math.isfinite(value) for value in values):
                raise ValueError(
                    f"group {place}, sample {sample.index}: the reward is {sample.reward!r}: it must be finite, or "
                    "None where there is none yet; nothing was added"
                )

    def give_back(self, groups: Sequence[SampleGroup]) -> None:
        """Put the groups into the buffer with what they have sampled."""
        self.add_samples(list(groups))

    def _get_samples_from_buffer(self, num_samples: int) -> list[SampleGroup]:
        if not self.buffer or num_samples == 0:
            return []
        if self.buffer_filter is pop_first:  # as below, without a look at the whole buffer
            taken = pop_first(self, None, self.buffer, num_samples)
            self._buffered.difference_update(map(group_index_of, taken))
            return taken
        left = list(self.buffer)
        taken = self.buffer_filter(self.args or self, None, left, num_samples)
        known = {id(group) for group in self.buffer}
        chosen = {id(group) for group in taken}
        if len(taken) > num_samples or len(chosen) != len(taken) or not chosen <= known:
            raise ValueError(
                f"the buffer filter returned {len(taken)} groups where {num_samples} were requested, "
                f"{len(chosen - known)} of them not from the buffer: return at most num_samples different groups of it"
            )
        for place, group in enumerate(taken):
            self._check_group(place, group)  # a filter may have changed it
        deleted = known - {id(group) for group in left} - chosen
        if deleted:
            self.dropped["the buffer filter deleted it"] += len(deleted)
        gone = chosen | deleted
        self.buffer = [group for group in self.buffer if id(group) not in gone]
        self._buffered = set(map(group_index_of, self.buffer))
        return list(taken)

    def get_buffer_length(self) -> int:
        """Return the number of groups in the buffer."""
        with self._lock:
            return len(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the buffer as JSON values."""
        with self._lock:
            return super().state_dict() | {"buffer": [group_to_json(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; groups owed then are handed out first, then the buffer."""
        with self._lock:
            super().load_state_dict(state)
            self.buffer = self._groups_from_json(state.get("buffer", []))
            self._buffered = set(map(group_index_of, self.buffer))


class CurriculumDataSource(RolloutDataSourceWithBuffer):
    """Draws a row when its group is requested; groups that were given back still come first.

    Args:
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
        self._ahead.append(DrawnRow(position, row))

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


class IterableDataSource(RolloutDataSourceWithBuffer):
    """An iterable restarts each time it ends; an iterator ends for good.

    Args:
        rows: Rows, or batches of rows as a data loader gives them: a list is a batch.
    """

    def __init__(self, rows: Iterable[Any], *, n_samples_per_prompt: int = 1) -> None:
        super().__init__(n_samples_per_prompt=n_samples_per_prompt)
        self._source = rows
        self._iterator: Iterator[Any] = iter(rows)
        self._endless = self._iterator is not rows
        self.ended = False
        """Whether the rows have ended."""

    def _read_ahead(self, count: int) -> None:
        """Read one row or batch, if there is one."""
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
                self._ahead.extend(DrawnRow(None, row) for row in (item if isinstance(item, list) else [item]))

    def state_dict(self) -> dict[str, Any]:
        """Raise: an iterable has no position to save."""
        raise ConfigError("an iterable has no position to save: use RolloutDataSource over a list or dataset")
