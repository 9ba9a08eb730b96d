"""A group as plain data for the process that dumps it (:mod:`areal_lite.rollout.dumps.dump_writer`).

Packing takes a few microseconds per episode. Turns and text take ten times that, and are made from the unpacked group.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.record_codec import (
    Columns,
    Form,
    Plain,
    pack_records,
    pack_trajectory,
    unpack_records,
    unpack_trajectory,
)
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory, Turn, TurnRole
from areal_lite.api.turn_tree import link_turns, turn_sources
from areal_lite.rollout.dumps.dump_lines import row_json

_GROUP = Form("task_id", "group_id", "rejection", "is_eval", "start_version", "queued_s", "run_s", "finished_at")
_TURN = Form(
    *("parent", "start", "stop_reason", "started", "latency_s", "text", "agent", "server"),
    *("ids", "loss_mask", "logprobs", "versions"),
    num_columns=4,
)
_CALL = Form(
    *("output_tokens", "output_logprobs", "output_versions"), *("stop_reason", "latency", "started", "rid", "server")
)


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs: a pickle, because it goes from the run to a child."""
    columns: Columns = []
    trajectories = [
        (pack_records(each), pack_trajectory(each, columns), _pack_turns(each, columns)) for each in group.trajectories
    ]
    plain = _GROUP.pack(group, columns), group.status.value, trajectories, row_json(group.data), columns
    return pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    own, status, trajectories, row, columns = pickle.loads(packed)
    parts = [_unpack_trajectory(plain, columns) for plain in trajectories]
    return Group(**_GROUP.unpack(own, columns), status=EpisodeStatus(status), data={}, trajectories=parts), row


def _pack_turns(trajectory: Trajectory, columns: Columns) -> Plain:
    sources = turn_sources(trajectory)
    if sources is None:  # the turns are made, and the calls may be gone
        turns = [(turn.role.value, _TURN.pack(turn, columns)) for turn in trajectory.turns]
        return turns, [sequence.place for sequence in trajectory.sequences]
    chains, calls = sources
    every = {id(call): call for call in itertools.chain(*chains, calls)}
    numbers = {key: number for number, key in enumerate(every)}
    chained = [[numbers[id(call)] for call in chain] for chain in chains]
    return [*map(_pack_call, every.values())], chained, [numbers[id(call)] for call in calls]


def _unpack_trajectory(plain: Plain, columns: Columns) -> Trajectory:
    records, ended, origin = plain
    trajectory = unpack_trajectory(ended, columns)
    for name, value in unpack_records(records).items():
        setattr(trajectory, name, value)
    if len(origin) == 2:
        turns, places = origin
        trajectory.turns = [Turn(role=TurnRole(role), **_TURN.unpack(own, columns)) for role, own in turns]
        for sequence, place in zip(trajectory.sequences, places, strict=True):
            sequence.place = place
    else:
        every, chained, calls = origin
        made = [_unpack_call(*own) for own in every]
        chains = [[made[number] for number in chain] for chain in chained]
        link_turns(trajectory, chains, [made[number] for number in calls])
    return trajectory


def _pack_call(call: ModelResponse) -> Plain:
    prompt = call.prompt  # pickle writes a list once, also if many calls share it
    return prompt.ids, prompt.length, call.metadata.get("agent"), _CALL.pack(call, [])


def _unpack_call(ids: list[int], length: int, agent: Any, own: Plain) -> ModelResponse:
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **_CALL.unpack(own, ()))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))
