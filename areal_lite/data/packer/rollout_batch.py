"""Between rows, episodes and the trainer by way of a data packer: inputs out, a training batch back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.data.packer.data_packer import DataPacker
from areal_lite.data.source.sample import Sample
from areal_lite.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from areal_lite.data.batch.data_proto import DataProto


def rollout_inputs(
    packer: DataPacker, rows: Sequence[Any], *, prompt_key: str = "prompt"
) -> list[dict[str, Any]]:
    """Return what workflows get for ``rows``, one dict each, in order.

    Where the packer makes something else of a row (text, messages), it is the dict's ``prompt_key``.

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


def training_batch(packer: DataPacker, results: Iterable[EpisodeResult]) -> DataProto:
    """Return the accepted results as the batch the trainer takes, one row per sequence.

    Raises:
        ConfigError: If a trajectory has no ``loss_mask`` or no ``rewards``.
        TrainingError: If nothing was accepted.
    """
    from areal_lite.data.batch.data_proto import DataProto

    processed = [
        packer.get_policy_input(sample.row, sample) for result in results for sample in result_samples(result)
    ]
    if not processed:
        raise TrainingError(
            "there is no accepted episode to train on: look at the dump for what became of them"
        )
    length = packer.policy_compute_max_len(processed)
    return DataProto.from_single_dict(packer.policy_collate_fn(processed, length))


def result_samples(result: EpisodeResult) -> Iterator[Sample]:
    """Yield the sequences of an accepted result without padding, as they were recorded; none of another.

    Raises:
        ConfigError: If the trajectory has no ``loss_mask`` or no ``rewards``.
    """
    tensors = result.trajectory
    if result.status is not EpisodeStatus.ACCEPTED or tensors is None:
        return
    for key, what in (
        ("loss_mask", "which tokens the policy sampled"),
        ("rewards", "how good each sequence is"),
    ):
        if key not in tensors:
            raise ConfigError(
                f"task {result.task_id}: the trajectory has no {key!r}, so training cannot know {what}; "
                f"it has {sorted(tensors)}: return {key!r} from the workflow"
            )
    row = result.samples[0].row if result.samples else dict(result.data)
    present = tensors["attention_mask"].numpy() != 0
    columns = {
        "tokens": tensors["input_ids"].numpy(),
        "trained": tensors["loss_mask"].numpy() != 0,
        "logprobs": tensors["logprobs"].float().numpy() if "logprobs" in tensors else None,
        "versions": tensors["versions"].numpy() if "versions" in tensors else None,
    }
    for number, (keep, reward) in enumerate(zip(present, result.rewards, strict=True)):
        sample = Sample(group_index=result.group_id, row=row, metadata={"task_id": str(result.task_id)})
        own = {name: None if column is None else column[number][keep] for name, column in columns.items()}
        _append_runs(sample, **own)
        sample.reward = reward
        sample.status = Sample.Status.COMPLETED
        yield sample


def _append_runs(sample: Sample, *, tokens: Any, trained: Any, logprobs: Any, versions: Any) -> None:
    """Append the runs of trained and untrained tokens in turn."""
    borders = np.flatnonzero(np.diff(trained)) + 1
    for start, end in zip([0, *borders.tolist()], [*borders.tolist(), len(tokens)], strict=True):
        run = slice(start, end)
        if trained[start]:
            sample.append(
                tokens[run].tolist(),
                logprobs=None if logprobs is None else logprobs[run].tolist(),
                versions=None if versions is None else versions[run].tolist(),
                sampled=True,
            )
        else:
            sample.append(tokens[run].tolist())
