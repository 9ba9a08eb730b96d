"""What a feed owes its source, when a wait for a batch ends, and how misses are counted.

A data source whose code fails ends its feed with its own error.
"""

from __future__ import annotations
import asyncio
from collections.abc import Callable
from typing import Any
import pytest
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.row_streams import IterableRows
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, ServerError, StarvationError
from areal_lite.rollout.episodes import row_feed
from areal_lite.rollout.episodes.batch_cut import STALE
from areal_lite.rollout.episodes.row_feed import RowFeed, drop_reason
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import OneTurn
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def runs(*task_ids: int) -> dict[Any, Any]:
    """Return running groups of a feed."""
    return dict.fromkeys(task_ids)


class Lost(Exception):
    """Raised by an agent."""


async def raise_in_tasks() -> None:
    """Fail as an agent with a task group does."""

    async def fail() -> None:
        raise Lost("id 7")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())


def raise_with(message: str) -> None:
    raise Lost(message)


def raise_from_another() -> None:
    try:
        raise_with("id 7")
    except Lost as error:
        raise KeyError("id 8") from error


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda: raise_with("id 7"), "Lost"),
        (lambda: raise_with("id 7:\n  of: a\nlong: b"), "Lost"),
        (lambda: raise_with(""), "Lost"),
        (raise_from_another, "KeyError"),
        (lambda: asyncio.run(raise_in_tasks()), "Lost"),
        (lambda: raise_with("id 7 " * 2000), "Lost"),
    ],
)
def test_failures_are_counted_by_the_type_of_their_exception_whatever_it_says(
    fail: Callable[[], None], kind: str
) -> None:
    with pytest.raises(Exception) as caught:
        fail()
    assert drop_reason(ended("failed", failure=Failure.of(caught.value))) == f"failed: {kind}"


def test_failures_without_an_exception_are_counted_by_kind_and_rejections_by_reason() -> None:
    late = Failure(FailureKind.DEADLINE, "", "the episode ran longer than episode_timeout_s=1")
    assert drop_reason(ended("failed", failure=late)) == "failed: deadline"
    assert drop_reason(ended("rejected", rejection="should_accept_fn said no: too short")).endswith("no: too short")


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["the workflow returned None"], "(1 x the workflow returned None): return a number from run(): None rejects"),
        (["should_accept_fn said no: too short"], "(1 x should_accept_fn said no: too short): loosen the filter"),
        ([STALE], "raise rollout.max_head_offpolicyness"),
        (["failed: KeyError: 'answer'"], "look at the dump for their errors"),
        (["should_accept_fn said no: a", "should_accept_fn said no: b", "failed: E"], "loosen the filter; look at the"),
    ],
)
def test_a_wait_without_a_batch_ends_with_what_helps_against_its_reasons(reasons: list[str], said: str) -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    for reason in reasons:
        feed.count_miss(reason)
    with pytest.raises(StarvationError) as caught:
        feed.check(1)
    assert said in str(caught.value)
    assert ("filter" in str(caught.value).rpartition("):")[2]) == any("said no" in reason for reason in reasons)


def ended(status: str, *, failure: Failure | None = None, rejection: str | None = None, **given: Any) -> Group:
    fields = {"task_id": 1, "group_id": "1", "status": EpisodeStatus(status), "data": {}} | given
    return Group(failure=failure, rejection=rejection, **fields)


class Broken(RolloutDataSource):
    """Takes no group back."""

    def give_back(self, groups: Any) -> None:
        """Fail."""
        raise OSError("no place")

    def drop(self, group: Group, reason: str) -> None:
        """Fail."""
        raise SystemExit("no drop")


@pytest.mark.parametrize(("retries", "message"), [(1, "no place"), (0, "no drop")])
def test_a_source_that_fails_as_a_group_ends_gives_its_error_to_who_waits(
    start_stub: StartStub, start_engine: StartEngine, retries: int, message: str
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, faults={"failed_group_retries": retries})
    source = Broken([{"do": "raise"}])
    with pytest.raises((OSError, RuntimeError), match=message):
        engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 1  # and a restart hands it out again
    assert len(engine.prepare_batch([{}], OneTurn)) == 1


# -- what a feed owes its source ---------------------------------------------------------------------


