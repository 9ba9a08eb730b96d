"""Counts each group and passes it on to be dumped, once, when its end is final; its failures; and what pacing costs.

An accepted group is not final when its episodes end: a batch may find it too old, or its source may take it back. So
the executor passes what nobody waits for at once, and accepted groups of a data source only when their batch is cut.
"""

import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
import numpy as np
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId, scope_name
from areal_lite.rollout.episodes.batch_cut import STALE
from areal_lite.rollout.episodes.group_runner import FILTERED, NO_RESULT

WINDOW = 4096  # number of latest groups that the shares cover
MAX_REASONS = 32  # distinct reasons of rejections that are counted apart
MAX_REASON = 60  # characters of a reason
MAX_CAUSES = 1000  # distinct causes that are kept; more are counted by kind alone
MAX_SHORT = 60  # characters of a cause on a progress line
PASSING = frozenset({FailureKind.ENGINE, FailureKind.DEADLINE})  # kinds that a run started again may not have
_FIXES = {
    NO_RESULT: "return a number from run(): None rejects the episode",
    FILTERED: "loosen the filter",
    STALE: "raise rollout.max_head_offpolicyness",
}


def advice(reasons: Iterable[str]) -> str:
    """Return what to do about groups that were not accepted, by their reasons in words."""
    known = [next((start for start in _FIXES if reason.startswith(start)), "") for reason in reasons]
    return "; ".join(_FIXES.get(start, "look at the dump for their errors") for start in dict.fromkeys(known))


class EndedGroups:
    """Figures of the groups that have ended; ``on_end`` gets each final group once, and must not raise or block."""

    def __init__(self, on_end: Callable[[Group], None]) -> None:
        self.on_end = on_end
        self.counts: Counter[str] = Counter(dict.fromkeys(EpisodeStatus, 0))  # number of ended groups by status
        self.statistics = RolloutStatistics()
        self.failures = FailureTally()
        self.scalars = Scalars()  # numbers that the episodes of accepted groups recorded
        self.unclaimed: set[TaskId] = set()  # groups of batches that never reached their caller; counted and dumped

    def close(self, group: Group) -> None:
        if group.task_id in self.unclaimed:
            self.unclaimed.remove(group.task_id)
            return
        self.counts[group.status] += 1
        self.failures.add(group)
        if group.status is EpisodeStatus.ACCEPTED:
            self.scalars.add(group)
        self.on_end(group)

    def close_batch(self, batch: Sequence[Group]) -> None:
        """Count the groups of a batch as trained, and close them."""
        self.statistics.train([group for group in batch if group.task_id not in self.unclaimed])
        for group in batch:
            self.close(group)


class RolloutStatistics:
    def __init__(self) -> None:
        self.discarded_tokens = 0  # sampled tokens that will not train because they grew too old
        self.trained_tokens = 0  # trained tokens handed to the trainer
        self.waited_for_oldest_s = 0.0  # seconds a full batch waited for groups that are too old for the next one
        self.rejected: Counter[str] = Counter()  # rejected groups by reason, in the form of a metric's name
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
        self.discarded_tokens += masked_tokens + sum(one.num_sampled_tokens for g in stale for one in g.trajectories)
        for _ in stale:
            self._count_rejected("stale")

    def _count_rejected(self, rejection: str) -> None:
        reason = re.sub(r"[^a-z0-9]+", "_", rejection.lower())[:MAX_REASON].strip("_")
        self.rejected[reason if reason in self.rejected or len(self.rejected) < MAX_REASONS else "other"] += 1

    def metrics(self) -> dict[str, float]:
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


class FailureTally:
    """Failed episodes by kind and one-line summary, with an example of each."""

    def __init__(self) -> None:
        self.episodes: Counter[FailureKind] = Counter()  # failed episodes by kind
        self._causes: Counter[tuple[FailureKind, str]] = Counter()
        self._examples: dict[tuple[FailureKind, str], Failure] = {}

    def add(self, group: Group) -> None:
        failures = [t.failure for t in group.trajectories if t.status is EpisodeStatus.FAILED and t.failure is not None]
        if not failures and group.status is EpisodeStatus.FAILED and group.failure is not None:
            failures = [group.failure]
        for failure in failures:
            self.episodes[failure.kind] += 1
            cause = failure.kind, failure.summary
            if cause not in self._examples and len(self._examples) >= MAX_CAUSES:
                cause = failure.kind, "other causes"
            self._causes[cause] += 1
            self._examples.setdefault(cause, failure)

    def metrics(self) -> dict[str, float]:
        """Return ``failed_episodes`` and ``failed_episodes/KIND`` of each kind that occurred."""
        by_kind = {f"failed_episodes/{kind}": float(count) for kind, count in self.episodes.items()}
        return {"failed_episodes": float(self.episodes.total()), **by_kind}

    def top_cause(self) -> str:
        """Return the most common kind with the beginning of its most common cause; empty without failures."""
        if not self.episodes:
            return ""
        ((kind, _),) = self.episodes.most_common(1)
        causes = [(count, summary) for (each, summary), count in list(self._causes.items()) if each is kind]
        return f"{kind}, {max(causes)[1][:MAX_SHORT]}"

    def table(self, limit: int = 10) -> str:
        """Return the causes as lines of text, with the traceback of the most common one; empty without failures."""
        if not self._causes:
            return ""
        total = self.episodes.total()
        lines = [f"{total} episode{'s' if total > 1 else ''} failed:"]
        common = self._causes.most_common(limit)
        lines += [f"{count:>8}  {kind:<16}  {summary}" for (kind, summary), count in common]
        if len(self._causes) > limit:
            lines.append(f"          and {len(self._causes) - limit} other causes")
        if example := self._examples[common[0][0]].traceback.rstrip():
            lines += ["An example of the first:", example]
        return "\n".join(lines)


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
