"""What the trainer takes: a batch of whole groups, every key declared and checked in one place.

The per-token keys, all aligned to the token itself, and ``rewards`` are those of a trajectory
(:mod:`areal_lite.api.tensor_dict`), with ``loss_mask`` and ``rewards`` required. A batch adds:

| key | shape | kind | required | meaning |
|---|---|---|---|---|
| group_ids | [B] | str | yes | rows with the same id are each other's baseline |
| task_ids | [B] | str | yes | the episode of each row, for messages |
| multi_modal_inputs | [B] | dict or None | no | what the model reads beside the tokens |

A row's tokens stand side by side, padding on either end. ``logprobs`` may be NaN, where nobody recorded
one. Knows nothing of advantages or losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_lite.api.tensor_dict import check_tensor_dict
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_sample import TrainingSample
from areal_lite.data.rows.collate import form_of, object_array

_DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "rewards": torch.float32,
}
"""What :func:`collate_training_samples` makes; other dtypes of the same kind are converted when rows are read."""
_REQUIRED = {
    "loss_mask": "which tokens the policy sampled",
    "rewards": "how good each sequence is",
}


def collate_training_samples(
    samples: Sequence[TrainingSample], length: int, *, pad_token_id: int
) -> dict[str, Any]:
    """Return the training batch of ``samples``, in order, for :meth:`DataProto.from_single_dict`.

    Args:
        samples: At least one.
        length: Tokens per row; shorter samples are padded on the right.
        pad_token_id: What ``input_ids`` holds there; the masks are False.

    Returns:
        The keys of a training batch. ``logprobs`` is absent if no sample recorded them, and NaN at the
        trained tokens of a sample that did not; ``versions`` is -1 where unknown; ``multi_modal_inputs``
        is absent if no sample has any.

    Raises:
        ValueError: If there are no samples, or one is longer than ``length``.
    """
    if not samples:
        raise ValueError("there are no samples to collate: give at least one")
    lengths = torch.tensor([len(sample.input_ids) for sample in samples])
    if int(lengths.max()) > length:
        longest = samples[int(lengths.argmax())]
        raise ValueError(
            f"task {longest.task_id}: the sample has {len(longest.input_ids)} tokens, length is {length}: nothing is "
            "cut here, so give a length that no sample exceeds"
        )
    present = torch.arange(length) < lengths[:, None]

    def padded(key: str, rows: Iterable[NDArray[Any]], padding: int) -> Tensor:
        tensor = torch.full(present.shape, padding, dtype=_DTYPES[key])
        for place, row in zip(tensor.numpy(), rows, strict=True):
            place[: len(row)] = row
        return tensor

    columns = {
        "input_ids": padded("input_ids", (sample.input_ids for sample in samples), pad_token_id),
        "attention_mask": present,
        "loss_mask": padded("loss_mask", (sample.loss_mask for sample in samples), 0),
        "versions": padded("versions", map(_versions, samples), -1),
        "rewards": torch.tensor([sample.reward for sample in samples], dtype=_DTYPES["rewards"]),
        "group_ids": object_array(sample.group_id for sample in samples),
        "task_ids": object_array(sample.task_id for sample in samples),
    }
    if any(sample.behaviour_logprobs is not None for sample in samples):
        columns["logprobs"] = padded("logprobs", map(_logprobs, samples), 0)
    if any(sample.multi_modal_inputs is not None for sample in samples):
        columns["multi_modal_inputs"] = object_array(sample.multi_modal_inputs for sample in samples)
    return columns


def _versions(sample: TrainingSample) -> NDArray[np.int64]:
    return np.full(len(sample.input_ids), -1) if sample.versions is None else sample.versions


def _logprobs(sample: TrainingSample) -> NDArray[np.float32]:
    if sample.behaviour_logprobs is None:
        return np.where(sample.loss_mask, np.float32(np.nan), np.float32(0))
    return sample.behaviour_logprobs


def check_training_batch(batch: DataProto) -> None:
    """Check every rule of a training batch.

    Raises:
        ValueError: With key, rows and mend.
    """
    batch.check_consistency()
    if not len(batch):
        raise ValueError("the training batch has no rows: give at least one group")
    for key, what in _REQUIRED.items():
        if key not in batch.batch:
            raise ValueError(
                f"the training batch has no {key!r}, so training cannot know {what}; it has {sorted(batch.batch)}: "
                "give it in the workflow or in the data packer"
            )
    tensors = dict(batch.batch)
    if "logprobs" in tensors:  # NaN is allowed here, infinity is not
        tensors["logprobs"] = tensors["logprobs"].nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    check_tensor_dict(tensors)
    present = _array(batch, "attention_mask")
    begins = present.copy()
    begins[:, 1:] &= ~present[:, :-1]
    _refuse(
        begins.sum(axis=1) > 1,
        "attention_mask has a gap between tokens: the tokens of a row stand side by side; take the padding out",
    )
    _refuse(
        (begins & _array(batch, "loss_mask")).any(axis=1),
        "loss_mask is True at the first token, which no token predicts: set it to False there, or start the sequence "
        "with a BOS token",
    )
    for key in ("group_ids", "task_ids"):
        _check_objects(batch, key, str, "a str")
    if "multi_modal_inputs" in batch.non_tensor_batch:
        _check_objects(batch, "multi_modal_inputs", dict | None, "a dict or None")


def _refuse(broken: NDArray[np.bool_], rule: str) -> None:
    if broken.any():
        raise ValueError(f"rows {np.flatnonzero(broken)[:8].tolist()} of the training batch: {rule}")


def _check_objects(batch: DataProto, key: str, kind: Any, words: str) -> None:
    if key not in batch.non_tensor_batch:
        raise ValueError(
            f"the training batch has no {key!r} in non_tensor_batch: give {words} per row; it has "
            f"{sorted(batch.non_tensor_batch)}"
        )
    for row, value in enumerate(batch.non_tensor_batch[key]):
        if not isinstance(value, kind):
            raise ValueError(f"{key!r} of row {row} is {form_of(value)}: it must be {words}")


def training_rows(batch: DataProto) -> list[TrainingSample]:
    """Return the rows of a checked batch without their padding, as views where dtypes are the declared ones."""
    columns = {key: _array(batch, key) for key in _DTYPES if key in batch.batch}
    starts = columns["attention_mask"].argmax(axis=1)
    ends = starts + columns["attention_mask"].sum(axis=1)
    objects = batch.non_tensor_batch
    inputs = objects.get("multi_modal_inputs", object_array([None] * len(batch)))
    samples = []
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        tokens = {key: column[row, start:end] for key, column in columns.items() if column.ndim == 2}
        samples.append(
            TrainingSample(
                input_ids=tokens["input_ids"],
                loss_mask=tokens["loss_mask"],
                behaviour_logprobs=tokens.get("logprobs"),
                versions=tokens.get("versions"),
                reward=float(columns["rewards"][row]),
                group_id=objects["group_ids"][row],
                task_id=objects["task_ids"][row],
                multi_modal_inputs=inputs[row],
            )
        )
    return samples


def _array(batch: DataProto, key: str) -> NDArray[Any]:
    array: NDArray[Any] = batch.batch[key].detach().to("cpu", _DTYPES[key]).numpy()
    return array