def drawn(feed: RowFeed, status: str = "accepted", **given: Any) -> Group:
    """Return the feed's next group as it ended."""
    samples = feed.next_group()
    assert samples is not None
    return ended(status, samples=samples, trajectories=[Trajectory(status=EpisodeStatus.ACCEPTED)], **given)


def test_a_batch_is_owed_until_the_next_is_handed_over_and_one_taken_back_stays_owed() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    first, second = [drawn(feed)], [drawn(feed)]
    feed.hand_over(first)
    assert feed.source.num_owed == 2
    feed.hand_over(second)
    assert feed.source.num_owed == 1
    feed.take_back(second)
    feed.mark_trained()
    assert (feed.source.num_owed, feed.finished.groups) == (1, second)


class Marked(RolloutDataSource):
    """Notes each group that is marked as trained."""

    def mark_trained(self, groups: Any) -> None:
        """Note the groups."""
        self.marked = [*getattr(self, "marked", []), *groups]


def test_a_source_hears_once_that_a_batch_was_trained() -> None:
    feed = RowFeed(source := Marked([{}]), retries=0)
    batch = [drawn(feed)]
    feed.hand_over(batch)
    feed.mark_trained()
    feed.hand_over([drawn(feed)])
    assert source.marked == [batch[0].samples]


def test_a_row_that_comes_back_is_drawn_again_though_the_source_had_ended() -> None:
    feed = RowFeed(RolloutDataSourceWithBuffer(IterableRows(iter([{"n": 0}]), SourceSettings())), retries=1)
    failed = drawn(feed, "failed")
    assert feed.next_group() is None
    for give_back in (feed.miss, feed.owe, feed.keep):
        give_back(failed)
        failed = drawn(feed, "failed")
        assert failed.samples[0].row == {"n": 0}
        assert feed.next_group() is None


def test_an_error_stops_the_drawing_and_reaches_who_waits_even_with_a_full_batch() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    feed.accept(ended("accepted"))
    feed.error = error = ConfigError("broken")
    assert feed.next_group() is None and feed.source.num_owed == 0
    assert feed.ready(2, 10)()
    with pytest.raises(ConfigError) as caught:
        feed.check(1)
    assert caught.value is error


def test_a_failed_row_is_retried_as_often_as_allowed_and_then_dropped() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=2)
    attempts = []
    for _ in range(3):
        failed = drawn(feed, "failed")
        attempts.append(failed.samples[0].attempts)
        feed.miss(failed)
    assert (attempts, feed.source.dropped.total()) == ([0, 1, 2], 1)


def test_groups_that_run_and_groups_that_wait_are_ahead() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    feed.running = runs(1, 2)
    feed.accept(ended("accepted"))
    assert feed.ahead == 3


# -- when a wait ends --------------------------------------------------------------------------------


async def wakes(feed: RowFeed, act: Callable[[], object], *, count: int = 1) -> bool:
    """Return whether the wait for a batch, which goes on before, is over after ``act``."""
    waiter = asyncio.create_task(feed.finished.until(feed.ready(count, 2)))
    await asyncio.sleep(0)
    assert not waiter.done()
    act()
    await asyncio.sleep(0)
    over = waiter.done()
    waiter.cancel()
    return over


def woken(feed: RowFeed, act: Callable[[], object], *, count: int = 1) -> bool:
    return asyncio.run(wakes(feed, act, count=count))


def test_a_wait_ends_with_the_source_once_no_group_runs() -> None:
    for running in (1, 0):
        feed = RowFeed(RolloutDataSourceWithBuffer(IterableRows(iter([]), SourceSettings())), retries=0)
        feed.running = runs(*range(running))
        assert woken(feed, feed.next_group) is not bool(running)
    with pytest.raises(ConfigError, match="has no rows, fewer than consumer_batch_size=2"):
        feed.check(2)


def test_a_batch_stops_waiting_for_its_oldest_group_when_that_one_is_stopped() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    oldest = drawn(feed, "cancelled", task_id=7)
    feed.running = runs(7)
    feed.wait_for_oldest({7: 3}, 3)
    feed.accept(ended("accepted", start_version=4))

    def stop() -> None:
        feed.ended(oldest)
        feed.keep(oldest)

    assert woken(feed, stop)


