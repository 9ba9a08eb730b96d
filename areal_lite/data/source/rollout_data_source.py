"""Groups of samples for rollouts, drawn from a dataset whose position is saved and restored.

Guarantees that every epoch gives each row once, in an order that depends on (seed, epoch) alone; that a
group handed out is owed until it is trained, dropped or given back; and that a state loaded in another
process hands the owed groups out again, before all others. Any thread may call any method.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_lite.data.packer.data_packer import DataPacker, MiniBatch, rollout_inputs
from areal_lite.data.rows.fingerprint import FINGERPRINT_ROWS, content_hash, spread_positions
from areal_lite.data.source.data_source_state import (
    check_fingerprint,
    group_to_json,
    read_state,
    state_path,
    write_state,
)
from areal_lite.data.source.sample import Prompt, Sample, deep_copy, with_own_containers
from areal_lite.data.source.slime_args import is_slime_args, settings_of
from areal_lite.errors import ConfigError

SampleGroup = list[Sample]
"""The samples of one dataset row: slime's view of a :class:`~areal_lite.api.trajectory.Group`."""


class DrawnRow(NamedTuple):
    """A dataset row on its way into a group."""

    position: int | None
    row: Any
    mini_batch: tuple[MiniBatch, int] | None = None
    """The rows it becomes workflow input with, and its place there."""


SCHEMA = 1
"""Version of the state file."""
_AHEAD = 64
"""Minimum rows read at once: from disk, many rows cost little more than one."""


