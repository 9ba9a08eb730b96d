"""Which episode the running code belongs to: one contextvar per task, isolated between episodes."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, NamedTuple

from areal_lite.api.episode import MemberRecord, TaskId


class EpisodeContext(NamedTuple):
    """What an episode may know of its place in the run."""

    is_eval: bool = False
    task_id: TaskId | None = None
    """Id of the submission; None outside an episode."""
    group_id: str | None = None
    """Group whose rewards are this episode's baseline."""
    sample_idx: int = 0
    """Which episode of the group this is, from 0."""
    version: int = 0
    """Policy version when the episode started."""
    members: list[MemberRecord] | None = None
    """The records of the whole group, in the order of sample_idx."""
    member: MemberRecord | None = None
    """This episode's own record; the engine notes its model calls there."""
    http: Any = None
    """The engine's shared HTTP clients."""


_OUTSIDE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_lite_episode", default=_OUTSIDE)

current = _current.get
"""Return the running task's context; an empty one outside an episode."""

enter = _current.set
"""Set the running task's context."""
