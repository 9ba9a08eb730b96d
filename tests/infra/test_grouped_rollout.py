"""What the episodes of a group return is merged; rejected ones are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal_lite.api import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.infra import workflow_context
from areal_lite.infra.grouped_rollout import GroupedRolloutWorkflow
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from tests.infra.scripted import OneTurn, tensors_of

ANSWER = ModelResponse(input_tokens=[1, 2], output_tokens=[3], output_logprobs=[-0.5], output_versions=[0])


class ByMember(RolloutWorkflow):
    """Returns what ``outcome`` makes of the episode's place in its group."""

    def __init__(self, outcome: Callable[[int], Any]) -> None:
        self.outcome = outcome

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return self.outcome(workflow_context.get().member_idx)


def merged(outcome: Callable[[int], Any]) -> Any:
    group = GroupedRolloutWorkflow(ByMember(outcome), 4)
    return asyncio.run(group.arun_episode(None, {}))  # type: ignore[arg-type]


def test_rejected_episodes_are_left_out() -> None:
    kept = merged(lambda member: None if member == 1 else tensors_of(ANSWER, reward=member))
    assert kept["input_ids"].tolist() == [[1, 2, 3]] * 3
    assert kept["rewards"].tolist() == [0, 2, 3]
    assert merged(lambda member: None) is None


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
