"""AReaL's tensor dict: checked when a workflow returns one, rebuilt as a view on request.

| key | shape | kind | required | meaning |
|---|---|---|---|---|
| input_ids | [B, T] | integer | yes | prompt and answers |
| attention_mask | [B, T] | bool or 0/1 | yes | False at padding |
| loss_mask | [B, T] | bool or 0/1 | no | 1 where the policy sampled the token and it trains |
| logprobs | [B, T] | float | no | behaviour log-probs (nats), 0 where not sampled |
| versions | [B, T] | integer | no | policy version of each sampled token, -1 elsewhere |
| rewards | [B] | float | no | reward of each sequence |

Other keys pass through: tensors and lists with B entries are merged, anything else is taken from the
first. torch is loaded only when a dict is made or merged.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.reward_worker import LARGEST_REWARD
from areal_lite.api.trajectory import EpisodeStatus, TokenSequence, Trajectory, Turn, TurnRole

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
_VIEW = {"input_ids": np.int32, "loss_mask": np.int32, "logprobs": np.float32, "versions": np.int32}
"""Dtypes of the view, which are AReaL's."""

Arrays = Mapping[str, NDArray[Any]]
Span = tuple[int, int, ModelResponse | None, bool]
"""Start and end of a turn in its sequence, its call where one is known, and whether the model sampled it."""


# -- in: what a workflow returned, and the calls it made, become a trajectory ------------------------------


def trajectory_of(
    returned: dict[str, Any] | None, calls: Sequence[ModelResponse], *, member_idx: int = 0
) -> Trajectory:
    """Return the trajectory of an episode that finished.

    Sequences are what the workflow returned. Turns come from the recorded calls, matched to the sequences
    token by token; where no call matches, the loss mask separates answers from the rest.

    Args:
        returned: What ``arun_episode`` returned; None rejects the episode.
        calls: The episode's model calls in the order they ended.
        member_idx: The episode's place in its group.

    Raises:
        ValueError: If ``returned`` has another type or breaks the contract; its failure kind is ``output``.
    """
    status = EpisodeStatus.REJECTED if returned is None else EpisodeStatus.ACCEPTED
    trajectory = Trajectory(member_idx=member_idx, status=status)
    tree = _TurnTree(trajectory.turns)
    if returned is not None:
        with attributed_to(FailureKind.OUTPUT):
            check_returned(returned)
            if is_interactions(returned):
                for interaction in returned.values():
                    trajectory.sequences.append(_interaction_sequence(interaction, tree))
            else:
                arrays = check_tensor_dict(returned)
                trajectory.sequences.extend(_row_sequences(arrays, calls, tree))
                trajectory.has_loss_mask = "loss_mask" in arrays
                trajectory.extras = {
                    key: value for key, value in returned.items() if key not in (*TOKEN_KEYS, "rewards")
                }
        trajectory.average_rewards()
    tree.add_calls(calls)
    return trajectory


def unfinished_trajectory(
    calls: Sequence[ModelResponse], *, member_idx: int, status: EpisodeStatus
) -> Trajectory:
    """Return the trajectory of an episode that failed or was stopped: its model calls, nothing that trains."""
    trajectory = Trajectory(member_idx=member_idx, status=status)
    _TurnTree(trajectory.turns).add_calls(calls)
    return trajectory


def check_returned(returned: Any) -> None:
    """Check the type of what ``arun_episode`` returned.

    Raises:
        ValueError: If it is neither a tensor dict nor a dict of interactions, each with a reward.
    """
    if not isinstance(returned, dict):
        raise ValueError(
            f"arun_episode returned {type(returned).__name__}: return a tensor dict, a dict of interactions, or None"
        )
    if not returned:
        raise ValueError("arun_episode returned an empty dict: return None to reject an episode")
    if is_interactions(returned):
        for name, interaction in returned.items():
            reward = interaction.reward
            if reward is None or not abs(reward) <= LARGEST_REWARD:
                raise ValueError(
                    f"interaction {name} has the reward {reward}: give each a finite number with set_reward()"
                )


