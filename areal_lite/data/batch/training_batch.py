"""A training batch as a DataProto: whole groups, every key declared and checked here.

docs/data.md lists the keys with shapes and padding. A sequence's tokens are contiguous, with padding on either end.
``logprobs`` is NaN where not recorded. Knows nothing of advantages or losses.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any
import numpy as np
import torch
from numpy.typing import NDArray
from areal_lite.api.image_span import images_of, plain_images
from areal_lite.api.tensor_dict import check_tensor_dict
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.data.batch.data_proto import DataProto, form_of, object_array
from areal_lite.errors import ConfigError

_DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "rewards": torch.float32,
    "episode_rewards": torch.float32,
    "token_rewards": torch.float32,
    "reference_logprobs": torch.float32,
}
"""Dtypes of :func:`collate_sequences`; others of the same kind are converted when sequences are read."""
_PER_TOKEN: dict[str, tuple[int, Callable[[TokenSequence], Any]]] = {
    "input_ids": (0, len),
    "loss_mask": (0, len),
    "logprobs": (0, lambda sequence: np.where(sequence.loss_mask, np.float32(np.nan), np.float32(0))),
    "versions": (-1, lambda sequence: np.full(len(sequence), -1)),
    "token_rewards": (0, lambda sequence: np.full(len(sequence), np.nan, np.float32)),
    "reference_logprobs": (0, lambda sequence: np.full(len(sequence), np.nan, np.float32)),
}
"""The padding of each column, and its values in a sequence without it."""
_REQUIRED = {"loss_mask": "which tokens the policy sampled", "rewards": "how good each sequence is"}


def collate_sequences(sequences: Sequence[TokenSequence], length: int, *, pad_token_id: int) -> dict[str, Any]:
    """Return the training batch of ``sequences``, in order, for :meth:`DataProto.from_single_dict`. They are padded on
    the right to ``length`` tokens, ``input_ids`` with ``pad_token_id`` and the masks with False."""
    if not sequences:
        raise ValueError("there are no sequences to collate: give at least one")
    lengths = np.array([len(sequence) for sequence in sequences])
    if lengths.max() > length:
        longest = sequences[int(lengths.argmax())]
        raise ValueError(
            f"task {longest.task_id}: computed_max_len is {length}, but the longest sequence has {len(longest)} "
            "tokens, and nothing is cut here: pad to its length or more"
        )
    present = np.arange(length) < lengths[:, None]
    columns: dict[str, Any] = {"attention_mask": torch.from_numpy(present)}
    for key, (padding, missing) in _PER_TOKEN.items():
        values = [getattr(sequence, key) for sequence in sequences]
        if key == "versions" or any(value is not None for value in values):
            tensor = torch.full(present.shape, pad_token_id if key == "input_ids" else padding, dtype=_DTYPES[key])
            tensor.numpy()[present] = np.concatenate(
                [missing(s) if value is None else value for value, s in zip(values, sequences, strict=True)]
            )
            columns[key] = tensor
    columns["rewards"] = torch.tensor([s.reward for s in sequences], dtype=_DTYPES["rewards"])
    if any(s.score != s.reward for s in sequences):
        columns["episode_rewards"] = torch.tensor([s.score for s in sequences], dtype=_DTYPES["episode_rewards"])
    columns["group_ids"] = object_array(s.group_id for s in sequences)
    columns["task_ids"] = object_array(s.task_id for s in sequences)
    if any(s.multi_modal_inputs is not None for s in sequences):
        columns["multi_modal_inputs"] = object_array(s.multi_modal_inputs for s in sequences)
    if any(s.images for s in sequences):
        columns["image_spans"] = object_array(plain_images(s.images) for s in sequences)
    if any(s.member_idx is not None for s in sequences):
        columns["member_idx"] = object_array(s.member_idx for s in sequences)
        columns["turn_paths"] = object_array(list(s.path) for s in sequences)
        columns["turn_idx"] = object_array(s.turn_idx for s in sequences)
    return columns


def check_training_batch(batch: DataProto) -> None:
    batch.check_consistency()
    if not len(batch):
        raise ValueError("the training batch has no sequences: give at least one group")
    for key, what in _REQUIRED.items():
        if key not in batch.batch:
            raise ValueError(
                f"the training batch has no {key!r}, so training cannot know {what}; it has {sorted(batch.batch)}: "
                "give it in the workflow or in the data packer"
            )
    tensors = dict(batch.batch)
    for key in {"logprobs", "token_rewards"} & tensors.keys():  # NaN is allowed here, infinity is not
        tensors[key] = tensors[key].nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    check_tensor_dict(tensors)
    present = _array(batch, "attention_mask")
    begins = present.copy()
    begins[:, 1:] &= ~present[:, :-1]
    _refuse(
        begins.sum(axis=1) > 1,
        "attention_mask has a gap between tokens: the tokens of a sequence must be contiguous; remove the padding",
    )
    _refuse(
        (begins & _array(batch, "loss_mask")).any(axis=1),
        "loss_mask is True at the first token, which no token predicts: set it to False there, or start the sequence "
        "with a BOS token",
    )
    for key, kind, words in (
        ("group_ids", str, "a str"),
        ("task_ids", str, "a str"),
        ("member_idx", int | None, "an int or None"),
        ("turn_paths", list, "a list of ints"),
        ("turn_idx", int, "an int"),
        ("multi_modal_inputs", dict | None, "a dict or None"),
        ("image_spans", list, "a list of spans, empty without images"),
    ):
        if kind is str and key not in batch.non_tensor_batch:
            raise ValueError(
                f"the training batch has no {key!r} in non_tensor_batch: give {words} per sequence; it has "
                f"{sorted(batch.non_tensor_batch)}"
            )
        for number, value in enumerate(batch.non_tensor_batch.get(key, ())):
            if not isinstance(value, kind):
                raise ValueError(f"{key!r} of sequence {number} is {form_of(value)}: it must be {words}")


def _refuse(broken: NDArray[np.bool_], rule: str) -> None:
    if broken.any():
        raise ValueError(f"sequences {np.flatnonzero(broken)[:8].tolist()} of the training batch: {rule}")


def training_sequences(batch: Sequence[Group] | DataProto) -> list[TokenSequence]:
    """Return the sequences of a batch, unpadded: those of accepted groups as they are, of a DataProto as views."""
    if isinstance(batch, DataProto):
        check_training_batch(batch)
        return _unpadded(batch)
    groups = [group for group in batch if group.status is EpisodeStatus.ACCEPTED]
    for group in groups:
        for trajectory in group.trajectories:
            _ = trajectory.turns  # every sequence knows its path now, even without this trajectory
        missing = {
            "loss_mask": not all(trajectory.has_loss_mask for trajectory in group.trajectories),
            "rewards": any(sequence.reward is None for sequence in group.sequences),
        }
        for key, what in _REQUIRED.items():
            if missing[key]:
                raise ConfigError(
                    f"task {group.task_id}: the trajectory has no {key!r}, so training cannot know {what}: return "
                    f"{key!r} from the workflow"
                )
    return [sequence for group in groups for sequence in group.sequences]


def data_proto_of(groups: Sequence[Group]) -> DataProto:
    """Return the accepted groups as a ``DataProto``, one item per sequence."""
    sequences = training_sequences(groups)
    length = max(map(len, sequences), default=0)
    return with_baselines(DataProto.from_single_dict(collate_sequences(sequences, length, pad_token_id=0)), groups)


def with_baselines(batch: DataProto, groups: Sequence[Group]) -> DataProto:
    """Add the column ``baselines`` to a batch of these groups, in place, if all of them have one; return the batch."""
    baselines = {group.group_id: group.baseline for group in groups if group.baseline is not None}
    if baselines and baselines.keys() >= set(batch.non_tensor_batch["group_ids"]):
        batch.batch["baselines"] = torch.tensor([baselines[name] for name in batch.non_tensor_batch["group_ids"]])
    return batch


def _unpadded(batch: DataProto) -> list[TokenSequence]:
    columns = {key: _array(batch, key) for key in _DTYPES if key in batch.batch}
    starts = columns["attention_mask"].argmax(axis=1)
    ends = starts + columns["attention_mask"].sum(axis=1)
    tokens: dict[str, Any] = {key: columns[key] for key in _PER_TOKEN if key in columns}
    objects = batch.non_tensor_batch
    nothing = object_array([None] * len(batch))
    members, inputs, paths, turns, spans = (
        objects.get(key, nothing)
        for key in ("member_idx", "multi_modal_inputs", "turn_paths", "turn_idx", "image_spans")
    )
    by_token = tokens.pop("token_rewards", None)
    return [
        TokenSequence(
            **{key: column[number, start:end] for key, column in tokens.items()},
            token_rewards=None if by_token is None or np.isnan(by_token[number]).any() else by_token[number, start:end],
            reward=float(columns["rewards"][number]),
            episode_reward=float(columns["episode_rewards"][number]) if "episode_rewards" in columns else None,
            group_id=objects["group_ids"][number],
            task_id=objects["task_ids"][number],
            member_idx=members[number],
            place=None if paths[number] is None else (tuple(paths[number]), turns[number]),
            multi_modal_inputs=inputs[number],
            images=images_of(spans[number] or []),
        )
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
    ]


def _array(batch: DataProto, key: str) -> NDArray[Any]:
    array: NDArray[Any] = batch.batch[key].detach().to("cpu", _DTYPES[key]).numpy()
    return array
