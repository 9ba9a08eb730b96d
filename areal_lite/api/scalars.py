"""Numbers that an episode's code records while it runs; the means over accepted episodes are metrics of the run."""

from __future__ import annotations

from collections.abc import Mapping

from areal_lite.api import episode_context


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