def is_interactions(returned: dict[str, Any]) -> bool:
    """Return whether ``returned`` is a dict of interactions by id."""
    return all(isinstance(value, InteractionWithTokenLogpReward) for value in returned.values())


def split_rows(returned: dict[str, Any], counts: Sequence[int]) -> list[dict[str, Any] | None]:
    """Return a merged dict as one dict per episode, with ``counts`` rows each, in order; None for no rows.

    Rows beyond the counts belong to the last episode.
    """
    ends = np.cumsum(counts).tolist()
    total = len(returned) if is_interactions(returned) else len(returned["input_ids"])
    starts, ends[-1] = [0, *ends[:-1]], total
    parts: list[dict[str, Any] | None] = []
    for start, end in zip(starts, ends, strict=True):
        if start >= end:
            parts.append(None)
        elif is_interactions(returned):
            parts.append(dict(list(returned.items())[start:end]))
        else:
            parts.append({key: _rows(value, start, end, total) for key, value in returned.items()})
    return parts


def _rows(value: Any, start: int, end: int, total: int) -> Any:
    if hasattr(value, "shape") and value.shape[:1] == (total,):
        return value[start:end]
    return value[start:end] if isinstance(value, list) and len(value) == total else value


class _TurnTree:
    """The turns of an episode; a call, and what leads to it, is added once."""

    def __init__(self, turns: list[Turn]) -> None:
        self.turns = turns
        self.calls: dict[Hashable, int] = {}
        """The turn of each call that a sequence holds, by identity."""
        self._places: dict[Hashable, int] = {}

    def add_path(self, sequence: TokenSequence, spans: Iterator[Span]) -> None:
        """Add the spans of a sequence as turns, and set its path.

        Columns of the turns are views of the sequence's; where the sequence does not train a call or has no such
        column, log-probs and versions are the call's own.
        """
        path: list[int] = []
        parent: int | None = None
        answers = 0
        for start, end, call, sampled in spans:
            here = slice(start, end)
            ids, loss_mask = sequence.input_ids[here], sequence.loss_mask[here]
            key = (parent, _identity(call)) if call is not None else (parent, sampled, _bytes(ids))
            place = self._places.get(key)
            trained = sampled and bool(loss_mask.any())
            if place is None or (trained and not self.turns[place].loss_mask.any()):
                turn = Turn(
                    role=_role(sampled, parent),
                    parent=parent,
                    start=start,
                    ids=ids,
                    loss_mask=loss_mask,
                    logprobs=None if sequence.logprobs is None else sequence.logprobs[here],
                    versions=None if sequence.versions is None else sequence.versions[here],
                )
                if place is None:
                    place = self._places[key] = len(self.turns)
                    self.turns.append(turn)
                else:
                    self.turns[place] = turn
                if call is not None:
                    _describe(turn, call, trained=trained)
                    self.calls.setdefault(_identity(call), place)
            path.append(place)
            parent = place
            answers += sampled
        sequence.path = tuple(path)
        sequence.turn_idx = max(0, answers - 1)

    def add_calls(self, calls: Sequence[ModelResponse]) -> None:
        """Add the calls that no sequence holds, each after the longest call that its prompt extends."""
        if all(_identity(call) in self.calls for call in calls):
            return
        known: list[tuple[list[int], int]] = []
        for call in calls:
            place = self.calls.get(_identity(call))
            if place is None:
                place = self._add_call(call, *_longest_prefix(known, call.input_tokens))
            known.append((call.input_tokens + call.output_tokens, place))

    def _add_call(self, call: ModelResponse, start: int, parent: int | None) -> int:
        given = np.array(call.input_tokens[start:], np.int32)
        if len(given):
            key = (parent, False, _bytes(given))
            if key not in self._places:
                self._places[key] = len(self.turns)
                self.turns.append(_untrained(given, start, parent, role=_role(False, parent)))
            parent = self._places[key]
        answer = np.array(call.output_tokens, np.int32)
        turn = _untrained(answer, call.input_len, parent, role=TurnRole.ASSISTANT)
        _describe(turn, call, trained=False)
        self.turns.append(turn)
        return len(self.turns) - 1


