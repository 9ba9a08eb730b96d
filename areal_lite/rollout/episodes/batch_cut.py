"""The cut of a batch within the staleness bound, and which running groups a batch has to wait for.

Invariant: no trained token is older than the bound at the version that its batch is cut for. The gate cannot promise
that: it counts groups, and a slow group may be overtaken by any number of quick ones. Three ways to keep the bound
don't work alone. Dropping what is too old throws away the slow groups, mostly long answers, so that a run learns from
short ones. Waiting for all groups that started before the batch stops generation at the slowest one. Taking the oldest
finished groups first helps only once they have finished.

So a batch takes the oldest first, and waits, but only for running groups that would not fit into any later batch
(:func:`must_wait`). Their number is what decides, not their age: as many may be left over as later batches have room
for before they are too old. A group that is too old nevertheless (a version was skipped, or the wait was cut by a
restart) trains with its older tokens masked, or is drawn again.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from areal_lite.api.trajectory import Group, TaskId

STALE = "stale: older than max_head_offpolicyness allows"


@dataclass(frozen=True, slots=True)
class Cut:
    """A batch within the bound, and the groups too stale to be in it."""

    fresh: list[Group]
    stale: list[Group]
    masked_tokens: int = 0


def cut_batch(
    groups: list[Group], count: int, *, version: int, max_staleness: int, mask_off_policy: bool = False
) -> Cut:
    """Take ``count`` groups within the staleness bound: oldest tokens first, then earliest start. Older ones come out
    as stale, or with ``mask_off_policy`` have the tokens beyond the bound masked; the rest stays in ``groups``, which
    is changed in place. With fewer than ``count`` fresh groups nothing fresh is taken."""
    oldest_version = version - max_staleness
    too_old = [group for group in groups if oldest_version_of(group) < oldest_version] if mask_off_policy else []
    masked_tokens = sum(_mask_older(group, oldest_version) for group in too_old)
    stale = [group for group in groups if oldest_version_of(group) < oldest_version]
    fresh = [group for group in groups if oldest_version_of(group) >= oldest_version]
    fresh.sort(key=lambda group: (oldest_version_of(group), group.start_order))
    taken = fresh[:count] if len(fresh) >= count else []
    groups[:] = fresh[len(taken) :]
    return Cut(taken, stale, masked_tokens)


def _mask_older(group: Group, oldest_version: int) -> int:
    """Mask older tokens, unless none would remain; return how many."""
    kept = [
        (sequence, sequence.versions >= oldest_version) for sequence in group.sequences if sequence.versions is not None
    ]
    before = sum(sequence.num_trained_tokens for sequence, _ in kept)
    after = sum(int((sequence.loss_mask & newer).sum()) for sequence, newer in kept)
    if not after:
        return 0
    for sequence, newer in kept:
        sequence.loss_mask &= newer  # in place: the turns see it
    group.note_versions()
    return before - after


def oldest_version_of(group: Group) -> int:
    """Return the version of its oldest trained token; its first version if no token names one."""
    return group.start_version if group.head_version is None else group.head_version


def must_wait(running: Mapping[int, int], finished: Mapping[int, int], count: int) -> bool:
    """Return True if a batch cut now would leave a running group without room in a later batch.

    A group of slack ``s`` fits into this batch or the next ``s``; after those it is beyond the staleness bound. Groups
    of slack ``s`` or less therefore fit if at most ``s * count`` of them are left over by this batch, which takes the
    finished ones of least slack first. ``running`` and ``finished`` count groups by slack."""
    due = ready = 0
    for slack in sorted({*running, *finished}):
        ready += finished.get(slack, 0)
        due += running.get(slack, 0) + finished.get(slack, 0)
        if min(due - slack * count, count) > ready:
            return True
    return False


class OldestGroups:
    """Groups by slack, the number of later batches that they may still be in; counted anew for each batch."""

    def __init__(self, oldest_allowed: int | None = None) -> None:
        self._oldest_allowed = oldest_allowed
        self._slack: dict[TaskId, int] = {}  # slack by running group
        self._running: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()

    def add_running(self, task_id: TaskId, version: int) -> None:
        if self._oldest_allowed is not None:
            slack = self._slack[task_id] = max(0, version - self._oldest_allowed)
            self._running[slack] += 1

    def remove_running(self, task_id: TaskId) -> None:
        """Forget a group that ended; one that started after the count is not known."""
        if (slack := self._slack.pop(task_id, None)) is not None:
            self._running[slack] -= 1

    def add_finished(self, group: Group) -> None:
        if self._oldest_allowed is not None:
            self._finished[max(0, oldest_version_of(group) - self._oldest_allowed)] += 1

    def hold_up(self, count: int) -> bool:
        """Return True if a batch of ``count`` groups has to wait for a running one."""
        return bool(self._slack) and must_wait(self._running, self._finished, count)
