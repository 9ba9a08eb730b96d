"""The tensor dict of a trajectory: its contract, checked, and the two ways to merge.

| key | shape | kind | required | meaning |
|---|---|---|---|---|
| input_ids | [B, T] | integer | yes | prompt and answers |
| attention_mask | [B, T] | bool or 0/1 | yes | True where a token is |
| loss_mask | [B, T] | bool or 0/1 | no | 1 where the policy sampled the token and it trains |
| logprobs | [B, T] | float | no | behaviour log-probs (nats), 0 where not sampled |
| versions | [B, T] | integer | no | policy version of each sampled token, -1 elsewhere |
| rewards | [B] | float | no | reward of each sequence |

Other keys pass through: tensors and lists with B entries are merged, anything else is taken from the
first. torch is loaded only when a dict is merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.reward_worker import LARGEST_REWARD

TOKEN_KEYS = {
    "input_ids": "iu",
    "attention_mask": "biu",
    "loss_mask": "biu",
    "logprobs": "f",
    "versions": "i",
}
"""Per-token keys and the numpy kinds they may have."""
_KIND_WORDS = {
    "iu": "an integer tensor",
    "biu": "a bool or integer tensor",
    "f": "a float tensor",
    "i": "an integer tensor",
}
PADDING = {"versions": -1}
"""Right-padding value per key; 0 where not named."""


Outcome = dict[str, Any]
"""What an episode that was not rejected returned: a tensor dict or a dict of interactions."""


def check_outcome(outcome: Any) -> int:
    """Return how many rows of training data ``arun_episode`` returned; 0 is a rejection (None).

    Raises:
        ValueError: If it is none of the three return types, or breaks the contract.
    """
    if outcome is None:
        return 0
    if not isinstance(outcome, dict):
        raise ValueError(
            f"arun_episode returned {type(outcome).__name__}: return a tensor dict, a dict of interactions, or None"
        )
    if not outcome:
        raise ValueError("arun_episode returned an empty dict: return None to reject an episode")
    if not is_interactions(outcome):
        return check_tensor_dict(outcome)
    for name, interaction in outcome.items():
        reward = interaction.reward
        if reward is None or reward - reward != 0.0:
            raise ValueError(
                f"interaction {name} has the reward {reward}: give each a finite number with set_reward()"
            )
    return len(outcome)


def is_interactions(outcome: Outcome) -> bool:
    """Return whether ``outcome`` is a dict of interactions by id."""
    return all(isinstance(value, InteractionWithTokenLogpReward) for value in outcome.values())


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcomes of a group as one: interactions stay interactions, else one tensor dict."""
    if all(is_interactions(outcome) for outcome in outcomes):
        return {key: value for outcome in outcomes for key, value in outcome.items()}
    return concat_padded_tensors([trajectory_tensors(outcome) for outcome in outcomes])


def trajectory_tensors(outcome: Outcome) -> dict[str, Any]:
    """Return a checked outcome as one tensor dict, one row per interaction."""
    if is_interactions(outcome):
        return concat_padded_tensors([value.to_tensor_dict() for value in outcome.values()])
    return outcome


