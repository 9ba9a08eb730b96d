"""AReaL's tensor dict: checked when a workflow returns one, rebuilt as a view on request.

| key | shape | kind | required | meaning |
|---|---|---|---|---|
| input_ids | [B, T] | integer | yes | prompt and answers |
| attention_mask | [B, T] | bool or 0/1 | yes | False at padding |
| loss_mask | [B, T] | bool or 0/1 | no | 1 where the policy sampled the token and it trains |
| logprobs | [B, T] | float | no | behaviour log-probs (nats), 0 where not sampled |
| versions | [B, T] | integer | no | policy version of each sampled token, -1 elsewhere |
| rewards | [B] | float | no | reward of each sequence; equal ones are one reward, others rewards of turns |
| episode_rewards | [B] | float | no | reward of the episode, if ``rewards`` are of turns or hold later turns' |
| token_rewards | [B, T] | float | no | instead of rewards: a number for each token, whose sum is the reward |

Of other keys, tensors and lists with B entries are merged, else the first is taken. Only making and merging load torch.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any
import numpy as np
from numpy.typing import NDArray
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.reward_value import LARGEST_REWARD

TOKEN_KEYS = {
    "input_ids": ("iu", np.int32),
    "attention_mask": ("biu", np.bool_),
    "loss_mask": ("biu", np.int32),
    "logprobs": ("f", np.float32),
    "versions": ("i", np.int32),
    "token_rewards": ("f", np.float32),
}
"""Per-token keys, the numpy kinds they may have, and their dtypes in the view, which are AReaL's."""
SEQUENCE_KEYS = {*TOKEN_KEYS, "rewards"}
"""Keys of the table that a sequence has; others pass through."""
PADDING = {"versions": -1}
"""Right-padding value per key; 0 where not named."""


def check_returned(returned: Any) -> bool:
    """Check the type of what ``arun_episode`` returned, and return whether it is a dict of interactions."""
    if not isinstance(returned, dict):
        raise ValueError(
            f"arun_episode returned {type(returned).__name__}: return a tensor dict, a dict of interactions, or None"
        )
    if not returned:
        raise ValueError("arun_episode returned an empty dict: return None to reject an episode")
    if not is_interactions(returned):
        return False
    for name, interaction in returned.items():
        if (reward := interaction.reward) is None or not abs(reward) <= LARGEST_REWARD:
            raise ValueError(f"interaction {name} has the reward {reward}: give each a finite number with set_reward()")
    return True


def is_interactions(returned: dict[str, Any]) -> bool:
    """Return whether ``returned`` is a dict of interactions by id."""
    return all(isinstance(value, InteractionWithTokenLogpReward) for value in returned.values())


def split_rows(returned: dict[str, Any], counts: Sequence[int]) -> list[dict[str, Any] | None]:
    """Split a merged dict into one per episode, of ``counts`` sequences each, None for 0. The last takes any beyond."""
    whole = is_interactions(returned)
    total = len(returned) if whole else len(returned["input_ids"])
    parts: list[dict[str, Any] | None] = []
    for start, end in pairwise([0, *np.cumsum(counts).tolist()[:-1], total]):
        if start >= end:
            parts.append(None)
        elif whole:
            parts.append(dict(list(returned.items())[start:end]))
        else:
            parts.append({key: _rows(value, start, end, total) for key, value in returned.items()})
    return parts


def _rows(value: Any, start: int, end: int, total: int) -> Any:
    if hasattr(value, "shape") and value.shape[:1] == (total,):
        return value[start:end]
    return value[start:end] if isinstance(value, list) and len(value) == total else value


