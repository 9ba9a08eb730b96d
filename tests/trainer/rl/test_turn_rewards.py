"""Episodes whose turns are rewarded one by one, through a whole training step."""

from __future__ import annotations
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
import torch
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.trajectory import EpisodeStatus, Group, TurnRewards
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.batch.training_batch import data_proto_of
from areal_lite.runs import rollout_driver
from areal_lite.trainer.rl.policy_step import Step
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.trainer.small_mdps import STOP_OR_GO
from tests.trainer.small_mdps import Path as Episode

SUM = TurnRewards()
PROMPT, REPLY = [5, 6], 20
TOKENS = [10, 11, 12, 13]
"""The answer of each parameter's action: stop, go on, and the two of the second turn."""


def interactions(episode: Episode) -> dict[str, InteractionWithTokenLogpReward]:
    """Return the episode as an agent's answers, each with its reward."""
    prompt, parent, made = PROMPT, None, {}
    for turn, step in enumerate(episode.steps):
        answer = ModelResponse(
            input_tokens=prompt,
            output_tokens=[TOKENS[step.parameter]],
            output_logprobs=[-3.0],
            output_versions=[0],
            rid=str(turn),
        )
        parent = made[str(turn)] = InteractionWithTokenLogpReward(
            model_response=answer, reward=step.reward, parent=parent
        )
        prompt = [*prompt, TOKENS[step.parameter], REPLY]
    return made


def group_of(name: str, episodes: list[Episode], by: TurnRewards = SUM) -> Group:
    trajectories = []
    for member_idx, episode in enumerate(episodes):
        returned = interactions(episode)
        calls = [each.model_response for each in returned.values()]
        trajectories.append(trajectory_of(returned, calls, member_idx=member_idx))
        trajectories[-1].join_rewards(by)
    return Group(task_id=name, group_id=name, status=EpisodeStatus.ACCEPTED, data={}, trajectories=trajectories)


def drawn_groups(count: int, by: TurnRewards = SUM) -> list[Group]:
    """Return groups of eight episodes of :data:`STOP_OR_GO` under its policy."""
    source, paths = random.Random(7), STOP_OR_GO.paths()
    weights = [path.probability for path in paths]
    return [group_of(str(number), source.choices(paths, weights, k=8), by) for number in range(count)]


def preference(trainer: PolicyTrainer) -> float:
    """Return the log-odds of going on over stopping."""
    stop = group_of("stop", [path for path in STOP_OR_GO.paths() if len(path.steps) == 1])
    go_on = group_of("go", [path for path in STOP_OR_GO.paths() if len(path.steps) == 2][:1])
    return float(trainer.logprobs_of(go_on.sequences)[0] - trainer.logprobs_of(stop.sequences)[0])


def change(model_path: Path, batch: Any, **settings: Any) -> float:
    """Return the change of :func:`preference` by one step."""
    given = {"total_steps": 10, "learning_rate": 1e-3, "dtype": "float32", "num_threads": 1, "device": "cpu"}
    trainer = PolicyTrainer(TrainerConfig(**given | settings), model_path=str(model_path), seed=1)
    before = preference(trainer)
    trainer.train_step(batch, version=0)
    return preference(trainer) - before


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "turn_returns", "reinforce_plus_plus_baseline"])
def test_a_step_goes_on_where_that_is_worth_more(tiny: Path, advantage: str) -> None:
    groups = drawn_groups(24)
    assert change(tiny, groups, advantage=advantage) > 0.05
    assert change(tiny, data_proto_of(groups), advantage=advantage) > 0.05


def test_the_mean_and_turn_grpo_stop(tiny: Path) -> None:
    """They compare 0.5 with 0.7, whatever follows."""
    assert change(tiny, drawn_groups(24, TurnRewards("mean")), advantage="dr_grpo") < -0.05
    assert change(tiny, drawn_groups(24), advantage="turn_grpo") < -0.05


def test_an_episode_has_the_mean_of_a_reward_models_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """They judge a conversation so far, so they are no rewards of turns."""
    groups = drawn_groups(2)
    assert all(sequence.score == sequence.episode_reward for group in groups for sequence in group.sequences)
    config: Any = SimpleNamespace(trainer=SimpleNamespace(max_tokens_per_microbatch=8))
    monkeypatch.setattr(rollout_driver, "rewards_of", lambda model, own, max_tokens: torch.arange(len(own)).float())
    model: Any = object()
    rollout_driver.apply_reward_model(model, groups, config)
    step = Step.of(groups, version=0, device=torch.device("cpu"))
    expected = []
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        own = [sequence.reward or 0.0 for sequence in trajectory.sequences]
        expected.append(sum(own) / len(own))
        assert trajectory.reward == expected[-1]
    assert step.scores.tolist() == pytest.approx(expected)
    assert data_proto_of(groups).batch["rewards"].tolist() == list(range(len(step.sequences)))
