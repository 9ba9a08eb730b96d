"""Messages between the run and the process that writes dumps: groups as bytes, and reports.

Packing must cost microseconds, because it happens on the event loop. A group is a pickle, which goes from the run to a
child and never back: it writes a call or a list of ids once, however many turns share it. What a dump does not show is
left out, and the rest is plain tuples, lists and bytes: to name a class takes longer than to write its values.
"""

import pickle
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
import numpy as np
import orjson
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import COLUMNS, RECORDED, EpisodeStatus, Group, TokenSequence, Trajectory
from areal_lite.api.turn_tree import link_turns, turn_sources

File = tuple[str, str, bytes]  # folder and name of a file, and its group; see pack_group


class Report(NamedTuple):
    written: int  # files that were written
    no_text: str | None = None  # why the file after them was left out: the traceback, if its group has no JSON form
    errno: int = 0  # why the file after them could not be written, and nothing more is; 0 if nothing failed
    size: int = 0  # bytes of that file


_GROUP = "task_id", "group_id", "rejection", "is_eval", "start_version", "queued_s", "run_s", "finished_at"
_TRAJECTORY = "member_idx", "reward", "has_loss_mask", "failure", *RECORDED
_CALL = (
    *("output_tokens", "output_logprobs", "output_versions"),
    *("stop_reason", "latency", "started", "rid", "server", "images"),
)
_group, _trajectory, _columns, _call = (attrgetter(*names) for names in (_GROUP, _TRAJECTORY, COLUMNS, _CALL))


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs."""
    trajectories = [_packed(trajectory) for trajectory in group.trajectories]
    own = group.status.value, _group(group), row_json(group.data), trajectories
    return pickle.dumps(own, pickle.HIGHEST_PROTOCOL)


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    status, own, row, trajectories = pickle.loads(packed)  # nosec B301 # packed by the run's process
    fields = dict(zip(_GROUP, own, strict=True)) | {"trajectories": [_unpacked(*each) for each in trajectories]}
    return Group(status=EpisodeStatus(status), **fields, data={}), row


def row_json(data: Mapping[str, Any]) -> bytes | None:
    """Return a dataset row as JSON; None if it has no JSON form."""
    try:
        return orjson.dumps(dict(data), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return None


def _packed(trajectory: Trajectory) -> tuple[Any, ...]:
    sequences = [
        (s.reward, s.place, s.images, [None if c is None else (c.tobytes(), c.dtype.char) for c in _columns(s)])
        for s in trajectory.sequences
    ]
    sources = turn_sources(trajectory)
    turns = trajectory.turns if sources is None else None  # made already, and the calls may be gone
    calls = None if sources is None else _each_replaced(_packed_call, *sources)
    return trajectory.status.value, _trajectory(trajectory), sequences, turns, calls


def _unpacked(status: str, own: Sequence[Any], sequences: Sequence[Any], turns: Any, sources: Any) -> Trajectory:
    fields = dict(zip(_TRAJECTORY, own, strict=True)) | {"sequences": [_unpacked_sequence(*each) for each in sequences]}
    trajectory = Trajectory(status=EpisodeStatus(status), made_turns=turns, **fields)
    if turns is None:
        link_turns(trajectory, *_each_replaced(_unpacked_call, *sources))
    return trajectory


def _each_replaced(replace: Callable[[Any], Any], chains: Sequence[Sequence[Any]], calls: Sequence[Any]) -> Any:
    """Return chains and calls with each call replaced once, wherever it is."""
    known = {id(call): call for each in (calls, *chains) for call in each}
    new = {key: replace(call) for key, call in known.items()}
    return [[new[id(call)] for call in chain] for chain in chains], [new[id(call)] for call in calls]


def _packed_call(call: ModelResponse) -> tuple[Any, ...]:
    prompt = call.prompt
    return prompt.ids, prompt.length, call.metadata.get("agent"), _call(call)


def _unpacked_call(packed: tuple[Any, ...]) -> ModelResponse:
    ids, length, agent, own = packed
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **dict(zip(_CALL, own, strict=True)))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))


def _unpacked_sequence(
    reward: float | None, place: Any, images: Any, columns: list[tuple[bytes, str] | None]
) -> TokenSequence:
    arrays: list[Any] = [None if each is None else np.frombuffer(*each) for each in columns]
    return TokenSequence(reward=reward, place=place, images=images, **dict(zip(COLUMNS, arrays, strict=True)))
