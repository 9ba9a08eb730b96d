"""How an episode ends: its status, its record of model calls, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_lite.api.io_struct import ModelResponse

TaskId = int | str


class EpisodeStatus(StrEnum):
    """The four ends of an episode; each episode has exactly one."""

    ACCEPTED = "accepted"
    """Trains."""
    REJECTED = "rejected"
    """Finished, but refused by the workflow, by the filter, or as stale."""
    FAILED = "failed"
    """Broken by our or the world's fault; the cause is in ``error``."""
    CANCELLED = "cancelled"
    """Stopped by us."""


@dataclass(slots=True)
class MemberRecord:
    """What one episode of a group did; its model calls in order."""

    sample_idx: int = 0
    turns: list[ModelResponse] = field(default_factory=list)
    status: EpisodeStatus | None = None
    """None while it runs."""
    error: str | None = None
    num_rows: int = 0
    """Rows it has in the group's tensor dict."""
    server: Any = None
    """The engine's note of which server its calls go to."""
    seed_name: str | None = None
    """What tells its model calls' seeds from those of other episodes; None leaves seeds to the server."""
    num_calls: int = 0
    """Model calls it has begun."""
    recorded: dict[tuple[int, ...], list[ModelResponse]] = field(default_factory=dict)
    """Answers an earlier, stopped run of this episode was given, by prompt; they are given again, not sampled."""
    interrupted: bool = False
    """Whether the episode is being stopped: its calls end with what they have and return no more."""


@dataclass(slots=True, kw_only=True)
class EpisodeResult:
    """What a submission left behind: one row's group of episodes.

    ``trajectory`` is the tensor dict of :mod:`areal_lite.api.tensor_dict` (dicts of interactions are
    converted); None where the episode left none. Only accepted ones train.
    """

    task_id: TaskId
    group_id: str
    status: EpisodeStatus
    data: Mapping[str, Any]
    """What the workflow got."""
    samples: list[Any] = field(default_factory=list)
    """The group as the data source handed it out; empty for a row that was submitted by hand."""
    trajectory: dict[str, Any] | None = None
    error: str | None = None
    """Cause of a failure, or why it was rejected."""
    is_eval: bool = False
    start_order: int = 0
    """Place in the order episodes were started in."""
    start_version: int = 0
    """Policy version when the episode started."""
    head_version: int | None = None
    """Version of the oldest trained token."""
    tail_version: int | None = None
    """Version of the newest trained token."""
    members: list[MemberRecord] = field(default_factory=list)
    queued_s: float = 0.0
    """Seconds from submission to start."""
    run_s: float = 0.0
    """Seconds from start to end."""
    finished_at: float = 0.0
    """Wall clock, seconds since the epoch."""

    @property
    def rewards(self) -> list[float]:
        """Reward of each row of the trajectory; empty without one."""
        rewards = (self.trajectory or {}).get("rewards")
        return [] if rewards is None else [float(r) for r in rewards.tolist()]