class RolloutDataSource:
    """A read-only source; :class:`RolloutDataSourceWithBuffer` also takes samples.

    Args:
        dataset: Rows by position: a list, a ``datasets.Dataset``, or an object whose attribute ``rows`` is
            one; it may grow at its end, and new rows are drawn from the next epoch on. None gives samples without
            a row, for tests. A row is a dict of columns, text, or a list of messages. slime's ``args`` are taken too,
            see :mod:`areal_lite.data.source.slime_args`.
        seed: Determines the order of the epochs.
        shuffle: False keeps the order of the rows in every epoch.
        prompt_key: Column that becomes ``Sample.prompt``; a row without it has an empty prompt.
        label_key: Column that becomes ``Sample.label``.
        metadata_key: Column, a dict, that becomes ``Sample.metadata``.
        reward_key: Entry of a reward that is a dict, for filters that compare rewards.
        render: Makes ``Sample.prompt`` of a row; None takes the column as it is.
        packer: Turns a row into workflow input; None passes the row.
        mini_batch_size: Rows that a packer with its own ``rollout_collate_fn`` gets at once.
        name: Name of the dataset, for its fingerprint.

    Raises:
        ConfigError: If the dataset has no rows.
    """

    supports_buffer = False
    """Whether :meth:`add_samples` works."""

    def __init__(
        self,
        dataset: Any = None,
        *,
        n_samples_per_prompt: int = 1,
        seed: int = 1,
        shuffle: bool = False,
        prompt_key: str = "prompt",
        label_key: str | None = None,
        metadata_key: str | None = None,
        reward_key: str | None = None,
        render: Callable[[Any], Prompt] | None = None,
        packer: DataPacker | None = None,
        mini_batch_size: int = 1,
        name: str = "",
    ) -> None:
        self.args: Any = None
        """slime's ``args``, if it was made from them."""
        if is_slime_args(dataset):
            type(self).__init__(self, **settings_of(dataset, buffers=self.supports_buffer))
            self.args = dataset
            return
        if n_samples_per_prompt < 1:
            raise ConfigError(f"n_samples_per_prompt is {n_samples_per_prompt}: it must be 1 or more")
        self.dataset = dataset
        self.n_samples_per_prompt = n_samples_per_prompt
        self.epoch_id = 0
        self.sample_index = 0
        """Samples handed out so far: the index of the next one."""
        self.sample_offset = 0
        """Rows drawn in this epoch."""
        self.metadata: dict[str, Any] = {}
        self.dropped: Counter[str] = Counter()
        """Groups that ended without training, by reason."""
        self._seed = seed
        self._shuffle = shuffle
        self._prompt_key = prompt_key
        self._label_key = label_key
        self._metadata_key = metadata_key
        self.reward_key = reward_key
        self._render = render
        self._packer = packer
        self._mini_batch_size = mini_batch_size if packer is not None and packer.collates else 1
        self._name = name
        self._lock = threading.RLock()
        self._next_group = 0
        self._owed: dict[int, SampleGroup] = {}
        self._returned: list[SampleGroup] = []
        """Groups to hand out before any row is drawn."""
        self._ahead: deque[DrawnRow] = deque()
        """Rows read and not drawn yet."""
        self._order: NDArray[np.int64] = np.empty(0, np.int64)
        if dataset is not None:
            if len(self._rows) == 0:
                raise ConfigError(f"the dataset {name} has no rows: give at least one")
            self._order = self._epoch_order(len(self._rows))
        self._fingerprint = {
            "dataset": name,
            "seed": seed,
            "shuffle": shuffle,
            "n_samples_per_prompt": n_samples_per_prompt,
            **self._content(),
        }

    # -- drawing ---------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Return ``num_samples`` groups; they are owed from here on.

        What was taken before an error is handed out next time.

        Raises:
            ValueError: If ``num_samples`` is below 0.
            ConfigError: If a row is neither a dict nor text nor a list.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}: it must be 0 or more")
        with self._lock:
            taken = self._returned[:num_samples]
            del self._returned[:num_samples]
            try:
                taken += self._get_samples_from_buffer(num_samples - len(taken))
                for drawn in self._draw(num_samples - len(taken)):
                    taken.append(self._new_group(drawn))
            except BaseException:
                self._returned[:0] = taken
                raise
            groups = [list(group) for group in taken]  # a hand-out is known by its list
            for group in groups:
                self._owed[group_index_of(group)] = group
            return groups

    def rollout_input(self, group: SampleGroup) -> dict[str, Any]:
        """Return the workflow's input for a group."""
        if group[0].mini_batch is not None:
            mini_batch, place = group[0].mini_batch
            made: dict[str, Any] = mini_batch.input(place)
            return made
        row = group[0].row
        if self._packer is None:
            return self.columns_of(row)
        return rollout_inputs(self._packer, [with_own_containers(row)], prompt_key=self._prompt_key)[0]

    def __iter__(self) -> Iterator[SampleGroup]:
        """Return an endless iterator over groups."""
        while groups := self.get_samples(1):
            yield from groups

    def _get_samples_from_buffer(self, num_samples: int) -> list[SampleGroup]:
        return []

    def _draw(self, count: int) -> Iterator[DrawnRow]:
        """Yield the next ``count`` rows, fewer if they end; a row counts as drawn when the next is requested."""
        for left in range(count, 0, -1):
            if not self._ahead:
                self._read_ahead(left)
            if not self._ahead:
                return
            yield self._ahead[0]
            self._ahead.popleft()
            self.sample_offset += 1

    def _read_ahead(self, count: int) -> None:
        """Read at least one row, if there is one; ``count`` are needed."""
        if self.dataset is None:
            self._ahead.append(DrawnRow(None, {}))
            return
        if self.sample_offset == len(self._order):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order = self._epoch_order(len(self._rows))
        size = self._mini_batch_size
        drawn = self.sample_offset % size  # rows of a mini-batch that were drawn before a restart
        end = self.sample_offset + max(count, _AHEAD)
        positions = self._order[self.sample_offset - drawn : end + -end % size].tolist()
        self._ahead.extend(self._in_mini_batches(positions, list(self._read(positions)))[drawn:])

    def _in_mini_batches(self, positions: Sequence[int | None], rows: Sequence[Any]) -> list[DrawnRow]:
        """Return the rows, those that become workflow input together with their mini-batch."""
        size = self._mini_batch_size
        if size == 1:
            return list(map(DrawnRow, positions, rows))
        assert self._packer is not None
        drawn: list[DrawnRow] = []
        for start in range(0, len(rows), size):
            own = [with_own_containers(row) for row in rows[start : start + size]]
            mini_batch = MiniBatch(self._packer, own, prompt_key=self._prompt_key)
            drawn += [DrawnRow(positions[start + i], rows[start + i], (mini_batch, i)) for i in range(len(own))]
        return drawn

    def _new_group(self, drawn: DrawnRow) -> SampleGroup:
        row = deep_copy(_checked(drawn.row))
        of_row = self._row_fields(row)
        metadata = self._metadata_of(row)
        number, self._next_group = self._next_group, self._next_group + 1
        first, self.sample_index = self.sample_index, self.sample_index + self.n_samples_per_prompt
        group = [Sample(first, group_index=number, position=drawn.position, metadata=metadata, **of_row)]
        group[0].mini_batch = drawn.mini_batch
        for index in range(first + 1, self.sample_index):
            group.append(group[0].sibling(index))
        return group

    def columns_of(self, row: Any) -> dict[str, Any]:
        """Return a row as a dict; text and messages alone are the column ``prompt_key``."""
        return row if isinstance(row, Mapping) else {self._prompt_key: row}  # type: ignore[return-value]

    def _row_fields(self, row: Any) -> dict[str, Any]:
        """Return the sample's fields that come from its row."""
        columns = self.columns_of(row)
        prompt = self._render(row) if self._render is not None else deep_copy(columns.get(self._prompt_key, ""))
        label = columns.get(self._label_key) if self._label_key else None
        return {"row": row, "prompt": prompt, "label": deep_copy(label)}

    def _metadata_of(self, row: Any) -> dict[str, Any]:
        if self._metadata_key is None or not isinstance(row, Mapping):
            return {}
        metadata = row.get(self._metadata_key) or {}
        if not isinstance(metadata, Mapping):
            raise ConfigError(
                f"the column {self._metadata_key!r} (metadata_key) of a row is {metadata!r:.80}: it must be a dict"
            )
        return dict(deep_copy(metadata))

    @property
    def _rows(self) -> Any:
        return getattr(self.dataset, "rows", self.dataset)

    def _read(self, positions: list[int]) -> Iterable[Any]:
        rows = self._rows
        if hasattr(rows, "__getitems__"):
            return rows.__getitems__(positions)  # type: ignore[no-any-return]
        return [rows[position] for position in positions]

    def _epoch_order(self, size: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(size)
        digest = hashlib.sha256(f"{self._seed}-{self.epoch_id}".encode()).digest()
        return np.random.default_rng(list(digest[:16])).permutation(size)

    def __len__(self) -> int:
        """Return the number of rows in one epoch."""
        return len(self._order)

    def _content(self) -> dict[str, Any]:
        """Return the number of rows, and a hash of a few of them and of the beginning of the first epoch.

        Rows that the dataset adds during a run are left out: its own state has them.
        """
        rows = getattr(self._rows, "on_disk", self._rows) or ()
        size = len(rows)
        order = self._order if size == len(self._order) else self._epoch_order(size)
        some = [_checked(rows[position]) for position in spread_positions(size)]
        return {"rows": size, "content": content_hash([order[:FINGERPRINT_ROWS].tolist(), *some])}

    # -- how an owed group ends ------------------------------------------------------------------

    def mark_trained(self, groups: Iterable[SampleGroup]) -> None:
        """Mark groups as trained, so that they are no longer owed.

        Groups that are not owed, or were given back and handed out again since, are skipped.
        """
        with self._lock:
            for group in groups:
                self._stop_owing(group)

    def drop(self, group: SampleGroup, reason: str) -> None:
        """End the group without training; its row comes again in the next epoch."""
        with self._lock:
            if self._stop_owing(group):
                self.dropped[reason] += 1

    def _stop_owing(self, group: SampleGroup) -> bool:
        """Stop owing this group; return whether it was owed."""
        number = group_index_of(group)
        owed = self._owed.get(number) is group
        if owed:
            del self._owed[number]
        return owed

    def give_back(self, groups: Sequence[SampleGroup]) -> None:
        """Hand the groups out again, before any row is drawn; discard what was sampled."""
        with self._lock:
            for group in groups:
                self._owed.pop(group_index_of(group), None)
                self._returned.append(restarted(group))

    def add_samples(self, samples: list[SampleGroup]) -> None:
        """Raise: this source has no buffer."""
        raise RuntimeError(
            f"Cannot add samples to {type(self).__name__}. This is a read-only data source: give_back() returns "
            "rows, RolloutDataSourceWithBuffer takes samples"
        )

    @property
    def num_owed(self) -> int:
        """Groups handed out that are neither trained, dropped nor given back."""
        with self._lock:
            return len(self._owed)

    # -- state -----------------------------------------------------------------------------------

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge JSON values into the metadata, which are part of the state.

        Raises:
            ValueError: If a value is not JSON, NaN or infinite.
        """
        try:
            json.dumps(metadata, allow_nan=False, default=lambda value: value.tolist())  # of numpy
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"metadata {metadata!r:.200}: {error}: give JSON values, None for nan") from None
        with self._lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return the metadata."""
        return self.metadata

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values; rows are named by position, not copied."""
        with self._lock:
            dataset_state = getattr(self.dataset, "state_dict", None)
            return {
                "schema": SCHEMA,
                "fingerprint": self._fingerprint,
                "epoch_id": self.epoch_id,
                "epoch_size": len(self._order),
                "sample_offset": self.sample_offset,
                "sample_index": self.sample_index,
                "group_index": self._next_group,
                "metadata": copy.deepcopy(self.metadata),
                "dropped": dict(self.dropped),
                "owed": [group_to_json(group) for group in self._owed.values()],
                "returned": [group_to_json(group) for group in self._returned],
                "dataset": dataset_state() if callable(dataset_state) else None,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; groups owed then are handed out first.

        Raises:
            ConfigError: If the dataset, seed, shuffle or group size have changed.
        """
        if state.get("schema", SCHEMA) != SCHEMA:
            raise ConfigError(
                f"the data state has schema {state['schema']}, this version reads {SCHEMA}: use the one that wrote it"
            )
        with self._lock:
            check_fingerprint(state.get("fingerprint", self._fingerprint), self._fingerprint)
            if state.get("dataset") is not None:
                self.dataset.load_state_dict(state["dataset"])
            self.epoch_id = int(state.get("epoch_id", 0))
            self.sample_offset = int(state.get("sample_offset", 0))
            self.sample_index = int(state.get("sample_index", 0))
            self._next_group = int(state.get("group_index", 0))
            self.metadata = copy.deepcopy(state.get("metadata", {}))
            self.dropped = Counter(state.get("dropped", {}))
            if self.dataset is not None:
                self._order = self._epoch_order(int(state.get("epoch_size", len(self._rows))))
            self._ahead.clear()
            self._owed.clear()
            owed = self._groups_from_json(state.get("owed", []))
            self._returned = [
                *sorted(owed, key=group_index_of),
                *self._groups_from_json(state.get("returned", [])),
            ]

    @property
    def has_position(self) -> bool:
        """Whether there is a position to save: there are rows."""
        return self.dataset is not None

    def save(self, rollout_id: int, directory: Path | str | None = None) -> None:
        """Write the state to ``directory/rollout/global_dataset_state_dict_{rollout_id}.json`` atomically.

        Writes nothing without rows. The default of ``directory`` is slime's ``args.save``.

        Raises:
            ConfigError: If there is no directory.
            StorageError: If it cannot be written; an older state stays.
        """
        directory = directory or getattr(self.args, "save", None)
        if not self.has_position:
            return
        if directory is None:
            raise ConfigError(f"save({rollout_id}): no directory is given: pass one")
        write_state(state_path(directory, rollout_id), self.state_dict())

    def load(self, rollout_id: int, directory: Path | str | None = None, *, strict: bool = True) -> bool:
        """Load what :meth:`save` wrote for ``rollout_id`` and return whether there was anything to load.

        Loads nothing without rows or directory.

        Args:
            directory: Where it was saved; None is slime's ``args.load``.
            strict: False keeps the fresh state if the file is missing.

        Raises:
            CheckpointError: If the file is missing (with ``strict``) or broken.
            ConfigError: If it was made with other data.
        """
        directory = directory or getattr(self.args, "load", None)
        if not self.has_position or directory is None:
            return False
        path = state_path(directory, rollout_id)
        if not strict and not path.exists():
            return False
        self.load_state_dict(read_state(path))
        return True

    def _groups_from_json(self, saved: Iterable[list[dict[str, Any]]]) -> list[SampleGroup]:
        """Return saved groups as samples, with their rows."""
        groups = list(saved)
        positions = {v["position"] for group in groups for v in group if v.get("position") is not None}
        rows = dict(zip(positions, self._read(list(positions)), strict=True)) if positions else {}
        loaded = [
            [
                Sample.from_dict(v | (self._row_fields(rows[v["position"]]) if v["position"] in rows else {}))
                for v in group
            ]
            for group in groups
        ]
        again = self._in_mini_batches([None] * len(loaded), [group[0].row for group in loaded])
        for group, drawn in zip(loaded, again, strict=True):
            for sample in group:
                sample.mini_batch = drawn.mini_batch
        return loaded


def _checked(row: Any) -> Any:
    if not isinstance(row, Mapping | str | list):
        raise ConfigError(
            f"a row of the dataset is {row!r:.100}: each row must be a dict of columns, text, or a list of messages"
        )
    return row


def group_index_of(group: SampleGroup) -> int:
    """Return the number of a group of a data source."""
    index = group[0].group_index
    if not isinstance(index, int):
        raise ValueError(f"the group of {group[0]!r} is not numbered: it does not come from a data source")
    return index


def restarted(group: SampleGroup) -> SampleGroup:
    """Return one pending sample per member of the group, without what was sampled."""
    first = {sample.index: sample for sample in reversed(group)}
    members = [first[index] for index in dict.fromkeys(sample.index for sample in group)]
    for sample in members:
        sample.reset()
    return members
