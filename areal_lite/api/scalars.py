"""Numbers that workflows record while their episodes run; the means over accepted episodes are metrics of the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from areal_lite.api import episode_context
from areal_lite.api.trajectory import EpisodeStatus, Group


class Scalars:
    """Recorded values by metric name, apart for training and evaluation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[bool, dict[str, tuple[float, int]]] = {False: {}, True: {}}

    def add(self, group: Group) -> None:
        """Add what the accepted episodes of a group recorded and counted, and the numbers beside their rewards."""
        scope = scope_name(group.is_eval)
        with self._lock:
            sums = self._sums[group.is_eval]
            for trajectory in group.trajectories:
                if trajectory.status is EpisodeStatus.ACCEPTED:
                    counts = {f"{scope}/{name}": value for name, value in trajectory.counts.items()}
                    facts = {f"{scope}/reward_extra/{name}": value for name, value in trajectory.reward_extra.items()}
                    for name, value in (*trajectory.scalars, *counts.items(), *facts.items()):
                        if isinstance(value, float | int):
                            total, count = sums.get(name, (0, 0))
                            sums[name] = total + value, count + 1

    def take(self, *, is_eval: bool) -> dict[str, float]:
        """Return the mean of each name since the last call, and forget the values."""
        with self._lock:
            sums, self._sums[is_eval] = self._sums[is_eval], {}
        return {name: total / count for name, (total, count) in sums.items()}


def scope_name(is_eval: bool) -> str:
    """Return the folder and metric scope of training or evaluation episodes."""
    return "eval-rollout" if is_eval else "rollout"


def record_counts(counts: Mapping[str, float]) -> None:
    """Keep numbers in the running episode's record, and their means in the run's metrics."""
    if (episode := episode_context.current().episode) is not None:
        episode.counts |= counts


def record_reward_facts(facts: Mapping[str, float | str | None]) -> None:
    """Keep what a reward function said beside its reward in the running episode's record, if there is one."""
    if (episode := episode_context.current().episode) is not None:
        episode.reward_extra |= facts


def record_scalars(values: Mapping[str, float]) -> None:
    """Record numbers of the running episode, by metric name.

    Raises:
        RuntimeError: Outside an episode, for example in a reward function's worker process.
        TypeError, ValueError: If a value is not a number.
    """
    episode = episode_context.current().episode
    if episode is None:
        raise RuntimeError(
            f"{', '.join(values)} cannot be recorded here: metrics belong to a running episode. Record them in "
            "arun_episode() or run(), not in a reward function, which runs in another process"
        )
    episode.scalars += [(name, float(value)) for name, value in values.items()]
