"""Counts failed episodes by cause over a run, for metrics and for the table at its end."""

from __future__ import annotations

from collections import Counter

from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group

MAX_CAUSES = 1000  # distinct causes that are kept; more are counted by kind alone
MAX_SHORT = 60  # characters of a cause on a progress line
PASSING = frozenset({FailureKind.ENGINE, FailureKind.DEADLINE})
"""Kinds that may not occur again when a run is started again."""


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
