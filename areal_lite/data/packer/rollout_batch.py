"""Run a data packer: rows to workflow input, accepted groups to a training batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal_lite.api.trajectory import Group
from areal_lite.data.packer.data_packer import DataPacker
from areal_lite.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from areal_lite.data.batch.data_proto import DataProto


def rollout_inputs(
    packer: DataPacker, rows: Sequence[Any], *, prompt_key: str = "prompt"
) -> list[dict[str, Any]]:
    """Return what workflows get for ``rows``, one dict each, in order.

    If the packer turns a row into text or messages, they become the dict's ``prompt_key``.

    Raises:
        ConfigError: If the packer's ``rollout_collate_fn`` gives another number of inputs.
    """
    inputs = packer.rollout_collate_fn([packer.get_rollout_input(row) for row in rows])
    if len(inputs) != len(rows):
        raise ConfigError(
            f"{type(packer).__name__}.rollout_collate_fn made {len(inputs)} inputs of {len(rows)}: return one for each"
        )
    return [
        dict(item)
        if isinstance(item, Mapping)
        else {**(row if isinstance(row, Mapping) else {}), prompt_key: item}
        for row, item in zip(rows, inputs, strict=True)
    ]


def training_batch(packer: DataPacker, groups: Iterable[Group]) -> DataProto:
    """Return the accepted groups as a ``DataProto``, one item per sequence, each through the packer.

    The trainer takes groups as they are; this is for a packer that changes what is trained.

    Raises:
        ConfigError: If a trajectory has no reward.
        TrainingError: If nothing was accepted.
    """
    from areal_lite.data.batch.data_proto import DataProto
    from areal_lite.data.batch.training_batch import training_sequences

    processed = [
        packer.get_policy_input(row_of(group), sequence)
        for group in groups
        for sequence in training_sequences([group])
    ]
    if not processed:
        raise TrainingError("there is no accepted episode to train on: look at the dump for the reasons")
    length = packer.policy_compute_max_len(processed)
    return DataProto.from_single_dict(packer.policy_collate_fn(processed, length))


def row_of(group: Group) -> dict[str, Any]:
    """Return the dataset row of a group, or the workflow's input if it came from no data source."""
    row: dict[str, Any] = group.samples[0].row if group.samples else dict(group.data)
    return row
