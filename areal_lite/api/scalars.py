"""Numbers that workflows record while their episodes run; their means become metrics of the run."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from areal_lite.api import episode_context


class Scalars:
    """Recorded values by metric name, apart for training and evaluation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}

    def add(self, values: Mapping[str, float], *, is_eval: bool) -> None:
        """Record one value of each name."""
        numbers = {name: float(value) for name, value in values.items()}
        with self._lock:
            for name, number in numbers.items():
                self._values[is_eval].setdefault(name, []).append(number)

    def take(self, *, is_eval: bool) -> dict[str, float]:
        """Return the mean of each name since the last call, and forget the values."""
        with self._lock:
            values, self._values[is_eval] = self._values[is_eval], {}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def scope_name(is_eval: bool) -> str:
    """Return the folder and metric scope of training or evaluation episodes."""
    return "eval-rollout" if is_eval else "rollout"


def record_counts(counts: Mapping[str, float]) -> None:
    """Keep numbers in the running episode's record, and their means in the run's metrics."""
    context = episode_context.current()
    if context.episode is not None:
        context.episode.counts |= counts
    if context.scalars is not None:
        scope = scope_name(context.is_eval)
        context.scalars.add({f"{scope}/{name}": value for name, value in counts.items()}, is_eval=context.is_eval)


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
    context = episode_context.current()
    if context.scalars is None:
        raise RuntimeError(
            f"{', '.join(values)} cannot be recorded here: metrics belong to a running episode. Record them in "
            "arun_episode() or run(), not in a reward function, which runs in another process"
        )
    context.scalars.add(values, is_eval=context.is_eval)
