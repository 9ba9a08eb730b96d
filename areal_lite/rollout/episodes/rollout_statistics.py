"""Costs of pacing and its fairness: tokens thrown away, seconds waited, slow groups among the trained."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from areal_lite.api.trajectory import EpisodeStatus, Group

WINDOW = 4096
"""Number of latest groups that the shares cover."""
MAX_REASONS = 32
"""Distinct reasons of rejections that are counted apart."""
MAX_REASON = 60
"""Characters of a reason."""


class RolloutStatistics:
    def __init__(self) -> None:
        self.discarded_tokens = 0
        """Sampled tokens that will not train because they grew too old."""
        self.trained_tokens = 0
        """Trained tokens handed to the trainer."""
        self.waited_for_oldest_s = 0.0
        """Seconds a full batch waited for groups that the next one would have found too old."""
        self.rejected: Counter[str] = Counter()
        """Rejected groups by reason, in the form of a metric's name."""
        self._drawn: deque[float] = deque(maxlen=WINDOW)
        self._trained: deque[float] = deque(maxlen=WINDOW)

    def group_ended(self, group: Group) -> None:
        """Count a group that ran to its end, with any status."""
        self._drawn.append(group.run_s)
        if group.status is EpisodeStatus.REJECTED:
            self._count_rejected(group.rejection or "")

    def train(self, groups: Sequence[Group]) -> None:
        self._trained.extend(group.run_s for group in groups)
        self.trained_tokens += sum(sequence.num_trained_tokens for g in groups for sequence in g.sequences)

    def discard(self, stale: Sequence[Group], *, masked_tokens: int) -> None:
        """Count what was too old for a batch: whole groups, and tokens masked in others."""
        stale_tokens = sum(trajectory.num_sampled_tokens for g in stale for trajectory in g.trajectories)
        self.discarded_tokens += stale_tokens + masked_tokens
        for _ in stale:
            self._count_rejected("stale")

    def _count_rejected(self, rejection: str) -> None:
        reason = re.sub(r"[^a-z0-9]+", "_", rejection.lower())[:MAX_REASON].strip("_")
        self.rejected[reason if reason in self.rejected or len(self.rejected) < MAX_REASONS else "other"] += 1

    def metrics(self) -> dict[str, float]:
        """Return all metrics by name; the shares only once there are enough groups for quartiles."""
        shares = trained_shares(self._drawn, self._trained)
        return {
            "discarded_tokens": float(self.discarded_tokens),
            "waited_for_oldest_s": self.waited_for_oldest_s,
            **{f"trained_share_q{quartile}": share for quartile, share in enumerate(shares, 1)},
            **{f"rejected/{reason}": float(count) for reason, count in self.rejected.items()},
        }


def trained_shares(drawn_s: Sequence[float], trained_s: Sequence[float]) -> list[float]:
    """Return the share of trained groups in each quartile of the drawn groups' durations, from the seconds that each
    ran: 0.25 if durations do not affect what trains. Empty if fewer than 4 groups were drawn, or none trained."""
    if len(drawn_s) < 4 or not trained_s:
        return []
    edges = np.quantile(np.array(drawn_s), [0.25, 0.5, 0.75])
    counts = np.bincount(np.searchsorted(edges, np.array(trained_s)), minlength=4)
    return [float(share) for share in counts / counts.sum()]
