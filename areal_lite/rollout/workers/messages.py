"""Messages between the run and a rollout worker (:mod:`areal_lite.processes.channel` has the framing).

Towards the worker, a message is a pickled tuple. From the worker, which runs users' code, it is JSON: its kind and
arguments, and arrays as bytes beside it, which it names by number (:func:`to_plain`). :func:`read_report` and
:func:`from_plain` make our types of it and nothing else, with the types of values that the run counts on, so it never
loads an object that an episode made. Turns and their model calls are not sent back: the run made the calls.
"""

import asyncio
import logging
import pickle
import socket
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints
import numpy as np
from pydantic import TypeAdapter
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.image_span import ImageSpan, images_of, plain_images
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import RECORDED, EpisodeStatus, ProcessRecord, Recorded, TokenSequence, Trajectory
from areal_lite.api.turn_tree import call_key, link_turns, turn_sources
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.processes.channel import MessageSplitter, decode_reply, framed

REPORTS = frozenset({"ready", "generate", "cut_short", "drop", "ended", "blocked", "log"})
"""Kinds of messages from a worker."""
RESPONSE_FIELDS = (
    *("output_tokens", "output_logprobs", "output_versions", "output_top_logprobs", "stop_reason"),
    *("latency", "ttft", "started", "attempts", "server"),
)
"""Fields of the answer to a call beside those of its request."""
GCONFIG = TypeAdapter(GenerationHyperparameters)

Columns = list[bytes]  # arrays as bytes, in the order in which they were packed
ReadColumns = Sequence[bytes | bytearray]


