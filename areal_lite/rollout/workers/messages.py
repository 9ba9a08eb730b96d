"""Messages between the run and a rollout worker (:mod:`areal_lite.processes.channel` has the framing).

Towards the worker, a message is a pickled tuple. From the worker, it is plain data: its kind and arguments, and arrays
as bytes. :func:`read_report` makes our types of it and nothing else, so the run never loads an object that an episode
made. An episode's model calls are not sent back: the run made them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from areal_lite.api import record_codec as codec
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.trajectory import RECORDED, Trajectory
from areal_lite.api.turn_tree import call_key, link_turns, turn_sources
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.processes.channel import MessageSplitter, decode_reply, framed

REPORTS = frozenset({"ready", "generate", "drop", "ended", "blocked", "log"})
"""Kinds of messages from a worker."""
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


Place = tuple[int, int, int]
"""A prompt's :class:`TokenPrefix`: number of its list of ids in the group, ``length``, ``num_accepted``."""


def pack_call(request: ModelRequest, ids: list[int], place: Place | None) -> tuple[Any, codec.Columns]:
    """Return a model call. ``ids`` are those of its prompt that its group has not sent before; the prompt if ``place``
    is None, as outside a group. ``metadata["agent"]`` must have a JSON form."""
    gconfig = _GCONFIG.dump_json(request.gconfig).decode()
    agent, streams = request.metadata.get("agent"), request.on_tokens is not None
    return (request.rid, gconfig, request.top_logprobs, agent, streams, place), [array("i", ids).tobytes()]


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


def pack_end(was_stopped: bool, failure: Failure | None, episodes: Iterable[Episode]) -> tuple[Any, codec.Columns]:
    """Return the end of a group as plain data and bytes; a TypeError for what no process can send."""
    columns: codec.Columns = []
    return codec.to_plain((was_stopped, failure, [_reply(episode) for episode in episodes]), columns), columns


def read_end(plain: Any, columns: codec.ReadColumns) -> tuple[bool, Failure | None, list[EpisodeReply]]:
    """Return whether a cancellation ended the group, why it failed, and a reply per episode, if it could send them."""
    was_stopped, failure, replies = codec.from_plain(plain, columns)
    return was_stopped, failure, [EpisodeReply(*reply) for reply in replies]


def _reply(episode: Episode) -> EpisodeReply:
    chains, _ = (episode.trajectory and turn_sources(episode.trajectory)) or ((), ())
    return EpisodeReply(
        records={name: getattr(episode, name) for name in RECORDED},
        trajectory=episode.trajectory,
        chains=[[call_key(call) for call in chain] for chain in chains],
    )


def read_report(body: bytes | memoryview) -> tuple[Any, ...]:
    """Return a worker's message: its kind and arguments.

    A group's end stays packed, with its arrays as the last argument: an error in it belongs to the group.
    """
    (kind, *arguments), columns = decode_reply(body)
    if kind == "generate":
        *where, (rid, gconfig, top_logprobs, agent, streams, place) = arguments
        request = ModelRequest(
            input_ids=array("i", bytes(columns[0])).tolist(),
            gconfig=_gconfig(gconfig),
            rid=rid,
            metadata={} if agent is None else {"agent": agent},
            top_logprobs=top_logprobs,
        )
        return kind, *where, request, streams, place
    if kind == "ended":
        return kind, *arguments, columns
    if kind == "log":
        return kind, logging.makeLogRecord(arguments[0])
    return kind, *arguments


@lru_cache(256)
def _gconfig(text: str) -> GenerationHyperparameters:
    return _GCONFIG.validate_json(text)
