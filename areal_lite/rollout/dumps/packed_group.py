"""A group as plain data for the process that dumps it (:mod:`areal_lite.rollout.dumps.dump_writer`).

Packing takes a few microseconds per episode. Turns and text take ten times that, and are made from the unpacked group.
"""

from __future__ import annotations

import itertools
import pickle
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory, Turn, TurnRole
from areal_lite.api.turn_tree import TurnSources, link_turns, turn_sources
from areal_lite.rollout.dumps.dump_lines import row_json

Plain = tuple[Any, ...]


class _Form:
    """Fields of a class, of which the last ``num_columns`` are arrays, as plain data."""

    def __init__(self, *fields: str, num_columns: int = 0) -> None:
        self._fields = fields
        self._num_plain = len(fields) - num_columns
        self._get = attrgetter(*fields)

    def pack(self, value: Any) -> Plain:
        """Return the fields; an array as dtype and bytes, which pickle writes twice as fast."""
        plain: Plain = self._get(value)
        at = self._num_plain
        if at == len(plain):
            return plain
        return *plain[:at], *[None if array is None else (array.dtype.char, array.tobytes()) for array in plain[at:]]

    def unpack(self, plain: Plain) -> dict[str, Any]:
        """Return the fields by name."""
        arrays: list[NDArray[Any] | None] = [
            None if packed is None else np.frombuffer(packed[1], packed[0]) for packed in plain[self._num_plain :]
        ]
        return dict(zip(self._fields, (*plain[: self._num_plain], *arrays), strict=True))


_GROUP = _Form("task_id", "group_id", "rejection", "is_eval", "start_version", "queued_s", "run_s", "finished_at")
_TRAJECTORY = _Form("member_idx", "failure", "reward", "counts", "reward_extra", "processes")
_SEQUENCE = _Form("reward", "place", "input_ids", "loss_mask", "logprobs", "versions", "token_rewards", num_columns=5)
_TURN = _Form(
    *("parent", "start", "stop_reason", "started", "latency_s", "text", "agent", "server"),
    *("ids", "loss_mask", "logprobs", "versions"),
    num_columns=4,
)
_CALL = _Form(
    *("output_tokens", "output_logprobs", "output_versions"), *("stop_reason", "latency", "started", "rid", "server")
)


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs."""
    trajectories = [_pack_trajectory(each) for each in group.trajectories]
    plain = _GROUP.pack(group), group.status.value, trajectories, row_json(group.data)
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    own, status, trajectories, row = pickle.loads(packed)
    parts = [_unpack_trajectory(*plain) for plain in trajectories]
    return Group(**_GROUP.unpack(own), status=EpisodeStatus(status), data={}, trajectories=parts), row


def _pack_trajectory(trajectory: Trajectory) -> Plain:
    sources = turn_sources(trajectory)
    if sources is None:  # the turns are made, and the calls may be gone
        origin: Plain = [(turn.role.value, _TURN.pack(turn)) for turn in trajectory.turns], [], [], []
    else:
        chains, calls = sources
        every = {id(call): call for call in itertools.chain(*chains, calls)}
        numbers = {key: number for number, key in enumerate(every)}
        chained = [[numbers[id(call)] for call in chain] for chain in chains]
        origin = None, [*map(_pack_call, every.values())], chained, [numbers[id(call)] for call in calls]
    sequences = [_SEQUENCE.pack(sequence) for sequence in trajectory.sequences]
    return _TRAJECTORY.pack(trajectory), trajectory.status.value, sequences, *origin


def _unpack_trajectory(
    own: Plain,
    status: str,
    sequences: list[Plain],
    turns: list[tuple[str, Plain]] | None,
    every: list[tuple[list[int], int, Any, Plain]],
    chains: list[list[int]],
    calls: list[int],
) -> Trajectory:
    trajectory = Trajectory(**_TRAJECTORY.unpack(own), status=EpisodeStatus(status))
    trajectory.sequences += [TokenSequence(**_SEQUENCE.unpack(plain)) for plain in sequences]
    if turns is not None:
        trajectory.turns = [Turn(role=TurnRole(role), **_TURN.unpack(plain)) for role, plain in turns]
    else:
        made = [_unpack_call(*plain) for plain in every]
        chained = [[made[number] for number in chain] for chain in chains]
        link_turns(trajectory, TurnSources(chained, [made[number] for number in calls]))
    return trajectory


def _pack_call(call: ModelResponse) -> Plain:
    prompt = call.prompt  # pickle writes a list once, also if many calls share it
    return prompt.ids, prompt.length, call.metadata.get("agent"), _CALL.pack(call)


def _unpack_call(ids: list[int], length: int, agent: Any, own: Plain) -> ModelResponse:
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **_CALL.unpack(own))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))
