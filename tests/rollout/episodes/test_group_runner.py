"""The life of a group: an id of its own, one end, and nothing kept after it."""

from __future__ import annotations
import asyncio
import gc
import time
import weakref
from typing import Any
import pytest
import torch
from areal_lite.api import InferenceEngine, RolloutWorkflow
from areal_lite.api.trajectory import EpisodeStatus, Group, TaskId, TurnRewards
from areal_lite.config.rollout_config import FaultsConfig
from areal_lite.rollout import workflow_context
from areal_lite.rollout.episodes import group_runner
from areal_lite.rollout.episodes.group_runner import EpisodeRecipe, GroupRunner, Submission
from tests.rollout.scripted import on_a_loop

Ended = list[tuple[Submission, Group]]


class Scripted(RolloutWorkflow):
    """Hangs; ``row["do"]`` says what it does when it is stopped."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        """Hang, or refuse."""
        if data["do"] == "refuse":
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if data["do"] == "raise":
                raise KeyError("while it cleaned up") from None
            if data["do"] == "return":
                return
            raise


def make_runner() -> tuple[GroupRunner, Ended]:
    ended: Ended = []
    engine: Any = None  # no workflow here asks a model
    runner = GroupRunner(engine, FaultsConfig(), on_end=lambda s, group: ended.append((s, group)))
    return runner, ended


def make(
    runner: GroupRunner,
    row: dict[str, Any],
    *,
    task_id: TaskId | None = None,
    seed_name: str | None = None,
    group_size: int = 1,
    **recipe: Any,
) -> Submission:
    return runner.make(
        row,
        EpisodeRecipe(**{"workflow": Scripted()} | recipe),
        group_size,
        deliver=lambda group: None,
        training=True,
        task_id=task_id,
        seed_name=seed_name,
    )


def test_ids_are_fresh_whatever_ids_were_given() -> None:
    runner, _ = make_runner()
    given = [7, None, 3, None, "mine", None]
    assert [make(runner, {}, task_id=one).task_id for one in given] == [7, 8, 3, 9, "mine", 10]


def test_the_seeds_of_a_group_are_named_by_its_id_or_as_the_caller_says() -> None:
    runner, _ = make_runner()
    named = make(runner, {}, task_id=5), make(runner, {}, seed_name="row 3")
    assert [one.episodes[0].seed_name for one in named] == ["task 5", "row 3"]
    runner.number_from(20)
    assert make(runner, {}).episodes[0].seed_name == "task 0"  # as in a first run


@on_a_loop
async def test_a_running_group_alone_has_a_deadline() -> None:
    runner, _ = make_runner()
    waiting, running = make(runner, {"do": "stop"}), make(runner, {"do": "stop"})
    runner.start(running, version=0)
    assert runner.deadline_of(running.task_id) == running.started + 3600
    assert runner.deadline_of(waiting.task_id) is runner.deadline_of("nobody") is None
    await runner.close("closed")


@pytest.mark.parametrize(("blocked_s_ago", "stopped"), [(-60.0, [False, True]), (60.0, [True, True])])
@on_a_loop
async def test_a_deadline_is_put_off_once_if_another_episode_blocked_the_loop(
    blocked_s_ago: float, stopped: list[bool]
) -> None:
    runner, _ = make_runner()
    submission = make(runner, {"do": "stop"})
    runner.start(submission, version=0)
    await asyncio.sleep(0)
    runner.shared.blocked_at = time.monotonic() - blocked_s_ago
    seen = []
    for _ in range(2):
        runner._deadlines.discard(submission)
        runner._on_deadline(submission)
        seen.append(submission.stopped_by is not None)
        assert seen[-1] is not (submission in runner._deadlines.pending())
    assert seen == stopped
    await runner.close("closed")


@pytest.mark.parametrize(
    ("do", "status", "error"),
    [
        ("stop", EpisodeStatus.CANCELLED, "stopped"),
        ("raise", EpisodeStatus.CANCELLED, "stopped"),  # an error of the stop is not the group's own
        ("return", EpisodeStatus.REJECTED, "the workflow returned None"),  # it ended by itself
    ],
)
@on_a_loop
async def test_a_stopped_group_ends_once_with_the_first_reason(do: str, status: EpisodeStatus, error: str) -> None:
    runner, ended = make_runner()
    submission = make(runner, {"do": do})
    runner.start(submission, version=0)
    await asyncio.sleep(0)
    stops = [asyncio.create_task(runner.stop([submission], reason)) for reason in ("stopped", "and again")]
    await asyncio.gather(*stops)
    await runner.close("closed")
    assert [(s, group.status, group.error) for s, group in ended] == [(submission, status, error)]
    assert (runner.live, runner.abandoned) == ({}, 0)


@on_a_loop
async def test_a_group_that_was_left_behind_changes_nothing_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_runner, "CANCEL_GRACE_S", 0)
    release = asyncio.Event()

    class Stubborn(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await release.wait()

    runner, ended = make_runner()
    stubborn = make(runner, {}, task_id="mine", workflow=Stubborn())
    runner.start(stubborn, version=0)
    await asyncio.sleep(0)
    await runner.stop([stubborn], "stopped")
    another = make(runner, {}, task_id="mine")
    release.set()
    assert stubborn.task is not None
    await stubborn.task
    await asyncio.sleep(0)
    assert [(s, group.error) for s, group in ended] == [(stubborn, "stopped")]
    assert (runner.live, runner.abandoned) == ({"mine": another}, 1)


@on_a_loop
async def test_a_filter_sees_the_episode_of_each_sequence() -> None:
    class Forks(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
            count = 1 + workflow_context.get().member_idx
            ones = torch.ones(count, 2, dtype=torch.int32)
            tensors = {"input_ids": ones, "attention_mask": ones, "loss_mask": torch.tensor([[0, 1]] * count)}
            return tensors | {"rewards": torch.arange(1.0, count + 1)}

    seen = []

    def accept(filtered: dict[str, Any]) -> bool:
        seen.append((len(filtered["input_ids"]), filtered["member_idx"], filtered["episode_rewards"]))
        return True

    for by in (TurnRewards(), TurnRewards(discount=0.5), TurnRewards("mean"), TurnRewards("last")):
        runner, ended = make_runner()
        submission = make(runner, {}, workflow=Forks(), group_size=2, should_accept_fn=accept, turn_rewards=by)
        runner.start(submission, version=0)
        assert submission.task is not None
        await submission.task
        await asyncio.sleep(0)
        assert [group.status for _, group in ended] == [EpisodeStatus.ACCEPTED]
        assert ended[0][1].rewards == seen[-1][2][:2]
    second = [3.0, 2.0, 1.5, 2.0]  # of the episode whose turns earned 1 and 2
    assert seen == [(3, [0, 1, 1], [1.0, reward, reward]) for reward in second]


@on_a_loop
async def test_closing_ends_every_group_once_also_one_that_never_started() -> None:
    runner, ended = make_runner()
    made = [make(runner, {"do": "stop"}) for _ in range(4)]
    for submission in made[:2]:
        runner.start(submission, version=0)
    runner.end_waiting(made[2], "not needed")
    await runner.close("closed")
    assert {s.task_id: group.error for s, group in ended if s is not made[3]} == {
        0: "closed",
        1: "closed",
        2: "not needed",
    }
    assert len(ended) == 4 and all(group.status is EpisodeStatus.CANCELLED for _, group in ended)
    assert not runner.live


@on_a_loop
async def test_groups_know_when_they_started_and_are_forgotten_after_their_end() -> None:
    class Row(dict[str, Any]):
        """A dict that a weak reference may watch."""

    runner, ended = make_runner()
    made = [make(runner, Row(do="refuse")) for _ in range(3)]
    for submission, version in ((made[1], 0), (made[0], 0), (made[2], 5)):
        runner.start(submission, version=version)
    await asyncio.wait([submission.task for submission in made if submission.task is not None])
    await asyncio.sleep(0)
    starts = {s.task_id: (group.start_order, group.start_version) for s, group in ended}
    assert starts == {1: (0, 0), 0: (1, 0), 2: (2, 5)}
    rows = [weakref.ref(submission.row) for submission in made]
    del made, submission
    ended.clear()
    gc.collect()
    assert [row() for row in rows] == [None] * 3
    await runner.close("closed")
    closed = weakref.ref(runner)
    del runner
    gc.collect()
    assert closed() is None
