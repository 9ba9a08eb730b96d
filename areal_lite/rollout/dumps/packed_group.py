"""Messages between the run and the process that writes dumps: groups as bytes, and reports.

Packing must cost microseconds, because it happens on the event loop. A group is a pickle, which goes from the run to a
child and never back: it writes a call or a list of ids once, however many turns share it. What a dump does not show is
left out, and arrays are bytes, which takes half the time of pickling arrays.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.record_codec import ENDED, RECORDED, SEQUENCE
from areal_lite.api.trajectory import Group, TokenSequence, Trajectory, Turn
from areal_lite.api.turn_tree import link_turns, turn_sources

File = tuple[str, str, bytes]  # folder and name of a file, and its group; see pack_group


class Report(NamedTuple):
    written: int  # files that were written
    no_text: str | None = None  # why the file after them was left out: the traceback, if its group has no JSON form
    errno: int = 0  # why the file after them could not be written, and nothing more is; 0 if nothing failed
    size: int = 0  # bytes of that file


_GROUP = (
    *("task_id", "group_id", "status", "rejection", "is_eval", "start_version"),
    *("queued_s", "run_s", "finished_at", "trajectories"),
)
_TRAJECTORY = *ENDED, *RECORDED
_SEQUENCE = *SEQUENCE, "place"
_CALL = (
    *("output_tokens", "output_logprobs", "output_versions"),
    *("stop_reason", "latency", "started", "rid", "server"),
)
_group, _trajectory, _sequence, _call = (attrgetter(*names) for names in (_GROUP, _TRAJECTORY, _SEQUENCE, _CALL))


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs."""
    packed = io.BytesIO()
    _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump((_group(group), row_json(group.data)))
    return packed.getvalue()


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    own, row = pickle.loads(packed)
    return Group(**dict(zip(_GROUP, own, strict=True)), data={}), row


def row_json(data: Mapping[str, Any]) -> bytes | None:
    """Return a dataset row as JSON; None if it has no JSON form."""
    try:
        return orjson.dumps(dict(data), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return None


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.ndim == 1 and not value.dtype.hasobject:
            return np.frombuffer, (value.tobytes(), value.dtype.char)
        if isinstance(value, ModelResponse):
            prompt = value.prompt
            return _made_call, (prompt.ids, prompt.length, value.metadata.get("agent"), *_call(value))
        if isinstance(value, TokenSequence):
            return _made_sequence, _sequence(value)
        if isinstance(value, Trajectory):
            sources = turn_sources(value)  # None if the turns are made: the calls may be gone then
            return _made_trajectory, (_trajectory(value), sources, value.turns if sources is None else [])
        return NotImplemented


def _made_call(ids: list[int], length: int, agent: Any, *own: Any) -> ModelResponse:
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **dict(zip(_CALL, own, strict=True)))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))


def _made_sequence(*own: Any) -> TokenSequence:
    return TokenSequence(**dict(zip(_SEQUENCE, own, strict=True)))


def _made_trajectory(own: tuple[Any, ...], sources: tuple[Any, Any] | None, turns: list[Turn]) -> Trajectory:
    trajectory = Trajectory(**dict(zip(_TRAJECTORY, own, strict=True)))
    if sources is None:
        trajectory.turns = turns
    else:
        link_turns(trajectory, *sources)
    return trajectory
