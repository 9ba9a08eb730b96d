"""Groups of samples for rollouts, drawn from rows whose position is saved and restored.

Guarantees that a group handed out is owed until it is trained, dropped or given back, and that a state loaded in
another process hands the owed groups out again, before all others. A state is JSON. The order of the rows is
:mod:`areal_lite.data.source.row_streams`'. Any thread may call any method.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
import orjson
from areal_lite.data.packer.data_packer import UnpreparedRow, rollout_inputs
from areal_lite.data.rows.fingerprint import differences
from areal_lite.data.source.row_streams import DatasetRows, IterableRows, RowStream, empty_rows
from areal_lite.data.source.sample import Sample, SampleStatus, deep_copy, with_own_containers
from areal_lite.data.source.source_settings import SampleGroup, SourceSettings, dataset_of
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.files.whole_files import storing, write_whole

SCHEMA = 1


class RolloutDataSource:
    """A read-only source; :class:`RolloutDataSourceWithBuffer` also takes samples.

    ``dataset`` is a dataset (see :class:`DatasetRows`), whose rows are dicts of columns, text, or lists of messages;
    another :class:`RowStream` with its own settings; slime's ``args``, which name both; or None, for samples without a
    row. ``settings`` are what becomes of a row.
    """

    supports_buffer = False

    def __init__(self, dataset: Any = None, settings: SourceSettings | None = None) -> None:
        if hasattr(dataset, "n_samples_per_prompt") and hasattr(dataset, "rollout_global_dataset"):
            dataset, settings = dataset_of(dataset)  # of slime's args
        settings = settings or SourceSettings()
        if not isinstance(dataset, RowStream):
            dataset = IterableRows(empty_rows(), settings) if dataset is None else DatasetRows(dataset, settings)
        self.rows: RowStream = dataset
        self.settings: SourceSettings = self.rows.settings
        self.sample_index = 0
        """Samples handed out so far: the index of the next one."""
        self.metadata: dict[str, Any] = {}
        self.dropped: Counter[str] = Counter()
        """Groups that ended without training, by reason."""
        self._lock = threading.RLock()
        self._next_group = 0
        self._owed: dict[int, SampleGroup] = {}
        self._returned: list[SampleGroup] = []
        """Groups to hand out before any row is drawn."""
        self._fingerprint = {
            "dataset": self.settings.name,
            "seed": self.settings.seed,
            "shuffle": self.settings.shuffle,
            "n_samples_per_prompt": self.settings.n_samples_per_prompt,
            **self.rows.content(),
        }

    @property
    def epoch_id(self) -> int:
        """Epochs of the rows that were drawn completely."""
        return self.rows.epoch_id

    @property
    def sample_offset(self) -> int:
        """Rows drawn in this epoch."""
        return self.rows.sample_offset

    def __len__(self) -> int:
        """Return the number of rows in one epoch."""
        return len(self.rows)

    def get_samples(self, num_samples: int) -> list[SampleGroup]:
        """Return ``num_samples`` groups; they are owed from here on. What was taken before an error is handed out next
        time. ValueError if ``num_samples`` is below 0; ConfigError if a row is neither a dict nor text nor a list."""
        if num_samples < 0:
            raise ValueError(f"num_samples is {num_samples}: it must be 0 or more")
        with self._lock:
            taken = self._returned[:num_samples]
            del self._returned[:num_samples]
            try:
                taken += self._get_samples_from_buffer(num_samples - len(taken))
                for drawn in self.rows.draw(num_samples - len(taken)):
                    taken.append(self.settings.new_group(drawn, self._next_group, self.sample_index))
                    self._next_group += 1
                    self.sample_index += self.settings.n_samples_per_prompt
            except BaseException:
                self._returned[:0] = taken
                raise
            groups = [list(group) for group in taken]  # a hand-out is known by its list
            self._owed |= {group_index_of(group): group for group in groups}
            return groups

    def rollout_input(self, group: SampleGroup) -> dict[str, Any]:
        """Return the workflow's input for a group; the packer, user code, makes it."""
        if group[0].mini_batch is not None:
            inputs_of_rows, index = group[0].mini_batch
            return inputs_of_rows()[index]  # type: ignore[no-any-return]
        row, settings = group[0].row, self.settings
        if settings.packer is None:
            return settings.columns_of(row)
        return rollout_inputs(settings.packer, [with_own_containers(row)], prompt_key=settings.prompt_key)[0]

    def unprepared_input(self, group: SampleGroup) -> UnpreparedRow:
        """Return the row's columns, which become :meth:`rollout_input` when the group starts."""
        return UnpreparedRow(self.settings.columns_of(group[0].row), partial(self.rollout_input, group))

    def __iter__(self) -> Iterator[SampleGroup]:
        """Return an endless iterator over groups."""
        while groups := self.get_samples(1):
            yield from groups

    def _get_samples_from_buffer(self, num_samples: int) -> list[SampleGroup]:
        return []

    def mark_trained(self, groups: Iterable[SampleGroup]) -> None:
        """Mark groups as trained, so no longer owed; skip those that are not, or were handed out again since."""
        with self._lock:
            for group in groups:
                _end_owed(self._owed, group)

    def drop(self, group: SampleGroup, reason: str) -> None:
        """End the group without training; its row comes again in the next epoch."""
        with self._lock:
            if _end_owed(self._owed, group):
                self.dropped[reason] += 1

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

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge JSON values into the metadata, which are part of the state; ValueError for others, NaN or infinity."""
        try:
            json.dumps(metadata, allow_nan=False, default=lambda value: value.tolist())  # of numpy
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"metadata {metadata!r:.200}: {error}: give JSON values, None for nan") from None
        with self._lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values; rows are named by position, not copied."""
        with self._lock:
            return {
                "schema": SCHEMA,
                "fingerprint": self._fingerprint,
                "sample_index": self.sample_index,
                "group_index": self._next_group,
                "metadata": deep_copy(self.metadata),
                "dropped": dict(self.dropped),
                "owed": [group_to_json(group) for group in self._owed.values()],
                "returned": [group_to_json(group) for group in self._returned],
                **self.rows.state_dict(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, owed groups first; ConfigError if dataset, seed, shuffle or group size changed."""
        if state.get("schema", SCHEMA) != SCHEMA:
            raise ConfigError(
                f"the data state has schema {state['schema']}, this version reads {SCHEMA}: use the one that wrote it"
            )
        with self._lock:
            then = state.get("fingerprint", self._fingerprint)
            if changed := differences(then if self.settings.name else {**then, "dataset": ""}, self._fingerprint):
                raise ConfigError(
                    f"the state was made with other data: {changed}. Use the data and settings of the run "
                    "that saved it, or start another trial"
                )
            self.rows.load_state_dict(state)
            self.sample_index = int(state.get("sample_index", 0))
            self._next_group = int(state.get("group_index", 0))
            self.metadata = deep_copy(state.get("metadata", {}))
            self.dropped = Counter(state.get("dropped", {}))
            self._owed.clear()
            self._returned = [
                *sorted(groups_from_json(state.get("owed", []), self.rows), key=group_index_of),
                *groups_from_json(state.get("returned", []), self.rows),
            ]

    def save(self, rollout_id: int, directory: Path | str | None = None) -> None:
        """Write the state to ``directory/rollout/global_dataset_state_dict_{rollout_id}.json`` atomically. Writes
        nothing without rows. The default of ``directory`` is slime's ``args.save``; ConfigError without either,
        StorageError if it cannot be written; an older state stays."""
        directory = directory or getattr(self.settings.slime_args, "save", None)
        if not self.rows.has_position:
            return
        if directory is None:
            raise ConfigError(f"save({rollout_id}): no directory is given: pass one")
        path, content = state_path(directory, rollout_id), state_bytes(self.state_dict())
        with storing(f"the data state {path}"):
            write_whole(path, content)

    def load(self, rollout_id: int, directory: Path | str | None = None, *, strict: bool = True) -> bool:
        """Load what :meth:`save` wrote for ``rollout_id`` and return whether there was anything to load. Loads nothing
        without rows or directory, whose default is slime's ``args.load``. CheckpointError if the file is broken or,
        with ``strict``, missing; else the state stays fresh. ConfigError if it was made with other data."""
        directory = directory or getattr(self.settings.slime_args, "load", None)
        if not self.rows.has_position or directory is None:
            return False
        path = state_path(directory, rollout_id)
        try:
            state = orjson.loads(path.read_bytes())
        except FileNotFoundError:
            if not strict:
                return False
            raise CheckpointError(
                f"there is no data state {path}: name the directory and the step of a checkpoint, or start a new run"
            ) from None
        except (OSError, orjson.JSONDecodeError) as error:
            raise CheckpointError(f"the data state {path} cannot be read: {error}: use another step") from error
        self.load_state_dict(state)
        return True


def _end_owed(owed: dict[int, SampleGroup], group: SampleGroup) -> bool:
    """Remove the group; return False if it is not owed, or was handed out again as another list since."""
    number = group_index_of(group)
    if owed.get(number) is not group:
        return False
    del owed[number]
    return True


def group_index_of(group: SampleGroup) -> int:
    """Return the number of a group of a data source."""
    if not isinstance(index := group[0].group_index, int):
        raise ValueError(f"the group of {group[0]!r} is not numbered: it does not come from a data source")
    return index


def restarted(group: SampleGroup) -> SampleGroup:
    """Return one pending sample per member of the group, without what was sampled."""
    first = {sample.index: sample for sample in reversed(group)}
    members = [first[index] for index in dict.fromkeys(sample.index for sample in group)]
    for sample in members:
        sample.reset()
    return members


def state_path(directory: Path | str, rollout_id: int) -> Path:
    """Return the file of the state after ``rollout_id`` rollouts."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


def state_bytes(state: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(f"the data state is not JSON ({error}): keep JSON in metadata and rewards") from error


def group_to_json(group: list[Sample]) -> list[dict[str, Any]]:
    """Return the samples as JSON values; a row is named by its position if it has one."""
    saved = []
    for sample in group:
        values = sample.to_dict()
        if sample.position is not None:
            for key in ("row", "prompt", "label"):
                del values[key]
        if sample.status is SampleStatus.PENDING and not sample.tokens:
            for key in ("tokens", "loss_mask", "logprobs", "versions", "spans", "response", "reward"):
                del values[key]
        saved.append(values)
    return saved


def groups_from_json(saved: Iterable[list[dict[str, Any]]], stream: RowStream) -> list[list[Sample]]:
    """Return saved groups as samples, with their rows."""
    groups, settings = list(saved), stream.settings
    positions = {v["position"] for group in groups for v in group if v.get("position") is not None}
    rows = dict(zip(positions, stream.read(list(positions)), strict=True)) if positions else {}

    def sample_of(saved: dict[str, Any]) -> Sample:  # siblings share the row, and nothing else
        position = saved["position"]
        return Sample.from_dict(saved | (settings.sample_fields(rows[position]) if position in rows else {}))

    loaded = [[sample_of(saved) for saved in group] for group in groups]
    again = settings.in_mini_batches([None] * len(loaded), [group[0].row for group in loaded])
    for group, drawn in zip(loaded, again, strict=True):
        for sample in group:
            sample.mini_batch = drawn.mini_batch
    return loaded
