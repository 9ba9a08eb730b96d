"""The episode that the running code belongs to, and what it records there: a contextvar, isolated between episodes."""

from collections.abc import Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from areal_lite.api.failure import Failure
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import RECORDED, EpisodeStatus, Recorded, TaskId, Trajectory
from areal_lite.api.turn_tree import unfinished_trajectory


@dataclass(slots=True, eq=False)
class Episode(Recorded):
    """A running episode, a :class:`Trajectory` at its end: records, model calls, and what the engine needs for them."""

    member_idx: int = 0
    calls: list[ModelResponse] = field(default_factory=list)
    """Answers in the order they came."""
    trajectory: Trajectory | None = None
    """Set when it has ended."""
    seed_name: str | None = None
    """Separates the seeds of its model calls from those of other episodes; None leaves seeds to the server."""
    num_calls: int = 0
    oldest_version: int | None = None
    """Policy version at its first model call: none of its tokens can be older. None before it."""
    recorded: dict[int, list[ModelResponse]] = field(default_factory=dict)
    """Answers of an earlier, stopped run of this episode, by length of their prompt: reused instead of sampled."""
    interrupted: bool = False
    """True while it is being stopped: its calls keep their tokens and never return."""
    server: Any = None
    task: Any = None
    """The task that runs its code on this event loop; None before and after."""
    error: BaseException | None = None
    """The error that :meth:`fail` ends it with."""

    def record(self, answer: ModelResponse) -> None:
        """Reuse ``answer`` where a call has its prompt."""
        self.recorded.setdefault(answer.input_len, []).append(answer)

    def fail(self, error: BaseException) -> None:
        """End its code with ``error``, which came up where none of its tasks gets it, as in a callback; on its loop."""
        if self.task is not None and self.error is None:
            self.error = error
            self.task.cancel()

    def end(self, status: EpisodeStatus, failure: Failure | None = None) -> Trajectory:
        """End the episode without data, unless it has already ended, and return its trajectory."""
        if self.trajectory is None:
            calls = [*self.calls, *(answer for answers in self.recorded.values() for answer in answers)]
            self.trajectory = unfinished_trajectory(calls, member_idx=self.member_idx, status=status)
            self.trajectory.failure = failure
        if self.trajectory.counts is not self.counts:
            for name in RECORDED:
                setattr(self.trajectory, name, getattr(self, name))
        return self.trajectory


class EpisodeContext(NamedTuple):
    """An episode's place in the run."""

    is_eval: bool = False
    task_id: TaskId | None = None
    """Id of the submission; None outside an episode."""
    group_id: str | None = None
    """Group whose rewards are this episode's baseline."""
    member_idx: int = 0
    """Place of this episode in its group, from 0."""
    version: int = 0
    """Policy version when the group started."""
    episodes: list[Episode] | None = None
    """All episodes of the group, by ``member_idx``."""
    episode: Episode | None = None
    """This episode; the engine records its model calls there."""
    shared: SharedResources | None = None
    """Objects that all episodes of the engine share; None outside an engine."""
    reward_key: str | None = None
    """Part of a reward that is the reward, in a workflow of a run with ``rollout.rewards.key``."""
    agent: Any = None
    """How an agent reaches its model (``agents.isolation.agent_access.AgentAccess``); None in a workflow."""


_OUTSIDE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_lite_episode", default=_OUTSIDE)

current = _current.get
"""Return the running task's context; an empty one outside an episode."""

enter = _current.set
"""Set the running task's context; returns what :data:`leave` takes."""

leave = _current.reset


def of(context: Context) -> EpisodeContext:
    """Return the episode context of code that runs in ``context``."""
    return context.get(_current, _OUTSIDE)


def record_counts(counts: Mapping[str, float]) -> None:
    """Keep numbers in the running episode's record, and their means in the run's metrics."""
    if (episode := current().episode) is not None:
        episode.counts |= counts


def record_reward_facts(facts: Mapping[str, float | str | None]) -> None:
    """Keep what a reward function said beside its reward in the running episode's record, if there is one."""
    if (episode := current().episode) is not None:
        episode.reward_extra |= facts


def record_scalars(values: Mapping[str, float]) -> None:
    """Record numbers of the running episode, by metric name. TypeError or ValueError if a value is not a number,
    RuntimeError outside an episode, for example in a reward function's worker process."""
    if (episode := current().episode) is None:
        raise RuntimeError(
            f"{', '.join(values)} cannot be recorded here: metrics belong to a running episode. Record them in "
            "arun_episode() or run(), not in a reward function, which runs in another process"
        )
    episode.scalars += [(name, float(value)) for name, value in values.items()]
