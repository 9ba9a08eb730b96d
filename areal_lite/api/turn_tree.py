"""Make a trajectory from what a workflow returned and the model calls it made: its sequences when the episode ends, its
turns, which show how they came about, on first use."""

import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any
import numpy as np
from numpy.typing import NDArray
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.image_span import Images, images_between
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.tensor_dict import SEQUENCE_KEYS, check_returned, check_tensor_dict
from areal_lite.api.trajectory import COLUMNS, EpisodeStatus, TokenSequence, Trajectory, Turn, TurnRewards, TurnRole

Chain = Sequence[ModelResponse]
"""The calls on the path of a sequence, in order."""
Span = tuple[int, int, ModelResponse | None, bool]
"""Start and end of a turn in its sequence, its call if known, and whether the model sampled it."""


def trajectory_of(
    returned: dict[str, Any] | None, calls: Sequence[ModelResponse], *, member_idx: int = 0
) -> Trajectory:
    """Return the trajectory of an episode that finished. Its sequences are what the workflow returned, its turns the
    recorded calls, matched token by token; where none matches, the loss mask separates answers from the rest."""
    status = EpisodeStatus.REJECTED if returned is None else EpisodeStatus.ACCEPTED
    trajectory = Trajectory(member_idx=member_idx, status=status)
    sequences = trajectory.sequences
    chains: list[Chain] = []
    if returned is not None:
        with attributed_to(FailureKind.OUTPUT):
            if check_returned(returned):
                for each in returned.values():
                    rewards = {"reward": each.reward, "episode_reward": each.episode_reward}
                    sequences.append(TokenSequence(**each.columns(), images=each.model_response.images, **rewards))
                    chains.append([node.model_response for node in each.chain()])
            else:
                arrays = check_tensor_dict(returned)
                sequences.extend(_row_sequences(arrays))
                if "token_rewards" in arrays and len(sequences) > 1:
                    raise ValueError(
                        f"the episode has token_rewards and {len(sequences)} sequences: return its turns as one "
                        "sequence, or rewards in place of token_rewards"
                    )
                trajectory.has_loss_mask = "loss_mask" in arrays
                trajectory.extras = {key: value for key, value in returned.items() if key not in SEQUENCE_KEYS}
                if any(call.images for call in calls):
                    trajectory.extras.pop("multi_modal_input", None)  # pixels, which the spans name
                    for sequence in sequences:
                        sequence.images = _images_of(sequence, calls)
        for sequence in sequences:
            _forget_placeholders(sequence)
        trajectory.join_rewards(TurnRewards())
    link_turns(trajectory, chains, calls)
    return trajectory


def _forget_placeholders(sequence: TokenSequence) -> None:
    """Drop log-probs and versions that were not recorded: 0 and -1 at every trained token, as AReaL marks them."""
    if sequence.logprobs is not None and sequence.versions is not None and _any(sequence.loss_mask):
        recorded = (sequence.versions >= 0) | (sequence.logprobs != 0)
        if not _any(recorded & sequence.loss_mask):
            sequence.logprobs = sequence.versions = None


def link_turns(trajectory: Trajectory, chains: Sequence[Chain], calls: Sequence[ModelResponse]) -> None:
    """Have the trajectory make its turns when they are first asked for, of all ``calls`` in the order they ended.
    ``chains`` are those of each sequence; empty if sequences are matched to calls by their tokens."""
    owner = weakref.ref(trajectory)
    for sequence in trajectory.sequences:
        sequence.owner = owner
    trajectory.make_turns = partial(_make_turns, trajectory.sequences, chains, calls)


def turn_sources(trajectory: Trajectory) -> tuple[Sequence[Chain], Sequence[ModelResponse]] | None:
    """Return chains and calls of :func:`link_turns`; None if the turns are made."""
    make_turns = trajectory.make_turns
    if not isinstance(make_turns, partial):
        return None
    _, chains, calls = make_turns.args
    return chains, calls


def unfinished_trajectory(calls: Sequence[ModelResponse], *, member_idx: int, status: EpisodeStatus) -> Trajectory:
    """Return the trajectory of an episode that failed or was stopped: model calls, but no sequences."""
    return Trajectory(member_idx=member_idx, status=status, make_turns=partial(_make_turns, (), (), list(calls)))


