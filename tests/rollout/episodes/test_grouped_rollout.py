"""What the episodes of a group return is merged; rejected ones are left out."""

from __future__ import annotations
import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any
import pytest
import torch
from areal_lite.api import InteractionWithTokenLogpReward
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.errors import ConfigError
from areal_lite.rollout import workflow_context
from areal_lite.rollout.episodes.grouped_rollout import GroupedRolloutWorkflow, OnError, run_group
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import OneTurn, tensors_of

ANSWER = ModelResponse(input_tokens=[1, 2], output_tokens=[3], output_logprobs=[-0.5], output_versions=[0])


class ByMember(RolloutWorkflow):
    """Returns what ``outcome`` makes of the episode's place in its group."""

    def __init__(self, outcome: Callable[[int], Any]) -> None:
        self.outcome = outcome

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        outcome = self.outcome(workflow_context.get().member_idx)
        return await outcome if asyncio.iscoroutine(outcome) else outcome


def merged(outcome: Callable[[int], Any], size: int = 4) -> Any:
    group = GroupedRolloutWorkflow(ByMember(outcome), size)
    return asyncio.run(group.arun_episode(None, {}))  # type: ignore[arg-type]


async def run(outcome: Callable[[int], Any], episodes: list[Episode], on_error: OnError = "drop_episode") -> Any:
    """Run a group of three."""
    engine: Any = None
    return await GroupedRolloutWorkflow(ByMember(outcome), 3, on_error).run_episodes(engine, {}, episodes)


def test_rejected_episodes_are_left_out() -> None:
    kept = merged(lambda member: None if member == 1 else tensors_of(ANSWER, reward=member))
    assert kept["input_ids"].tolist() == [[1, 2, 3]] * 3
    assert kept["rewards"].tolist() == [0, 2, 3]
    assert merged(lambda member: None) is None
    alike = merged(lambda member: tensors_of(ANSWER, reward=member) | {"temperature": torch.tensor(0.5)})
    assert (len(alike["input_ids"]), alike["temperature"].item()) == (4, 0.5)


def test_interactions_become_one_dict() -> None:
    def interaction(member: int) -> dict[str, Any]:
        return {f"answer-{member}": InteractionWithTokenLogpReward(model_response=ANSWER, reward=float(member))}

    found = merged(lambda member: None if member == 1 else interaction(member))
    assert {name: one.reward for name, one in found.items()} == {"answer-0": 0.0, "answer-2": 2.0, "answer-3": 3.0}


