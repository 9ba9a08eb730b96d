"""What the run and a rollout worker tell each other (:mod:`areal_lite.processes.channel` has the framing).

Towards the worker, a message is a pickled tuple. From the worker, it is plain data: its kind and arguments, and arrays
as bytes. :func:`read_report` makes our types of it and nothing else, so the run never loads an object that an episode
made. An episode's model calls are not sent back: the run made them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import sys
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from areal_lite.api import record_codec as codec
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.trajectory import Trajectory
from areal_lite.api.turn_tree import call_key, link_turns, turn_sources
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.processes.channel import MessageSplitter, decode_reply, framed

RESPONSE_FIELDS = (
    *("output_tokens", "output_logprobs", "output_versions", "output_top_logprobs", "stop_reason"),
    *("latency", "ttft", "started", "attempts", "server"),
)
"""Fields of the answer to a call beside those of its request."""
_GCONFIG = TypeAdapter(GenerationHyperparameters)


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

    def data_received(self, data: bytes) -> None:
        for body in self._messages.feed(data):
            self._on_message(body)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_close()


class CallRequest(NamedTuple):
    rid: str
    gconfig: GenerationHyperparameters
    top_logprobs: int
    agent: Any  # ``metadata["agent"]``, which must have a JSON form
    streams: bool
    prefix: tuple[int, int, int] | None
    """The prompt's :class:`TokenPrefix`: number of its list of ids in the group, ``length``, ``num_accepted``. None
    outside a group: ``ids`` are the prompt."""
    ids: list[int]  # the prompt's ids that its group has not sent before

    def packed(self) -> tuple[codec.Plain, codec.Columns]:
        gconfig = _GCONFIG.dump_json(self.gconfig).decode()
        return (self.rid, gconfig, *self[2:-1]), [array("i", self.ids).tobytes()]


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


def pack_end(
    was_stopped: bool, failure: Failure | None, episodes: Iterable[Episode]
) -> tuple[codec.Plain, codec.Columns]:
    """Return the end of a group as plain data and bytes; a TypeError for what no process can send."""
    columns: codec.Columns = []
    replies = [_pack_episode(episode, columns) for episode in episodes]
    return (was_stopped, codec.pack_failure(failure), replies), columns


def read_end(plain: codec.Plain, columns: codec.ReadColumns) -> tuple[bool, Failure | None, list[EpisodeReply]]:
    """Return whether a cancellation ended the group, why it failed, and a reply per episode, if it could send them."""
    was_stopped, failure, replies = plain
    return was_stopped, codec.unpack_failure(failure), [_read_episode(reply, columns) for reply in replies]


def _pack_episode(episode: Episode, columns: codec.Columns) -> codec.Plain:
    trajectory = episode.trajectory
    if trajectory is None:
        return codec.pack_records(episode), None
    sources = turn_sources(trajectory)
    chains = [[call_key(call) for call in chain] for chain in (() if sources is None else sources[0])]
    extras = _pack_value(trajectory.extras, columns)
    return codec.pack_records(episode), (codec.pack_trajectory(trajectory, columns), extras, chains)


def _read_episode(plain: codec.Plain, columns: codec.ReadColumns) -> EpisodeReply:
    records, ended = plain
    if ended is None:
        return EpisodeReply(codec.unpack_records(records), None, [])
    trajectory = codec.unpack_trajectory(ended[0], columns)
    trajectory.extras = _read_value(ended[1], columns)
    chains = [[tuple(key) if isinstance(key, list) else key for key in chain] for chain in ended[2]]
    return EpisodeReply(codec.unpack_records(records), trajectory, chains)


def _pack_value(value: Any, columns: codec.Columns) -> codec.Plain:
    """Return a value of a workflow's dict beside its tokens: tensors, arrays, and what holds them."""
    if value is None or isinstance(value, bool | int | float | str):
        return "value", value
    if isinstance(value, dict):
        return "dict", [(_pack_value(key, columns), _pack_value(each, columns)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return "list" if isinstance(value, list) else "tuple", [_pack_value(each, columns) for each in value]
    if isinstance(value, np.generic):
        return "value", value.item()
    if isinstance(value, bytes):
        columns.append(value)
        return "bytes", len(columns) - 1
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        columns.append(value.tobytes())
        return "array", (value.dtype.str, value.shape, len(columns) - 1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        columns.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return "tensor", (str(value.dtype).removeprefix("torch."), tuple(value.shape), len(columns) - 1)
    raise TypeError(
        f"the workflow's dict holds a {type(value).__name__}, which a worker cannot send: return tensors, arrays, "
        "numbers, texts, and lists and dicts of them, or set rollout.workers: 1"
    )


def _read_value(plain: codec.Plain, columns: codec.ReadColumns) -> Any:
    kind, value = plain
    if kind == "value":
        return value
    if kind == "dict":
        return {_read_value(key, columns): _read_value(each, columns) for key, each in value}
    if kind in ("list", "tuple"):
        made = [_read_value(each, columns) for each in value]
        return made if kind == "list" else tuple(made)
    if kind == "bytes":
        return bytes(columns[value])
    dtype, shape, number = value
    if kind == "array":
        return np.frombuffer(columns[number], dtype).reshape(shape)
    import torch

    data = columns[number]
    return (
        torch.frombuffer(data, dtype=torch.uint8).view(_torch_dtype(dtype)).reshape(shape)
        if data
        else torch.empty(shape, dtype=_torch_dtype(dtype))
    )


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return dtype


def read_report(body: bytes | memoryview) -> tuple[Any, ...]:
    """Return a worker's message: its kind and arguments.

    A group's end stays packed, with its arrays as the last argument: an error in it belongs to the group.
    """
    (kind, *arguments), columns = decode_reply(body)
    if kind == "generate":
        *where, (rid, gconfig, top_logprobs, agent, streams, prefix) = arguments
        ids = array("i", bytes(columns[0])).tolist()
        place = None if prefix is None else (prefix[0], prefix[1], prefix[2])
        return kind, *where, CallRequest(rid, _gconfig(gconfig), top_logprobs, agent, streams, place, ids)
    if kind == "ended":
        return kind, *arguments, columns
    if kind == "log":
        return kind, logging.makeLogRecord(arguments[0])
    return kind, *arguments


@lru_cache(256)
def _gconfig(text: str) -> GenerationHyperparameters:
    return _GCONFIG.validate_json(text)