def _make_turns(
    sequences: Sequence[TokenSequence], chains: Sequence[Chain], calls: Sequence[ModelResponse]
) -> list[Turn]:
    tree = _TurnTree()
    for place, sequence in enumerate(sequences):
        if chains:
            tree.add_path(sequence, _chain_spans(chains[place]))
        else:  # of equal answers to one prompt, each sequence takes another
            by_length = sorted(calls, key=lambda call: (call.input_len, call_key(call) in tree.calls))
            tree.add_path(sequence, _spans(sequence, by_length))
    tree.add_calls(calls)
    return tree.turns


class _TurnTree:
    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.calls: dict[Hashable, int] = {}
        """The turn of each call that a sequence holds, by identity."""
        self._places: dict[Hashable, int] = {}

    def add_path(
        self, sequence: TokenSequence, spans: Iterable[Span], first: int = 0, parent: int | None = None
    ) -> None:
        """Add the spans of a sequence as turns, and set its path. The sequence begins at token ``first`` of its
        conversation, after the turn ``parent``. Columns of the turns are views of the sequence's; where it does not
        train a call or has no such column, log-probs and versions are the call's own."""
        path: list[int] = []
        calls_before = -1
        for start, end, call, sampled in spans:
            here = slice(start, end)
            ids, loss_mask = sequence.input_ids[here], sequence.loss_mask[here]
            images = images_between(sequence.images, start, end)
            if call is not None:
                key: Hashable = (parent, call_key(call))
            else:
                key = (parent, sampled, ids.astype(np.int32, copy=False).tobytes(), images)
            place = self._places.get(key)
            trained = sampled and _any(loss_mask)
            if place is None or (trained and not _any(self.turns[place].loss_mask)):
                turn = Turn(
                    role=TurnRole.ASSISTANT if sampled else TurnRole.PROMPT if parent is None else TurnRole.ENVIRONMENT,
                    parent=parent,
                    start=first + start,
                    ids=ids,
                    loss_mask=loss_mask,
                    logprobs=None if sequence.logprobs is None else sequence.logprobs[here],
                    versions=None if sequence.versions is None else sequence.versions[here],
                    images=images,
                )
                if place is None:
                    place = self._places[key] = len(self.turns)
                    self.turns.append(turn)
                else:
                    self.turns[place] = turn
                if call is not None:
                    _describe(turn, call, trained=trained)
                    self.calls.setdefault(call_key(call), place)
            path.append(place)
            parent = place
            calls_before += sampled
        sequence.place = tuple(path), max(0, calls_before)

    def add_calls(self, calls: Sequence[ModelResponse]) -> None:
        """Add the calls that no sequence holds, each after the longest call that its prompt extends."""
        known: list[tuple[ModelResponse, int]] = []
        for call in calls:
            if call_key(call) not in self.calls:
                start, parent = _longest_prefix(known, call)
                ids = np.array([*call.prompt.ids[start : call.input_len], *call.output_tokens], np.int32)
                own = TokenSequence(  # the call and the end of its prompt, of which nothing trains
                    input_ids=ids,
                    loss_mask=np.zeros(len(ids), np.bool_),
                    logprobs=np.zeros(len(ids), np.float32),
                    versions=np.full(len(ids), -1, np.int32),
                    images=images_between(call.images, start, call.input_len),
                )
                given = call.input_len - start
                spans: list[Span] = [(0, given, None, False)] if given else []
                self.add_path(own, [*spans, (given, len(ids), call, True)], start, parent)
            known.append((call, self.calls[call_key(call)]))


def call_key(call: ModelResponse) -> Hashable:
    """Return a key for a call: a request may be sent several times, and an engine may set no id."""
    return (call.rid, call.started) if call.rid else id(call)


def _any(mask: NDArray[np.bool_]) -> bool:
    """Return ``mask.any()``, faster for the length of a turn."""
    return b"\1" in mask.tobytes()


def _describe(turn: Turn, call: ModelResponse, *, trained: bool) -> None:
    """Copy the call's metadata; its log-probs and versions only if the sequence does not have them."""
    turn.stop_reason, turn.started, turn.latency_s = call.stop_reason, call.started, call.latency
    turn.server = call.server or None
    agent = call.metadata.get("agent")
    turn.agent = agent if isinstance(agent, str) else None
    if turn.logprobs is None or not trained:
        turn.logprobs = np.array(call.output_logprobs, np.float32)
    if turn.versions is None or not trained:
        turn.versions = np.array(call.output_versions, np.int32)