def test_a_group_trains_the_episodes_that_were_not_rejected(
    start_stub: Callable[..., Any], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    class SomeReject(OneTurn):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            reject = workflow_context.get().member_idx == 1
            return await super().arun_episode(engine, {"do": "reject"} if reject else data)

    (group,) = start_engine(start_stub()).rollout_batch([{}], SomeReject, group_size=4)
    assert group.status == "accepted"
    assert [trajectory.status for trajectory in group.trajectories] == ["accepted", "rejected", "accepted", "accepted"]
    assert group.trajectory is not None and len(group.trajectory["input_ids"]) == 3


def test_a_group_has_an_episode_at_least_and_knows_what_an_error_does() -> None:
    assert merged(lambda member: tensors_of(ANSWER, reward=member), size=1)["rewards"].tolist() == [0]
    with pytest.raises(ConfigError, match="group_size is 0"):
        merged(lambda member: None, size=0)
    with pytest.raises(ConfigError, match="on_error is 'ignore'"):
        GroupedRolloutWorkflow(OneTurn(), 2, "ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("drawn", [[], [Episode(seed_name="row 3")]])
def test_a_group_of_another_size_than_was_drawn_keeps_the_name_of_its_seeds(drawn: list[Episode]) -> None:
    names = [drawn[0].seed_name if drawn else None] * 3
    asyncio.run(run(lambda member: tensors_of(ANSWER), drawn))
    assert [(episode.member_idx, episode.seed_name) for episode in drawn] == list(enumerate(names))
    (first, *_) = drawn
    asyncio.run(run(lambda member: tensors_of(ANSWER), drawn))
    assert drawn[0] is first


def odd(member: int) -> Any:
    """Return data, raise, or hang."""

    async def hang() -> None:
        await asyncio.Event().wait()

    if member == 1:
        raise ValueError("odd member")
    return hang() if member == 2 else tensors_of(ANSWER)


@pytest.mark.parametrize("on_error", ["drop_group", "raise"])
def test_a_dropped_group_has_no_data_and_says_which_episode_failed(on_error: OnError) -> None:
    episodes: list[Episode] = []
    if on_error == "raise":
        with pytest.raises(ValueError, match="odd member") as raised:
            asyncio.run(run(odd, episodes, on_error))
        assert isinstance(raised.value.__cause__, ExceptionGroup)
        assert raised.value.__cause__.exceptions == (raised.value,)
    else:
        assert asyncio.run(run(odd, episodes, on_error)) == []
    ends = [episode.trajectory for episode in episodes]
    assert [end and (end.status, end.sequences, end.failure and end.failure.message) for end in ends] == [
        ("cancelled", [], "the group was dropped because another episode failed"),
        ("failed", [], "odd member"),
        ("cancelled", [], "the group was dropped because another episode failed"),
    ]


def test_an_exit_of_an_episode_is_an_error_of_its_group() -> None:
    def leave(member: int) -> Any:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match=r"episode raised SystemExit\(3\)"):
        asyncio.run(run(leave, [], "raise"))


def test_an_episode_that_cancels_itself_has_failed_and_the_others_train() -> None:
    def cancels(member: int) -> Any:
        if member == 1:
            raise asyncio.CancelledError
        return tensors_of(ANSWER)

    episodes: list[Episode] = []
    assert len(asyncio.run(run(cancels, episodes))) == 2
    assert [e.trajectory and e.trajectory.status for e in episodes] == ["accepted", "failed", "accepted"]


def test_a_group_that_is_stopped_ends_with_its_episodes_and_keeps_the_errors_of_their_clean_up() -> None:
    async def stopped(member: int) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if member == 1:
                raise KeyError("while it cleaned up") from None
            raise

    async def main() -> None:
        episodes: list[Episode] = []
        group = asyncio.create_task(run(stopped, episodes))
        for _ in range(3):
            await begun.acquire()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        ends = [episode.trajectory for episode in episodes]
        assert [end and end.status for end in ends] == [None, "failed", None]

    begun = asyncio.Semaphore(0)
    asyncio.run(main())


def test_episodes_of_one_group_return_the_same_keys() -> None:
    with pytest.raises(ValueError, match="different keys") as raised:
        asyncio.run(run(lambda member: tensors_of(ANSWER) | ({"extra": [1]} if member else {}), []))
    assert Failure.of(raised.value).kind is FailureKind.OUTPUT


def test_what_a_failed_episode_held_is_freed_with_its_group() -> None:
    held: list[weakref.ref[object]] = []

    class Tokens:
        """What a weak reference may watch."""

    def fails(member: int) -> Any:
        tokens = Tokens()
        held.append(weakref.ref(tokens))
        if member == 1:
            raise ValueError("odd member")
        return tensors_of(ANSWER)

    async def main() -> list[object | None]:
        await run(fails, [])
        return [reference() for reference in held]

    gc.disable()
    try:
        assert asyncio.run(main()) == [None] * 3
    finally:
        gc.enable()


class Around(RolloutWorkflow):
    """A workflow around a group of three; changes what it returned."""

    def __init__(self, outcome: Callable[[int], Any], change: Callable[[Any], Any]) -> None:
        self.group, self.change = GroupedRolloutWorkflow(ByMember(outcome), 3), change

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return self.change(await self.group.arun_episode(engine, data))


def ends_around(outcome: Callable[[int], Any], change: Callable[[Any], Any]) -> list[Any]:
    """Return the status and rewards of each episode."""

    async def main() -> list[Any]:
        episodes = [Episode()]
        workflow_context.set(workflow_context.get()._replace(episodes=episodes))
        engine: Any = None
        await run_group(Around(outcome, change), engine, {}, episodes)
        ends = [episode.trajectory for episode in episodes]
        return [end and (end.status, [sequence.reward for sequence in end.sequences]) for end in ends]

    return asyncio.run(main())


def test_a_workflow_around_a_group_may_change_what_it_returned() -> None:
    def outcome(member: int) -> Any:
        return None if member == 1 else tensors_of(ANSWER, reward=member)

    def doubled(tensors: Any) -> Any:
        return tensors | {"rewards": tensors["rewards"] * 2 + 1}

    assert ends_around(outcome, doubled) == [("accepted", [1.0]), ("rejected", []), ("accepted", [5.0])]
    assert ends_around(outcome, lambda _: None) == [("rejected", []), ("rejected", []), ("rejected", [])]


def test_one_episode_may_return_what_it_made_of_no_group() -> None:
    async def main() -> Any:
        (episode,) = episodes = [Episode()]
        engine: Any = None
        await run_group(ByMember(lambda _: tensors_of(ANSWER, reward=4)), engine, {}, episodes)
        return episode.trajectory

    trajectory = asyncio.run(main())
    assert (trajectory.status, [sequence.reward for sequence in trajectory.sequences]) == ("accepted", [4.0])


def test_a_group_whose_episodes_all_fail_raises_the_first_error() -> None:
    def fails(member: int) -> Any:
        raise ValueError(f"member {member}")

    with pytest.raises(ValueError, match="member 0"):
        asyncio.run(run(fails, []))


def test_the_workflow_runs_once_for_each_episode_of_the_group() -> None:
    async def main(outcome: Any, size: int) -> list[Any]:
        episodes = [Episode(member_idx=n) for n in range(size)]
        engine: Any = None
        await run_group(ByMember(lambda _: outcome), engine, {}, episodes)
        return [episode.trajectory and episode.trajectory.status for episode in episodes]

    assert asyncio.run(main(tensors_of(ANSWER), 3)) == ["accepted"] * 3
    assert asyncio.run(main(None, 3)) == ["rejected"] * 3
    assert asyncio.run(main(None, 1)) == ["rejected"]
    with pytest.raises(ValueError) as raised:
        asyncio.run(main("text", 1))
    assert Failure.of(raised.value).kind is FailureKind.OUTPUT