def tensor_dict_of(trajectories: Sequence[Any]) -> dict[str, Any] | None:
    """Return AReaL's tensor dict of the trajectories' sequences, right-padded; None if there are none."""
    import torch

    having = [trajectory for trajectory in trajectories if trajectory.sequences]
    sequences = [sequence for trajectory in having for sequence in trajectory.sequences]
    if not sequences:
        return None
    lengths = np.array([len(sequence) for sequence in sequences])
    present = np.arange(lengths.max()) < lengths[:, None]
    view: dict[str, Any] = {"input_ids": None, "attention_mask": torch.from_numpy(present)}
    for key, (_, dtype) in TOKEN_KEYS.items():
        columns: list[Any] = [getattr(sequence, key, None) for sequence in sequences]  # none has an attention mask
        unmasked = key == "loss_mask" and not all(trajectory.has_loss_mask for trajectory in having)
        if not unmasked and all(column is not None for column in columns):
            padded: NDArray[Any] = np.full(present.shape, PADDING.get(key, 0), dtype)
            padded[present] = np.concatenate(columns)
            view[key] = torch.from_numpy(padded)
    rewards = [sequence.reward for sequence in sequences]
    if None not in rewards:
        view["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    if all(trajectory.extras.keys() == having[0].extras.keys() for trajectory in having):
        view |= _merged([trajectory.extras for trajectory in having])
    return view


def merge_outcomes(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge what the episodes of a group returned into one dict of interactions or one tensor dict."""
    if all(is_interactions(outcome) for outcome in outcomes):
        return {key: value for outcome in outcomes for key, value in outcome.items()}
    parts: list[dict[str, Any]] = []
    for outcome in outcomes:
        parts += [each.to_tensor_dict() for each in outcome.values()] if is_interactions(outcome) else [outcome]
    return concat_padded_tensors(parts)


def check_same_keys(outcomes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tensor dicts of one group that have different keys."""
    for other in outcomes[1:]:
        if other.keys() != outcomes[0].keys():
            raise ValueError(
                f"tensor dicts of one group have different keys, {sorted(outcomes[0])} and {sorted(other)}: "
                "return the same keys from every episode"
            )


def check_tensor_dict(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return token keys and rewards as numpy arrays, the loss mask as bool; no attention mask if nothing is padded."""
    for key in ("input_ids", "attention_mask"):
        if key not in tensors:
            raise ValueError(
                f"the tensor dict has no {key!r}: it needs [batch, seq_len] {key}; it has {sorted(tensors)}"
            )
    shape: tuple[int, ...] = ()
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for key, (kinds, _) in TOKEN_KEYS.items():
        if key not in tensors:
            continue
        array = arrays[key] = _as_numpy(key, tensors[key])
        if array.dtype.kind not in kinds:
            word = "a float" if kinds == "f" else "a bool or integer" if "b" in kinds else "an integer"
            raise ValueError(f"{key} has dtype {tensors[key].dtype}: it must be {word} tensor")
        if array.ndim != 2:
            raise ValueError(
                f"{key} has shape {list(array.shape)}: it must be [batch, seq_len]; one sequence is {key}.unsqueeze(0)"
            )
        if not shape:
            shape = array.shape
        elif array.shape != shape:
            raise ValueError(f"{key} has shape {list(array.shape)} but input_ids has {list(shape)}: make them equal")
    if 0 in shape:
        raise ValueError(f"input_ids has shape {list(shape)}: return None for an empty trajectory")
    _check_values(arrays)
    for key in sorted({"rewards", "episode_rewards"} & tensors.keys()):
        rewards = arrays[key] = _as_numpy(key, tensors[key])
        if rewards.shape != shape[:1]:
            raise ValueError(f"{key} has shape {list(rewards.shape)}: it must be [{shape[0]}], one number per sequence")
        if rewards.dtype.kind != "f":
            raise ValueError(f"{key} has dtype {tensors[key].dtype}: it must be a float tensor")
        if not all(abs(reward) <= LARGEST_REWARD for reward in rewards.tolist()):
            raise ValueError(
                f"{key} holds {rewards.tolist()}: every reward must be finite in float32; raise instead of nan"
            )
    return arrays


def _check_values(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    if "token_rewards" in arrays and not np.isfinite(arrays["token_rewards"]).all():
        raise ValueError("token_rewards holds nan or inf: every reward must be finite; raise instead of nan")
    attention = arrays["attention_mask"]
    padded = np.count_nonzero(attention) < attention.size
    if not padded:
        del arrays["attention_mask"]
    if "loss_mask" not in arrays:
        return
    mask = arrays["loss_mask"] = arrays["loss_mask"].astype(np.bool_, copy=False)
    if padded and (mask > (attention != 0)).any():
        raise ValueError(
            "loss_mask is 1 where attention_mask is 0: padding cannot be trained; set loss_mask to 0 there"
        )
    # A sum is finite iff its terms are: one pass for the usual case, a second to see whether it matters.
    logprobs = arrays.get("logprobs")
    if (
        logprobs is not None
        and not math.isfinite(np.add.reduce(logprobs, None))
        and not math.isfinite(logprobs[mask].sum(dtype="float64"))
    ):
        raise ValueError("logprobs holds nan or inf at a trained token: keep the log-probs as the server returned them")


def _as_numpy(key: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        return value.numpy()  # type: ignore[no-any-return]
    except AttributeError:
        raise ValueError(f"{key} is a {type(value).__name__}: wrap it in torch.tensor(...)") from None
    except (TypeError, RuntimeError):  # bfloat16, another device, or a tensor with gradient
        value = value.detach().cpu()
        return (value.float() if value.is_floating_point() else value).numpy()  # type: ignore[no-any-return]


def concat_padded_tensors(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate tensor dicts along the batch, right-padding other dimensions; ValueError if their keys differ."""
    if len(dicts) == 1:
        return dict(dicts[0])
    check_same_keys(dicts)
    return _merged(dicts)


def _merged(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    merged = dict(dicts[0])
    for key, value in merged.items():
        values = [d[key] for d in dicts]
        if isinstance(value, torch.Tensor) and value.ndim:
            most = [max(sizes) for sizes in zip(*(v.shape[1:] for v in values), strict=True)]
            merged[key] = torch.cat([_padded(v, most, PADDING.get(key, 0)) for v in values])
        elif isinstance(value, list):
            merged[key] = [item for part in values for item in part]
    return merged


def _padded(tensor: Any, most: Sequence[int], padding: int) -> Any:
    import torch.nn.functional as F

    missing = [each for size, to in zip(tensor.shape[:0:-1], most[::-1], strict=True) for each in (0, to - size)]
    return F.pad(tensor, missing, value=padding) if any(missing) else tensor
