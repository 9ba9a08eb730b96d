"""Rewards of single tokens reach the trainer as they are; nothing of them is lost."""

from __future__ import annotations
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.batch.training_batch import data_proto_of, training_sequences
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Step


def tensors(**columns: Any) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
        "attention_mask": torch.ones(1, 5, dtype=torch.long),
        "loss_mask": torch.tensor([[0, 1, 1, 0, 1]]),
        **{name: torch.tensor(values) for name, values in columns.items()},
    }


def group(*returned: dict[str, torch.Tensor]) -> Group:
    trajectories = [trajectory_of(each, [], member_idx=place) for place, each in enumerate(returned)]
    return Group(task_id="1", group_id="1", status=EpisodeStatus.ACCEPTED, data={}, trajectories=trajectories)


def step_of(batch: Any) -> Step:
    return Step.of(batch, version=0, device=torch.device("cpu"))


BY_TOKEN = {"token_rewards": [[0.25, 0.5, 1.0, 2.0, 4.0]]}


@pytest.mark.parametrize("as_proto", [False, True])
def test_a_reward_counts_at_its_token_or_at_the_next_that_trains(as_proto: bool) -> None:
    groups = [group(tensors(**BY_TOKEN), tensors(rewards=[3.0]))]
    assert [s.reward for s in groups[0].sequences] == [7.75, 3.0]
    step = step_of(data_proto_of(groups) if as_proto else groups)
    assert step.tokens.rewards.tolist() == [0.75, 1.0, 6.0, 0.0, 0.0, 3.0]
    assert step.scores.tolist() == [7.75, 3.0]


def test_a_reward_after_the_last_trained_token_counts_there() -> None:
    both = group(tensors(**BY_TOKEN), tensors(rewards=[3.0]))
    both.sequences[0].loss_mask[4] = False  # too old
    assert step_of([both]).tokens.rewards.tolist() == [0.75, 7.0, 0.0, 0.0, 3.0]
    both.sequences[0].loss_mask[1:] = False
    step = step_of([both])
    assert step.tokens.rewards.tolist() == [0.0, 0.0, 3.0]
    assert step.scores.tolist() == [7.75, 3.0]


def test_a_batch_keeps_the_rewards_of_tokens_and_of_whole_sequences() -> None:
    sequences = training_sequences(data_proto_of([group(tensors(**BY_TOKEN), tensors(rewards=[3.0]))]))
    first, second = (sequence.token_rewards for sequence in sequences)
    assert (None if first is None else first.tolist(), second) == (BY_TOKEN["token_rewards"][0], None)


def test_the_overlong_penalty_lowers_the_last_tokens_reward() -> None:
    step = step_of([group(tensors(**BY_TOKEN), tensors(rewards=[3.0]))])
    config = TrainerConfig(total_steps=1, learning_rate=1.0, overlong_buffer=2, advantage="reinforce")
    Algorithm(config, max_new_tokens=4).shape_rewards(step.scores, step.tokens)
    assert step.tokens.rewards.tolist() == [0.75, 1.0, 5.5, 0.0, 0.0, 2.5]
    assert step.scores.tolist() == [7.25, 2.5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"token_rewards": [[0.0, 1.0, float("nan"), 0.0, 0.0]]}, "token_rewards holds nan or inf"),
        ({"token_rewards": [[0.0, 1.0]]}, r"token_rewards has shape \[1, 2\] but input_ids has \[1, 5\]"),
        ({**BY_TOKEN, "rewards": [1.0]}, r"rewards is 1.0 and token_rewards sum to 7.75: leave rewards out"),
    ],
)
def test_rewards_of_tokens_that_cannot_be_right_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(tensors(**columns))


def test_an_episode_with_rewards_of_tokens_is_one_sequence() -> None:
    twice = {name: column.repeat(2, 1) for name, column in tensors(**BY_TOKEN).items()}
    with pytest.raises(ValueError, match="token_rewards and 2 sequences: return its turns as one"):
        group(twice)


def test_the_view_has_them_if_all_sequences_do() -> None:
    view = group(tensors(**BY_TOKEN), tensors(**BY_TOKEN)).trajectory
    assert view is not None
    assert view["token_rewards"].tolist() == BY_TOKEN["token_rewards"] * 2
    mixed = group(tensors(**BY_TOKEN), tensors(rewards=[3.0])).trajectory
    assert mixed is not None
    assert mixed["rewards"].tolist() == [7.75, 3.0]
    assert "token_rewards" not in mixed


def test_there_is_one_for_each_token() -> None:
    (sequence,) = group(tensors(**BY_TOKEN)).sequences
    assert isinstance(sequence, TokenSequence)
    with pytest.raises(ValueError, match="token_rewards has 2 entries but input_ids has 5"):
        replace(sequence, token_rewards=np.zeros(2))
