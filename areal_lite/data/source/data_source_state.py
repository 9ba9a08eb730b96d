"""The state of a data source on disk: its file, and its groups as JSON values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from areal_lite.data.source.row_streams import RowStream
from areal_lite.data.source.sample import Sample, SampleStatus
from areal_lite.errors import CheckpointError, ConfigError


def state_path(directory: Path | str, rollout_id: int) -> Path:
    """Return the file of the state after ``rollout_id`` rollouts."""
    return Path(directory) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"


def state_bytes(state: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(state, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(f"the data state is not JSON ({error}): keep JSON in metadata and rewards") from error


def read_state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no data state {path}: name the directory and the step of a checkpoint, or start a new run"
        ) from None
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"the data state {path} cannot be read: {error}: use another step") from error
    return state


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