def _longest_prefix(known: Sequence[tuple[ModelResponse, int]], call: ModelResponse) -> tuple[int, int | None]:
    """Return length and turn of the longest known call that the prompt of ``call`` begins with; 0 and None without."""
    longest, place = 0, None
    ids = call.prompt.ids
    for other, turn in reversed(known):  # in a conversation the latest is the one
        start, end = other.input_len, other.input_len + other.output_len
        if max(longest, 1) <= end <= call.input_len and ids[start:end] == other.output_tokens:
            before = other.prompt.ids
            if other.images != tuple(span for span in call.images if span.offset < end):
                continue  # equal ids, another picture
            if before is ids or before[:start] == ids[:start]:
                longest, place = end, turn
    return longest, place


def _row_sequences(arrays: Mapping[str, NDArray[Any]]) -> Iterator[TokenSequence]:
    columns = {key: arrays[key] for key in COLUMNS if key in arrays}
    if "loss_mask" not in arrays:
        columns["loss_mask"] = np.zeros(arrays["input_ids"].shape, np.bool_)
    rewards = arrays["rewards"].tolist() if "rewards" in arrays else [None] * len(arrays["input_ids"])
    wholes = rewards if len(set(rewards)) == 1 else [None] * len(rewards)  # equal ones are one, others those of turns
    if "episode_rewards" in arrays:
        wholes = arrays["episode_rewards"].tolist()
    attention = arrays.get("attention_mask")
    for row, (reward, whole) in enumerate(zip(rewards, wholes, strict=True)):
        place = row if attention is None else (row, attention[row] != 0)
        own = {key: column[place] for key, column in columns.items()}
        sequence = TokenSequence(reward=reward, episode_reward=whole, **own)
        if sequence.token_rewards is not None:
            total = float(sequence.token_rewards.sum(dtype=np.float64))
            if reward is not None and not math.isclose(reward, total, rel_tol=1e-4, abs_tol=1e-6):
                raise ValueError(f"rewards is {reward} and token_rewards sum to {total}: leave rewards out")
            sequence.reward = sequence.episode_reward = total
        yield sequence


def _images_of(sequence: TokenSequence, calls: Sequence[ModelResponse]) -> Images:
    """Return the images of a sequence that a workflow made of its calls: those of the longest that it begins with."""
    ids: list[int] = sequence.input_ids.tolist()
    for call in sorted(calls, key=lambda call: -call.input_len):
        end = call.input_len + call.output_len
        if ids[call.input_len : end] == call.output_tokens and ids[: call.input_len] == call.input_tokens:
            return call.images
    return ()


def _chain_spans(chain: Chain) -> Iterator[Span]:
    at = 0
    for answer in chain:
        start, end = answer.input_len, answer.input_len + answer.output_len
        if at < start:
            yield at, start, None, False
        yield start, end, answer, True
        at = end


def _spans(sequence: TokenSequence, calls: Sequence[ModelResponse]) -> Iterator[Span]:
    ids: list[int] = sequence.input_ids.tolist()
    at = same = 0
    shared: list[int] | None = None  # a list that begins with ``same`` ids of the sequence
    for call in calls:
        start, end = call.input_len, call.input_len + call.output_len
        if start < at or start == end:
            continue
        prompt = call.prompt.ids
        known = same if prompt is shared else 0
        if ids[start:end] != call.output_tokens or ids[known:start] != prompt[known:start]:
            continue  # a call of another branch
        shared, same = prompt, start
        yield from _runs(sequence.loss_mask, at, start)
        yield start, end, call, True
        at = end
    yield from _runs(sequence.loss_mask, at, len(ids))


def _runs(mask: NDArray[np.bool_], start: int, end: int) -> Iterator[Span]:
    if start == end:
        return
    if not _any(mask[start:end]):
        yield start, end, None, False
        return
    edges = [start, *(np.flatnonzero(mask[start + 1 : end] != mask[start : end - 1]) + start + 1).tolist(), end]
    for first, last in pairwise(edges):
        yield first, last, None, bool(mask[first])