def check_tensor_dict(tensors: Mapping[str, Any]) -> int:
    """Return the number of rows; raise ValueError, naming key, shape and mend, if the contract is broken."""
    for key in ("input_ids", "attention_mask"):
        if key not in tensors:
            raise ValueError(
                f"the tensor dict has no {key!r}: it needs [batch, seq_len] {key}; it has {sorted(tensors)}"
            )
    shape: tuple[int, ...] = ()
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for key, kinds in TOKEN_KEYS.items():
        if key not in tensors:
            continue
        array = arrays[key] = _as_numpy(key, tensors[key])
        if array.dtype.kind not in kinds:
            raise ValueError(f"{key} has dtype {tensors[key].dtype}: it must be {_KIND_WORDS[kinds]}")
        if array.ndim != 2:
            raise ValueError(
                f"{key} has shape {list(array.shape)}: it must be [batch, seq_len]; one sequence is {key}.unsqueeze(0)"
            )
        if not shape:
            shape = array.shape
        elif array.shape != shape:
            raise ValueError(
                f"{key} has shape {list(array.shape)} but input_ids has {list(shape)}: make them equal"
            )
    if 0 in shape:
        raise ValueError(f"input_ids has shape {list(shape)}: return None for an empty trajectory")
    _check_values(arrays)
    if "rewards" in tensors:
        rewards = _as_numpy("rewards", tensors["rewards"])
        if rewards.shape != shape[:1]:
            raise ValueError(
                f"rewards has shape {list(rewards.shape)}: it must be [{shape[0]}], one number per row of input_ids"
            )
        if rewards.dtype.kind != "f":
            raise ValueError(f"rewards has dtype {tensors['rewards'].dtype}: it must be a float tensor")
        if not all(abs(reward) <= LARGEST_REWARD for reward in rewards.tolist()):
            raise ValueError(
                f"rewards holds {rewards.tolist()}: every reward must be finite in float32; raise instead of nan"
            )
    return shape[0]


def _check_values(arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    mask, attention = arrays.get("loss_mask"), arrays["attention_mask"]
    if mask is None:
        return
    if not np.logical_and.reduce(attention, None) and ((mask != 0) > (attention != 0)).any():
        raise ValueError(
            "loss_mask is 1 where attention_mask is 0: padding cannot be trained; set loss_mask to 0 there"
        )
    # A sum is finite iff its terms are: one pass for the usual case, a second to see whether it matters.
    logprobs = arrays.get("logprobs")
    if (
        logprobs is not None
        and not math.isfinite(np.add.reduce(logprobs, None))
        and not math.isfinite(logprobs[mask != 0].sum(dtype="float64"))
    ):
        raise ValueError(
            "logprobs holds nan or inf at a trained token: keep the log-probs as the server returned them"
        )


def _as_numpy(key: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        return value.numpy()  # type: ignore[no-any-return]
    except AttributeError:
        raise ValueError(f"{key} is a {type(value).__name__}: wrap it in torch.tensor(...)") from None
    except (TypeError, RuntimeError):  # bfloat16, another device, or a tensor with gradient
        return value.detach().cpu().float().numpy()  # type: ignore[no-any-return]


def concat_padded_tensors(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate tensor dicts along the batch, right-padding every other dimension.

    Raises:
        ValueError: If the dicts do not have the same keys.
    """
    import torch

    first = dicts[0]
    if len(dicts) == 1:
        return dict(first)
    for other in dicts[1:]:
        if other.keys() != first.keys():
            raise ValueError(
                f"tensor dicts of one group have different keys, {sorted(first)} and {sorted(other)}: "
                "return the same keys from every episode"
            )
    merged: dict[str, Any] = {}
    for key, value in first.items():
        values = [d[key] for d in dicts]
        if isinstance(value, torch.Tensor):
            merged[key] = _concat(values, PADDING.get(key, 0))
        elif isinstance(value, list):
            merged[key] = [item for part in values for item in part]
        else:
            merged[key] = value
    return merged


def _concat(values: Sequence[Any], padding: int) -> Any:
    import torch

    if len({v.shape[1:] for v in values}) == 1:
        return torch.cat(list(values))
    widths = [max(sizes) for sizes in zip(*(v.shape[1:] for v in values), strict=True)]
    out = values[0].new_full((sum(v.shape[0] for v in values), *widths), padding)
    row = 0
    for value in values:
        out[(slice(row, row + value.shape[0]), *(slice(size) for size in value.shape[1:]))] = value
        row += value.shape[0]
    return out


def trained_version_range(tensors: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (oldest, newest) policy version over the trained tokens, None where nothing says."""
    if "versions" not in tensors:
        return None
    trained = tensors["versions"].numpy()
    if "loss_mask" in tensors:
        trained = trained[tensors["loss_mask"].numpy() != 0]
    versions = set(trained.ravel().tolist()) - {-1}
    return (min(versions), max(versions)) if versions else None
