"""When the next episode may start: a pure state machine over concurrency, staleness and pause.

It counts groups and owns no task; ask again after every change. Counting alone does not bound staleness (a slow
episode can be overtaken); it is back-pressure. The guarantee is in :mod:`areal_lite.rollout.episodes.batch_cut`.
"""

from dataclasses import dataclass, field
from areal_lite.errors import ConfigError
from areal_lite.rollout.episodes.lookahead import Lookahead


@dataclass(slots=True)
class AdmissionGate:
    """Capacity as in AReaL: ``min(concurrency - running, (bound + version + 1) * batch + extra - taken)``. Groups of a
    data source start later: just in time for the trainer (:class:`Lookahead`)."""

    max_concurrent: int | None  # maximum groups running at once; None sets no limit
    max_staleness: int
    batch_size: int  # groups in one training batch
    extra: int = 0  # groups that may be started beyond what the batches need
    cut: bool = False  # True once a version's batch was cut, until the next is requested: only ``lookahead`` may run
    version: int = 0
    paused: bool = False
    held: bool = False  # True while too many ended groups wait for the disk, or it failed
    running: int = 0  # groups running now, evaluation included
    taken: int = 0  # training groups that run, or ended accepted and were not given back as stale
    lookahead: Lookahead = field(init=False)  # groups of a data source that may start before the batch that needs them

    def __post_init__(self) -> None:
        self.lookahead = Lookahead(batch_size=self.batch_size, max_staleness=self.max_staleness)

    def refuse_paused(self) -> None:
        if self.paused:
            raise ConfigError("the engine is paused, so no episode could start: call resume() first")

    def may_start(self) -> bool:
        """Return whether a group outside the staleness bound (evaluation, rollout_batch) may start."""
        return not self.paused and not self.held and (self.max_concurrent is None or self.running < self.max_concurrent)

    def may_start_training(self) -> bool:
        """Return whether a group may start whose result waits for a training step."""
        return self.may_start() and self.taken < self._limit

    def may_start_ahead(self, ahead: int) -> bool:
        """Return whether a data source may start a group while ``ahead`` of its groups run or wait."""
        wanted = 0 if self.cut else self.batch_size
        return self.may_start_training() and ahead < wanted + self.lookahead.groups + self._extra

    @property
    def _limit(self) -> int:
        return (self.max_staleness + self.version + 1) * self.batch_size + self._extra

    @property
    def _extra(self) -> int:
        return 0 if self.cut and self.max_staleness == 0 else self.extra

    def start(self, *, training: bool) -> None:
        self.running += 1
        self.taken += training

    def end(self, *, training: bool, accepted: bool) -> None:
        """Count a group that ended; only accepted training groups stay counted."""
        self.running -= 1
        if training and not accepted:
            self.taken -= 1
        assert self.running >= 0 and self.taken >= 0

    def give_back(self) -> None:
        """Stop counting an accepted group that will not train."""
        self.taken -= 1
        assert self.taken >= 0

    def set_version(self, version: int) -> None:
        """Set the policy version. Each counts as a batch, even if none was drawn (a resumed run, a skipped step);
        otherwise the gate would admit groups that are sure to grow stale."""
        self.version, self.cut = version, False
        self.taken = max(self.taken, version * self.batch_size)

    def describe(self) -> str:
        """Return the state in words, for the error of a wait that took too long or would never end."""
        if self.paused:
            return "the engine is paused: call resume()"
        if self.held:
            return "too many ended groups wait to be dumped: use a faster disk, or dump_to_file: false"
        if self.taken >= self._limit:
            return (
                f"{self.taken} groups were started for version {self.version}, all that max_head_offpolicyness="
                f"{self.max_staleness} and consumer_batch_size={self.batch_size} allow: call set_version() after a "
                "weight update, or raise them"
            )
        return f"{self.running} groups are running"
