"""Data sources that also take samples back: stopped groups with their tokens, surplus groups, finished ones."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
import numpy as np
from areal_lite.config.dotted_path import load_object
from areal_lite.data.source.rollout_data_source import (
    RolloutDataSource,
    group_index_of,
    group_to_json,
    groups_from_json,
)
from areal_lite.data.source.sample import Sample
from areal_lite.data.source.source_settings import BufferFilter, SampleGroup, SourceSettings
from areal_lite.errors import ConfigError


def pop_first(source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int) -> list[SampleGroup]:
    """Take the groups that were added first."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Hands out its buffer first, in the order of ``settings.buffer_filter``."""

    supports_buffer = True

    def __init__(self, dataset: Any = None, settings: SourceSettings | None = None) -> None:
        super().__init__(dataset, settings)
        chosen = self.settings.buffer_filter
        if isinstance(chosen, str):
            chosen = load_object(chosen, where="buffer_filter")
        if chosen is not None and not callable(chosen):
            raise ConfigError(f"buffer_filter is {chosen!r}: it must be a function or its dotted path")
        self.buffer: list[SampleGroup] = []
        self._buffered: set[int] = set()
        self.buffer_filter: BufferFilter = chosen or pop_first

    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Append groups to the buffer, all or, on an error, none. Samples of one group that share an index count as one
        member; groups and samples without a number get one. ValueError if it is not a list of groups, or a group does
        not have ``n_samples_per_prompt`` members, is already in the buffer, or has a non-finite reward."""
        if not isinstance(samples, list) or not all(isinstance(group, list) for group in samples):
            kinds = samples if not isinstance(samples, list) else [type(group).__name__ for group in samples]
            raise ValueError(f"samples must be a list of lists of Sample, got {kinds!r}"[:500])
        with self._lock:
            for index, group in enumerate(samples):
                self._check_group(index, group)
            given = Counter(group_index_of(group) for group in samples if group[0].group_index is not None)
            for number, count in given.items():
                if number in self._buffered or count > 1:
                    raise ValueError(f"group {number} is in the buffer already: add each group once")
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

    def _check_group(self, number: int, group: SampleGroup) -> None:
        if not all(isinstance(sample, Sample) for sample in group):
            raise ValueError(f"group {number} holds {[type(sample).__name__ for sample in group]}, not Sample")
        indices = [sample.index for sample in group]
        members = len({*indices} - {None}) + indices.count(None)
        if members != self.settings.n_samples_per_prompt:
            raise ValueError(
                f"group {number} has {members} members and n_samples_per_prompt is "
                f"{self.settings.n_samples_per_prompt}: add whole groups"
            )
        for sample in group:
            values = sample.reward.values() if isinstance(sample.reward, dict) else [sample.reward]
            if any(isinstance(value, float | np.floating) and not math.isfinite(value) for value in values):
                raise ValueError(
                    f"group {number}, sample {sample.index}: the reward is {sample.reward!r}: it must be finite, or "
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
        taken = self.buffer_filter(self.settings.slime_args or self, None, left, num_samples)
        known = {id(group) for group in self.buffer}
        chosen = {id(group) for group in taken}
        if len(taken) > num_samples or len(chosen) != len(taken) or not chosen <= known:
            raise ValueError(
                f"the buffer filter returned {len(taken)} groups where {num_samples} were requested, "
                f"{len(chosen - known)} of them not from the buffer: return at most num_samples different groups of it"
            )
        for index, group in enumerate(taken):
            self._check_group(index, group)  # a filter may have changed it
        if deleted := known - {id(group) for group in left} - chosen:
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
        with self._lock:
            return super().state_dict() | {"buffer": [group_to_json(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; groups owed then are handed out first, then the buffer."""
        with self._lock:
            super().load_state_dict(state)
            self.buffer = groups_from_json(state.get("buffer", []), self.rows)
            self._buffered = set(map(group_index_of, self.buffer))