def _identity(call: ModelResponse) -> Hashable:
    """Return a key for a call: a request may be sent several times, and an engine may set no id."""
    return (call.rid, call.started) if call.rid else id(call)


def _bytes(ids: NDArray[Any]) -> bytes:
    return ids.astype(np.int32, copy=False).tobytes()


def _role(sampled: bool, parent: int | None) -> TurnRole:
    if sampled:
        return TurnRole.ASSISTANT
    return TurnRole.PROMPT if parent is None else TurnRole.ENVIRONMENT


def _untrained(ids: NDArray[np.int32], start: int, parent: int | None, *, role: TurnRole) -> Turn:
    count = len(ids)
    return Turn(
        role=role,
        parent=parent,
        start=start,
        ids=ids,
        loss_mask=np.zeros(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
        versions=np.full(count, -1, np.int32),
    )


def _describe(turn: Turn, call: ModelResponse, *, trained: bool) -> None:
    """Copy the call's metadata; its log-probs and versions only if the sequence does not have them."""
    turn.stop_reason, turn.started, turn.latency_s = call.stop_reason, call.started, call.latency
    if turn.logprobs is None or not trained:
        turn.logprobs = np.array(call.output_logprobs, np.float32)
    if turn.versions is None or not trained:
        turn.versions = np.array(call.output_versions, np.int32)


def _longest_prefix(known: Sequence[tuple[list[int], int]], ids: list[int]) -> tuple[int, int | None]:
    """Return length and turn of the longest known beginning of ``ids``; 0 and None without one."""
    longest, place = 0, None
    for tokens, end in known:
        count = len(tokens)
        if longest < count <= len(ids) and tokens[-1] == ids[count - 1] and ids[:count] == tokens:
            longest, place = count, end
    return longest, place


def _interaction_sequence(interaction: InteractionWithTokenLogpReward, tree: _TurnTree) -> TokenSequence:
    chain = interaction.chain()
    response = interaction.model_response
    ids = np.fromiter(response.input_tokens + response.output_tokens, np.int32)
    loss_mask = np.zeros(len(ids), np.bool_)
    logprobs = np.zeros(len(ids), np.float32)
    versions = np.full(len(ids), -1, np.int32)
    for node in interaction.trained_chain():
        answer = node.model_response
        here = slice(answer.input_len, answer.input_len + answer.output_len)
        loss_mask[here], logprobs[here], versions[here] = True, answer.output_logprobs, answer.output_versions
    sequence = TokenSequence(
        input_ids=ids, loss_mask=loss_mask, logprobs=logprobs, versions=versions, reward=interaction.reward
    )

    def spans() -> Iterator[Span]:
        at = 0
        for node in chain:
            answer = node.model_response
            start, end = answer.input_len, answer.input_len + answer.output_len
            if at < start:
                yield at, start, None, False
            yield start, end, answer, True
            at = end

    tree.add_path(sequence, spans())
    return sequence


def _row_sequences(
    arrays: Arrays, calls: Sequence[ModelResponse], tree: _TurnTree
) -> Iterator[TokenSequence]:
    """Yield the rows of a checked tensor dict without their padding."""
    attention = arrays["attention_mask"] != 0
    padded = not attention.all()
    rewards = arrays["rewards"].tolist() if "rewards" in arrays else None
    for row, ids in enumerate(arrays["input_ids"]):
        keep: Any = attention[row] if padded else slice(None)
        columns = {key: arrays[key][row][keep] for key in ("logprobs", "versions") if key in arrays}
        mask = arrays["loss_mask"][row][keep] != 0 if "loss_mask" in arrays else None
        ids = ids[keep]
        sequence = TokenSequence(
            input_ids=ids,
            loss_mask=np.zeros(len(ids), np.bool_) if mask is None else mask,
            reward=None if rewards is None else rewards[row],
            **columns,
        )
        if len(calls) > 1:  # of equal answers to one prompt, each row takes another
            calls = sorted(calls, key=lambda call: (call.input_len, _identity(call) in tree.calls))
        tree.add_path(sequence, _spans(sequence, calls))
        yield sequence


def _spans(sequence: TokenSequence, calls: Sequence[ModelResponse]) -> Iterator[Span]:
    """Yield the turns of a sequence in order: calls that match it, and runs of the loss mask between them."""
    ids: list[int] = sequence.input_ids.tolist()
    at = 0
    for call in calls:
        start, end = call.input_len, call.input_len + call.output_len
        if start < at or start == end:
            continue
        if ids[start:end] != call.output_tokens or ids[:start] != call.input_tokens:
            continue  # a call of another branch
        yield from _runs(sequence.loss_mask, at, start)
        yield start, end, call, True
        at = end
    yield from _runs(sequence.loss_mask, at, len(ids))


def _runs(mask: NDArray[np.bool_], start: int, end: int) -> Iterator[Span]:
    if start == end:
        return
    if not mask[start:end].any():
        yield start, end, None, False
        return
    borders = np.flatnonzero(mask[start + 1 : end] != mask[start : end - 1])
    edges = [start, *(borders + start + 1).tolist(), end]
    for first, last in zip(edges, edges[1:], strict=False):
        yield first, last, None, bool(mask[first])


# -- out: the view -----------------------------------------------------------------------------------------


def tensor_dict_of(trajectories: Sequence[Trajectory]) -> dict[str, Any] | None:
    """Return AReaL's tensor dict of the trajectories' sequences, right-padded; None where there are none.

    ``logprobs``, ``versions`` and ``rewards`` are there if every sequence has them; other keys of the
    workflows' dicts if every episode has them.
    """
    import torch

    having = [trajectory for trajectory in trajectories if trajectory.sequences]
    sequences = [sequence for trajectory in having for sequence in trajectory.sequences]
    if not sequences:
        return None
    lengths = np.array([len(sequence) for sequence in sequences])
    present = np.arange(lengths.max()) < lengths[:, None]
    view: dict[str, Any] = {"input_ids": None, "attention_mask": torch.from_numpy(present)}
    for key, dtype in _VIEW.items():
        columns = [getattr(sequence, key) for sequence in sequences]
        unmasked = key == "loss_mask" and not all(trajectory.has_loss_mask for trajectory in having)
        if not unmasked and all(column is not None for column in columns):
            padded = np.full(present.shape, PADDING.get(key, 0), dtype)
            padded[present] = np.concatenate(columns)
            view[key] = torch.from_numpy(padded)
    rewards = [sequence.reward for sequence in sequences]
    if None not in rewards:
        view["rewards"] = torch.tensor(rewards, dtype=torch.float32)
    if all(trajectory.extras.keys() == having[0].extras.keys() for trajectory in having):
        view |= _merged([trajectory.extras for trajectory in having])
    return view


def merge_outcomes(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the episodes of a group returned as one: interactions stay interactions, else one tensor dict.

    Raises:
        ValueError: If tensor dicts have different keys.
    """
    if all(is_interactions(outcome) for outcome in outcomes):
        return {key: value for outcome in outcomes for key, value in outcome.items()}
    return concat_padded_tensors(
        [
            concat_padded_tensors([value.to_tensor_dict() for value in outcome.values()])
            if is_interactions(outcome)
            else outcome
            for outcome in outcomes
        ]
    )


def check_same_keys(outcomes: Sequence[dict[str, Any]]) -> None:
    """Refuse tensor dicts of one group that have different keys.

    Raises:
        ValueError: With both lists of keys.
    """
    for other in outcomes[1:]:
        if other.keys() != outcomes[0].keys():
            raise ValueError(
                f"tensor dicts of one group have different keys, {sorted(outcomes[0])} and {sorted(other)}: "
                "return the same keys from every episode"
            )


def check_tensor_dict(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the token keys and rewards as numpy arrays; raise ValueError, naming key, rule and fix, for a bad dict."""
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
        rewards = arrays["rewards"] = _as_numpy("rewards", tensors["rewards"])
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
    return arrays


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
    if len(dicts) == 1:
        return dict(dicts[0])
    check_same_keys([dict(d) for d in dicts])
    return _merged(dicts)


def _merged(dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    import torch

    merged: dict[str, Any] = {}
    for key, value in dicts[0].items():
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
