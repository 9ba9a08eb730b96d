"""``rollout.rewards.key`` chooses the reward of a workflow, or the episode fails and says why."""

from __future__ import annotations
import asyncio
from typing import Any
import pytest
import torch
from areal_lite.api import AsyncRewardWrapper, episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.rollout.episodes.grouped_rollout import GroupedRolloutWorkflow, run_group
from tests.rollout.scripted import tensors_of

ANSWER = ModelResponse(input_tokens=[1, 2], output_tokens=[3, 4], output_logprobs=[-0.5] * 2, output_versions=[0] * 2)


class Rewarded(RolloutWorkflow):
    """Its reward is what ``returned`` is: ``rewards`` as they are, or what a reward function returns."""

    def __init__(self, returned: Any, in_process: bool | None = None) -> None:
        self.reward = None if in_process is None else AsyncRewardWrapper(given, in_process=in_process)
        self.returned = returned

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if self.returned is None:
            return None
        if self.reward is None:
            return tensors_of(ANSWER, reward=0.0) | {"rewards": self.returned}
        reward = await self.reward("p", "c", [1, 2], [3, 4], returned=self.returned)
        if not isinstance(reward, list):
            return tensors_of(ANSWER, reward=reward)
        tensors = tensors_of(ANSWER, reward=0.0) | {"token_rewards": torch.tensor([[0.0, 0.0, *reward]])}
        del tensors["rewards"]
        return tensors


def given(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], returned: Any) -> Any:
    return returned


def run(workflow: RolloutWorkflow, key: str | None = "right", size: int = 1) -> list[Episode]:
    episodes = [Episode(member_idx=number) for number in range(size)]
    engine: Any = None

    async def grouped() -> None:
        episode_context.enter(EpisodeContext(episodes=episodes, episode=episodes[0], reward_key=key))
        await run_group(workflow, engine, {}, episodes)

    asyncio.run(grouped())
    return episodes


@pytest.mark.parametrize("in_process", [True, False])
def test_the_key_names_the_part_of_a_reward_function_and_the_others_are_facts(in_process: bool) -> None:
    parts = {"right": 0.5, "score": 2.0, "verdict": "fine"}
    for episode in run(Rewarded(parts, in_process), size=2):
        assert episode.trajectory is not None and episode.trajectory.reward == 0.5
        assert episode.counts == {"reward/right": 0.5}
        assert episode.reward_extra == {"score": 2.0, "verdict": "fine"}
    (unkeyed,) = run(Rewarded(parts, in_process), None)
    assert unkeyed.trajectory is not None and unkeyed.trajectory.reward == 2.0 and unkeyed.counts == {}


def test_a_part_may_have_a_number_for_each_token() -> None:
    (episode,) = run(Rewarded({"right": [1.0, 0.25]}, True))
    assert episode.trajectory is not None and episode.trajectory.sequences[0].token_rewards is not None
    assert episode.trajectory.sequences[0].token_rewards.tolist() == [0, 0, 1.0, 0.25]
    assert episode.counts == {"reward/right": 1.25}


def test_the_key_names_the_part_of_a_tensor_dict() -> None:
    (episode,) = run(Rewarded({"right": torch.tensor([0.75]), "long": torch.tensor([4])}))
    assert episode.trajectory is not None and episode.trajectory.reward == 0.75
    assert episode.counts == {"reward/right": 0.75, "reward/long": 4.0}


def test_a_rejected_episode_needs_no_part() -> None:
    (episode,) = run(Rewarded(None))
    assert episode.trajectory is not None and not episode.trajectory.sequences


def test_the_key_reaches_the_episodes_of_a_workflows_own_group() -> None:
    episodes = run(GroupedRolloutWorkflow(Rewarded({"right": 1.0}, True), 2))
    assert [episode.trajectory and episode.trajectory.reward for episode in episodes] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("workflow", "says"),
    [
        (Rewarded(1.0, True), "the reward is 1.0: rollout.rewards.key is 'right', so return a dict with it"),
        (Rewarded({"score": 1.0}, False), "the reward is {'score': 1.0}: rollout.rewards.key is 'right', so return"),
        (Rewarded(torch.tensor([1.0])), "is 'right', and no reward of the episode has that part: return it from"),
        (Rewarded({"wrong": torch.tensor([1.0])}), "is 'right', and no reward of the episode has that part"),
    ],
)
def test_a_reward_without_the_part_fails_the_episode(workflow: RolloutWorkflow, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(workflow)
    with pytest.raises(ValueError, match=says):
        run(workflow, size=2)


def test_a_missing_part_is_a_failure_of_the_reward() -> None:
    with pytest.raises(ValueError, match="no reward of the episode has that part") as raised:
        run(Rewarded(torch.tensor([1.0])))
    assert Failure.of(raised.value).kind is FailureKind.REWARD
