"""A data source that also takes samples back: stopped groups with their tokens, surplus groups, finished ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from areal_lite.api.dotted_path import load_object
from areal_lite.data.source.data_source_state import group_to_json
from areal_lite.data.source.rollout_data_source import RolloutDataSource, SampleGroup, group_index_of
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError

BufferFilter = Callable[[Any, int | None, list[SampleGroup], int], list[SampleGroup]]
"""``filter(source, rollout_id, buffer, num_samples)`` returns at most ``num_samples`` groups of ``buffer``.

``source`` is the data source, ``rollout_id`` is None. It may leave the buffer alone or delete from it:
what it returns is handed out and leaves the buffer; what it deletes and does not return is dropped.
"""


def pop_first(
    source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Take the groups that were added first."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def highest_reward_first(
    source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Take the groups of the highest mean reward; those without a reward yet come last."""
    return sorted(buffer, key=_mean_reward, reverse=True)[:num_samples]


def _mean_reward(group: SampleGroup) -> float:
    rewards = [sample.get_reward_value() for sample in group if isinstance(sample.reward, Real)]
    return sum(rewards) / len(rewards) if rewards else -math.inf


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Hands out its buffer first.

    Args:
        buffer_filter: Chooses from the buffer: a function or its dotted path; None is :func:`pop_first`.
        **settings: Those of :class:`RolloutDataSource`.

    Raises:
        ConfigError: If the filter cannot be loaded or is not a function.
    """

    supports_buffer = True

    def __init__(
        self, dataset: Any = None, *, buffer_filter: BufferFilter | str | None = None, **settings: Any
    ) -> None:
        super().__init__(dataset, **settings)
        if isinstance(buffer_filter, str):
            buffer_filter = load_object(buffer_filter, where="buffer_filter")
        if buffer_filter is not None and not callable(buffer_filter):
            raise ConfigError(f"buffer_filter is {buffer_filter!r}: it must be a function or its dotted path")
        self.buffer: list[SampleGroup] = []
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
            present = {group_index_of(group) for group in self.buffer}
            for place, group in enumerate(samples):
                self._check_group(place, group)
                if group[0].group_index is None:
                    continue
                number = group_index_of(group)
                if number in present:
                    raise ValueError(f"group {number} is in the buffer already: add each group once")
                present.add(number)
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
                self.buffer.append(group)

    def _check_group(self, place: int, group: SampleGroup) -> None:
        if not all(isinstance(sample, Sample) for sample in group):
            raise ValueError(
                f"group {place} holds {[type(sample).__name__ for sample in group]}, not Samples"
            )
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
        left = list(self.buffer)
        taken = self.buffer_filter(self, None, left, num_samples)
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
        self.buffer = [group for group in self.buffer if id(group) not in chosen | deleted]
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
