"""Messages between the run and the process that writes dumps: groups as bytes, and reports.

Packing must cost microseconds, because it happens on the event loop. A group is a pickle, which goes from the run to a
child and never back: it writes a call or a list of ids once, however many turns share it. What a dump does not show is
left out, and the columns of sequences are bytes, which takes half the time of pickling arrays.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from areal_lite.api.image_span import Images
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import COLUMNS, RECORDED, EpisodeStatus, Group, TokenSequence, Trajectory, Turn
from areal_lite.api.turn_tree import link_turns, turn_sources

File = tuple[str, str, bytes]  # folder and name of a file, and its group; see pack_group


class Report(NamedTuple):
    written: int  # files that were written
    no_text: str | None = None  # why the file after them was left out: the traceback, if its group has no JSON form
    errno: int = 0  # why the file after them could not be written, and nothing more is; 0 if nothing failed
    size: int = 0  # bytes of that file


_GROUP = (
    *("task_id", "group_id", "rejection", "is_eval", "start_version"),
    *("queued_s", "run_s", "finished_at", "trajectories"),
)
_TRAJECTORY = "member_idx", "reward", "has_loss_mask", "failure", "sequences", *RECORDED
_CALL = (
    *("output_tokens", "output_logprobs", "output_versions"),
    *("stop_reason", "latency", "started", "rid", "server", "images"),
)
_group, _trajectory, _columns, _call = (attrgetter(*names) for names in (_GROUP, _TRAJECTORY, COLUMNS, _CALL))


def pack_group(group: Group) -> bytes:
    """Return what :func:`unpack_group` needs."""
    packed = io.BytesIO()
    pickler = pickle.Pickler(packed, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = _REDUCERS
    pickler.dump((group.status.value, _group(group), row_json(group.data)))
    return packed.getvalue()


def unpack_group(packed: bytes) -> tuple[Group, bytes | None]:
    """Return the group without its dataset row, and the row as JSON; None if it has no JSON form."""
    status, own, row = pickle.loads(packed)  # nosec B301 # packed by the run's process
    return Group(status=EpisodeStatus(status), **dict(zip(_GROUP, own, strict=True)), data={}), row


def row_json(data: Mapping[str, Any]) -> bytes | None:
    """Return a dataset row as JSON; None if it has no JSON form."""
    try:
        return orjson.dumps(dict(data), option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return None


def _reduce_call(call: ModelResponse) -> Any:
    prompt = call.prompt
    return _made_call, (prompt.ids, prompt.length, call.metadata.get("agent"), *_call(call))


def _made_call(ids: list[int], length: int, agent: Any, *own: Any) -> ModelResponse:
    call = ModelResponse(input_tokens=[], metadata={"agent": agent}, **dict(zip(_CALL, own, strict=True)))
    return SharedPromptResponse.of(call, TokenPrefix(ids, length))


def _reduce_sequence(sequence: TokenSequence) -> Any:
    columns = [None if each is None else (each.tobytes(), each.dtype.char) for each in _columns(sequence)]
    return _made_sequence, (sequence.reward, sequence.place, sequence.images, columns)


def _made_sequence(
    reward: float | None, place: Any, images: Images, columns: list[tuple[bytes, str] | None]
) -> TokenSequence:
    arrays: list[Any] = [None if each is None else np.frombuffer(*each) for each in columns]
    return TokenSequence(reward=reward, place=place, images=images, **dict(zip(COLUMNS, arrays, strict=True)))


def _reduce_trajectory(trajectory: Trajectory) -> Any:
    sources = turn_sources(trajectory)  # None if the turns are made: the calls may be gone then
    turns = trajectory.turns if sources is None else None
    return _made_trajectory, (trajectory.status.value, _trajectory(trajectory), turns, sources)


def _made_trajectory(status: str, own: tuple[Any, ...], turns: list[Turn] | None, sources: Any) -> Trajectory:
    fields = dict(zip(_TRAJECTORY, own, strict=True))
    trajectory = Trajectory(status=EpisodeStatus(status), made_turns=turns, **fields)
    if turns is None:
        link_turns(trajectory, *sources)
    return trajectory


class _Reducers(dict[type[Any], Callable[[Any], Any]]):
    def __missing__(self, cls: type[Any]) -> Callable[[Any], Any]:
        """Return the reducer of a base class: a workflow may make responses of a class of its own."""
        for base in cls.__mro__:
            if base in self:
                return self[base]
        raise KeyError(cls)


_REDUCERS = _Reducers(
    {
        ModelResponse: _reduce_call,
        SharedPromptResponse: _reduce_call,
        TokenSequence: _reduce_sequence,
        Trajectory: _reduce_trajectory,
    }
)