def test_misses_in_a_row_end_a_wait_and_stale_groups_count_even_between_accepted_ones() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    ready = feed.ready(9, 2)
    feed.count_miss("refused")
    feed.accept(ended("accepted"))
    assert not woken(feed, lambda: feed.count_miss("refused"), count=9)
    feed.accept(ended("accepted"))
    feed.owe(drawn(feed))
    feed.accept(ended("accepted"))
    assert not ready()
    assert woken(feed, lambda: feed.owe(drawn(feed)), count=9)
    with pytest.raises(StarvationError, match=r"no batch of 9 groups: 2 groups .* \(2 x stale"):
        feed.check(9)
    assert not ready()  # the next wait counts anew
    feed.owe(drawn(feed))
    feed.check(1)
    feed.hand_over([])  # a batch was cut
    assert not woken(feed, lambda: feed.owe(drawn(feed)), count=9)


@pytest.mark.parametrize(
    ("before", "kinds", "may_pass"),
    [
        ([], [FailureKind.ENGINE, FailureKind.DEADLINE], True),
        ([], [FailureKind.ENGINE, FailureKind.AGENT], False),
        ([], [FailureKind.ENGINE, None], False),
        ([], [], False),
        (["accept"], [FailureKind.ENGINE], True),
        (["hand over"], [FailureKind.ENGINE], True),
        (["check"], [FailureKind.ENGINE], True),
    ],
)
def test_a_run_without_training_data_may_succeed_later_if_only_servers_failed_since_the_last_accepted_group(
    before: list[str], kinds: list[FailureKind | None], may_pass: bool
) -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)

    def miss(kind: FailureKind | None) -> None:
        feed.miss(drawn(feed, "failed" if kind else "rejected", failure=kind and Failure(kind, "", "")))

    if before:
        miss(FailureKind.AGENT)
    if before == ["accept"]:
        feed.accept(ended("accepted"))
    elif before == ["hand over"]:
        feed.hand_over([])
    elif before:
        with pytest.raises(StarvationError):
            feed.check(9)
    for kind in kinds:
        miss(kind)
    with pytest.raises(StarvationError) as caught:
        feed.check(9)
    assert (caught.value.exit_code == ServerError.exit_code) is may_pass


def test_a_batch_waits_until_the_last_of_its_oldest_groups_has_ended() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    feed.running = runs(7, 8)
    feed.accept(ended("accepted", start_version=9))
    feed.wait_for_oldest({7: 3, 8: 3}, 3)
    feed.ended(ended("accepted", task_id=7))
    assert not feed.ready(1, 10)()
    feed.ended(ended("accepted", task_id=8))
    assert feed.ready(1, 10)()


class Clock:
    """Seconds that a test sets."""

    now = 1.0

    def monotonic(self) -> float:
        return self.now


def test_the_wait_for_the_oldest_counts_from_the_full_batch_of_this_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(row_feed, "time", clock)
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    feed.running = runs(7, 8)
    ready = feed.ready(1, 10)
    feed.wait_for_oldest({7: 3}, 3)
    clock.now = 2.0
    assert not ready()  # nothing has finished
    feed.accept(ended("accepted", start_version=4))
    for clock.now in (10.0, 11.0, 12.0):
        assert not ready()
    feed.wait_for_oldest({7: 3}, 3)  # the caller of before has left
    for clock.now in (20.0, 21.0):
        assert not ready()
    feed.ended(ended("accepted", task_id=7))
    clock.now = 25.0
    assert ready() and feed.waited_for_oldest_s == 5.0
    clock.now = 30.0
    assert ready() and feed.waited_for_oldest_s == 5.0


def test_a_new_count_of_running_groups_forgets_those_it_does_not_name() -> None:
    feed = RowFeed(RolloutDataSource([{}]), retries=0)
    feed.running = runs(7, 8)
    feed.accept(ended("accepted", start_version=9))
    feed.wait_for_oldest({7: 3}, 3)
    feed.wait_for_oldest({}, 3)
    feed.oldest_groups.add_running(8, 3)
    feed.ended(ended("accepted", task_id=7))
    assert not feed.ready(1, 10)()