def request(*message: Any) -> bytes:
    return framed(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class Reader(asyncio.Protocol):
    """Passes on each message of the other side; an error in one closes the connection."""

    def __init__(
        self,
        on_message: Callable[[memoryview], object],
        on_close: Callable[[], object],
        *,
        max_bytes: int | None = None,
    ) -> None:
        self._on_message = on_message
        self._on_close = on_close
        self._messages = MessageSplitter(max_bytes=max_bytes)

    async def read_from(self, connection: socket.socket) -> asyncio.WriteTransport:
        """Read a connected socket on the running loop; return its transport."""
        loop = asyncio.get_running_loop()
        attach = loop.create_unix_connection if connection.family == socket.AF_UNIX else loop.create_connection
        transport, _ = await attach(lambda: self, sock=connection)
        return transport

    def data_received(self, data: bytes) -> None:
        for body in self._messages.feed(data):
            self._on_message(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_close()


PromptPlace = tuple[int, int, int]
"""A prompt's :class:`TokenPrefix`: number of its list of ids in the group, ``length``, ``num_accepted``."""


class EpisodeReply(NamedTuple):
    """An episode's record in its worker; its model calls are in the run's process."""

    records: dict[str, Any]  # what its code recorded, by field of Episode
    trajectory: Trajectory | None  # None if it has not ended
    chains: list[list[Hashable]]  # keys of the calls of each sequence (``turn_tree.call_key``)

    def link(self, trajectory: Trajectory, calls: Sequence[ModelResponse]) -> None:
        known = {call_key(call): call for call in calls}
        chains: list[list[ModelResponse]] = []
        if all(key in known for chain in self.chains for key in chain):  # otherwise calls are found by their tokens
            chains = [[known[key] for key in chain] for chain in self.chains]
        link_turns(trajectory, chains, calls)


def read_end(plain: Any, columns: ReadColumns) -> tuple[bool, Failure | None, list[EpisodeReply]]:
    """Return whether a cancellation ended the group, why it failed, and a reply per episode, if it could send them."""
    was_stopped, failure, replies = from_plain(plain, columns)
    if not isinstance(failure, Failure | None) or not all(isinstance(reply, EpisodeReply) for reply in replies):
        raise TypeError("the end of a group has a failure and replies of its episodes")
    for reply in replies:
        for name in RECORDED:
            _RECORDED[name].validate_python(reply.records[name], strict=True)
    return bool(was_stopped), failure, replies


def read_report(body: bytes | memoryview) -> tuple[Any, ...]:
    """Return a worker's message: its kind and arguments. A group's end stays packed, with its arrays as the last
    argument: an error in it belongs to the group."""
    (kind, *arguments), columns = decode_reply(body)
    if kind == "generate":
        *where, (rid, gconfig, top_logprobs, agent, images, streams, place) = arguments
        request = ModelRequest(
            input_ids=array("i", bytes(columns[0])).tolist(),
            gconfig=_gconfig(gconfig),
            rid=rid,
            metadata={} if agent is None else {"agent": agent},
            top_logprobs=top_logprobs,
            images=images_of(images),
        )
        return kind, *where, request, streams, place
    if kind == "ended":
        return kind, *arguments, columns
    if kind == "log":
        return kind, logging.makeLogRecord(arguments[0] | {"args": None, "exc_info": None})  # it is formatted already
    return kind, *arguments


@lru_cache(256)
def _gconfig(text: str) -> GenerationHyperparameters:
    return GCONFIG.validate_json(text)


_COLUMN_KINDS = {"input_ids": "iu", "loss_mask": "b", "logprobs": "f", "versions": "iu", "token_rewards": "f"}
"""Kinds of numbers in each array of a sequence, as ``numpy.dtype.kind``."""
_RECORDED = {name: TypeAdapter(hint) for name, hint in get_type_hints(Recorded).items()}
_JSON = {type(None), bool, int, float, str}  # values that stay as they are
_Number = float | int
_Array = np.ndarray | None
FIELDS: dict[type[Any], dict[str, Any]] = {
    EpisodeReply: {"records": dict, "trajectory": Trajectory | None, "chains": list},
    Trajectory: {
        **{"status": EpisodeStatus, "member_idx": int, "reward": _Number | None, "has_loss_mask": bool},
        **{"failure": Failure | None, "sequences": list, "extras": dict},
    },
    TokenSequence: {
        **{"reward": _Number | None, "episode_reward": _Number | None, "images": tuple},
        **dict.fromkeys(_COLUMN_KINDS, _Array),
    },
    ImageSpan: {"offset": int, "length": int, "sha256": str, "grid": tuple},
    Failure: get_type_hints(Failure),
    ProcessRecord: get_type_hints(ProcessRecord) | {"command": list, "seconds": _Number},
    EpisodeStatus: {"value": str},
    FailureKind: {"value": str},
}
"""What is sent of each type: its fields, and the type that a worker's must have, as the run counts on them."""
_TYPES = {cls.__name__: (cls, fields) for cls, fields in FIELDS.items()}


def from_plain(plain: Any, columns: ReadColumns) -> Any:
    """Return the value of :func:`to_plain`; a TypeError or ValueError if a worker did not make it so."""
    if not isinstance(plain, list):
        return plain
    kind, *content = plain
    if kind == "array":
        number, dtype, shape = content
        array = np.frombuffer(columns[number], dtype)
        return array if len(shape) == 1 else array.reshape(shape)
    if kind == "tensor":
        return _tensor(columns[content[0]], *content[1:])
    if kind == "bytes":
        return bytes(columns[content[0]])
    parts = [from_plain(part, columns) if isinstance(part, list) else part for part in content]
    if kind in _TYPES:
        cls, fields = _TYPES[kind]
        values = dict(zip(fields, parts, strict=True))
        for name, value in values.items():
            if not isinstance(value, fields[name]):
                raise TypeError(f"{kind}.{name} of a worker is {value!r:.80}")
            if isinstance(value, np.ndarray) and (value.ndim != 1 or value.dtype.kind not in _COLUMN_KINDS[name]):
                raise TypeError(f"{kind}.{name} of a worker is {value.dtype} of {value.ndim} dimensions")
        return cls(**values)
    return {"list": list, "tuple": tuple, "dict": dict}[kind](parts)


def _tensor(data: bytes | bytearray, name: str, shape: Sequence[int]) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def pack_call(request: ModelRequest, ids: list[int], place: PromptPlace | None) -> tuple[Any, Columns]:
    """Return a model call. ``ids`` are those of its prompt that its group has not sent before; the prompt if ``place``
    is None, as outside a group. ``metadata["agent"]`` must have a JSON form."""
    gconfig = GCONFIG.dump_json(request.gconfig).decode()
    agent, streams = request.metadata.get("agent"), request.on_tokens is not None
    images = plain_images(request.images)
    return (request.rid, gconfig, request.top_logprobs, agent, images, streams, place), [array("i", ids).tobytes()]


def pack_end(was_stopped: bool, failure: Failure | None, episodes: Iterable[Episode]) -> tuple[Any, Columns]:
    """Return the end of a group as plain data and bytes; a TypeError for what no process can send."""
    columns: Columns = []
    return to_plain((was_stopped, failure, [_reply(episode) for episode in episodes]), columns), columns


def _reply(episode: Episode) -> EpisodeReply:
    chains, _ = (episode.trajectory and turn_sources(episode.trajectory)) or ((), ())
    return EpisodeReply(
        records={name: getattr(episode, name) for name in RECORDED},
        trajectory=episode.trajectory,
        chains=[[call_key(call) for call in chain] for chain in chains],
    )


def to_plain(value: Any, columns: Columns) -> Any:
    """Return ``value`` as JSON values, with its arrays added to ``columns``: a list has the kind of what it stands for
    before the content. TypeError for what no process can send."""
    kind = type(value)
    if kind in FIELDS:
        return [kind.__name__, *_plain_parts([getattr(value, name) for name in FIELDS[kind]], columns)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        columns.append(value.tobytes())
        return ["array", len(columns) - 1, value.dtype.str, value.shape]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", *_plain_parts(value, columns)]
    if isinstance(value, dict):
        return ["dict", *[["tuple", *_plain_parts(item, columns)] for item in value.items()]]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        columns.append(value)
        return ["bytes", len(columns) - 1]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        columns.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return ["tensor", len(columns) - 1, str(value.dtype).removeprefix("torch."), value.shape]
    raise TypeError(
        f"the workflow's dict holds a {kind.__name__}, which a worker cannot send: return tensors, arrays, numbers, "
        "texts, and lists and dicts of them, or set rollout.workers: 1"
    )


def _plain_parts(values: Iterable[Any], columns: Columns) -> list[Any]:
    return [value if type(value) in _JSON else to_plain(value, columns) for value in values]  # a call costs more
