"""Failed episodes are counted once each, by kind and cause, with an example."""

from __future__ import annotations
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.rollout.episodes import ended_groups
from areal_lite.rollout.episodes.ended_groups import FailureTally


def failure(message: str, kind: FailureKind = FailureKind.AGENT) -> Failure:
    return Failure(kind, "ValueError", message, traceback=f"Traceback of {message}\n")


def group(*members: Failure | None, failed: Failure | None = None) -> Group:
    """Return a group whose members failed, or were accepted (None)."""
    ended = [
        Trajectory(
            member_idx=i,
            status=EpisodeStatus.FAILED if member else EpisodeStatus.ACCEPTED,
            made_turns=[],
            failure=member,
        )
        for i, member in enumerate(members)
    ]
    status = EpisodeStatus.FAILED if failed else EpisodeStatus.ACCEPTED
    return Group(task_id=1, group_id="1", status=status, data={}, trajectories=ended, failure=failed)


def test_a_group_counts_its_failed_members_or_as_one_failure_if_it_failed_as_a_whole() -> None:
    tally = FailureTally()
    tally.add(group(None, None))
    assert tally.metrics() == {"failed_episodes": 0.0} and tally.top_cause() == tally.table() == ""
    tally.add(group(failure("no tool"), None, failure("no tool")))
    tally.add(group(failure("late", FailureKind.DEADLINE), failed=failure("a member failed")))
    tally.add(group(failed=failure("no input", FailureKind.DATA)))
    stopped = group(failure("the run ended"))
    stopped.end_as(EpisodeStatus.CANCELLED, failure=failure("the run ended"))
    stopped.trajectories[0].status = EpisodeStatus.CANCELLED
    tally.add(stopped)  # by the run, so it is no failure
    assert tally.metrics() == {
        "failed_episodes": 4.0,
        "failed_episodes/agent": 2.0,
        "failed_episodes/deadline": 1.0,
        "failed_episodes/data": 1.0,
    }
    assert tally.top_cause() == "agent, ValueError: no tool"
    assert tally.table(limit=1).splitlines() == [
        "4 episodes failed:",
        f"{2:>8}  {'agent':<16}  ValueError: no tool",
        "          and 2 other causes",
        "An example of the first:",
        "Traceback of no tool",
    ]
    assert "other causes" not in tally.table(limit=3)


def test_causes_beyond_the_limit_are_counted_together(monkeypatch) -> None:
    monkeypatch.setattr(ended_groups, "MAX_CAUSES", 2)
    tally = FailureTally()
    for message in ("first", "second", "third", "first", "fourth", "fifth"):
        tally.add(group(failure(message)))
    assert [" ".join(line.split()) for line in tally.table().splitlines()[:4]] == [
        "6 episodes failed:",
        "3 agent other causes",
        "2 agent ValueError: first",
        "1 agent ValueError: second",
    ]
