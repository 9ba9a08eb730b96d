"""What a rollout worker sends: calls and ended groups as JSON values, with arrays as bytes beside them.

The run's process has no use for it: it reads them with :mod:`areal_lite.rollout.workers.messages`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure
from areal_lite.api.image_span import plain_images
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.trajectory import RECORDED
from areal_lite.api.turn_tree import call_key, turn_sources
from areal_lite.rollout.workers.messages import FIELDS, GCONFIG, Columns, EpisodeReply, Place

_JSON = {type(None), bool, int, float, str}


def pack_call(request: ModelRequest, ids: list[int], place: Place | None) -> tuple[Any, Columns]:
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
