"""A step's rewards, the turns of its episodes, and its metrics."""

from __future__ import annotations
import math
from dataclasses import replace
from typing import Any
import pytest
import torch
from areal_lite.api.trajectory import EpisodeStatus, TokenSequence
from areal_lite.config.trainer_config import CriticConfig, KLConfig, TrainerConfig
from areal_lite.errors import TrainingError
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import ROUNDING, Step
from tests.trainer.episode_data import Episode, group_of, line
from tests.trainer.training_data import sequence, training_batch


def step_of(sequences: list[TokenSequence], *, version: int = 0) -> Step:
    return Step.of(training_batch(sequences), version=version, device=torch.device("cpu"))


def an_episode(*rewards: float) -> list[TokenSequence]:
    return [replace(sequence([5, 6, 7], [1, 2], reward=reward), member_idx=0) for reward in rewards]


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, -0.1])
@pytest.mark.parametrize("turns", [1, 7, 8])
def test_equal_rewards_of_turns_are_the_episodes_to_the_last_bit(reward: float, turns: int) -> None:
    assert step_of(an_episode(*[reward] * turns)).scores.tolist() == [torch.tensor(reward).item()]


def test_an_episode_earns_the_mean_of_its_turns() -> None:
    assert step_of(an_episode(1.0, 2.0, 6.0)).scores.tolist() == [3.0]


def test_a_batch_of_no_groups_is_an_error() -> None:
    with pytest.raises(TrainingError, match="step 4: no group of the batch was accepted"):
        Step.of([], version=4, device=torch.device("cpu"))


@pytest.mark.parametrize(("count", "end"), [(8, "t7 must"), (9, "t7 and 1 more must")])
def test_an_error_names_up_to_eight_tasks(count: int, end: str) -> None:
    batch = [replace(sequence([5, 6], [1], reward=math.nan, group=f"g{n}"), task_id=f"t{n}") for n in range(count)]
    with pytest.raises(TrainingError, match=f"rewards of task t0, t1, .*, {end} be finite"):
        step_of(batch)


def test_a_log_prob_may_be_above_0_by_rounding() -> None:
    for logprob, fits in ((ROUNDING, True), (2 * ROUNDING, False)):
        batch = [sequence([5, 6], [1], behaviour=[0.0, logprob])]
        if fits:
            step_of(batch)
        else:
            with pytest.raises(TrainingError, match="logprobs of task .* must be at most 0"):
                step_of(batch)


def test_the_parent_of_a_turn_is_the_longest_that_it_extends() -> None:
    paths = [(0,), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4), (7,), (7, 8, 9)]
    step = step_of(an_episode(*[1.0] * len(paths)))
    step.sequences = [
        replace(one, place=(path, len(path) - 1)) for one, path in zip(step.sequences, paths, strict=True)
    ]
    assert step.turns().parents.tolist() == [-1, 0, 1, 2, -1, 4]
    step.episodes = [0, 0, 0, 1, 1, 1]
    assert step.turns().parents.tolist() == [-1, 0, 1, -1, -1, 4]


@pytest.mark.parametrize(
    ("baselines", "expected"), [((0.25, 0.5), [0.25, 0.25, 0.5]), ((0.25, None), None), ((None, None), None)]
)
def test_greedy_rewards_are_there_if_all_accepted_groups_have_one(
    baselines: tuple[float | None, ...], expected: list[float] | None
) -> None:
    members = [Episode(line(1), 1.0), Episode(line(1), 0.0)]
    groups = [
        group_of(name, [5, 6], members[place:], baseline=baseline)
        for place, (name, baseline) in enumerate(zip("ab", baselines, strict=True))
    ]
    rejected = replace(group_of("c", [5, 6], members), status=EpisodeStatus.REJECTED)
    step = Step.of([*groups, rejected], version=1, device=torch.device("cpu"))
    assert (None if step.baselines is None else step.baselines.tolist()) == expected


def metrics_of(step: Step, **settings: Any) -> dict[str, float]:
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, **settings)
    return step.all_metrics(Algorithm(config, max_new_tokens=None))


def test_a_statistic_is_the_mean_of_the_tokens_that_have_it() -> None:
    step = step_of([sequence([5, 6, 7, 8], [1, 2, 3])])
    step.record_statistics(torch.tensor([False, True, False]), {"one": torch.tensor([3.0])})
    step.record_statistics(torch.tensor([True, True, False]), {"two": torch.tensor([1.0, 2.0])})
    step.record_statistics(torch.tensor([False, False, False]), {"none": torch.tensor([])})
    metrics = metrics_of(step)
    assert (metrics["one"], metrics["two"], metrics["none"]) == (3.0, 1.5, 0.0)


def test_a_computed_token_without_a_weight_is_rejected() -> None:
    step = step_of([sequence([5, 6, 7, 8, 9], [1, 2, 3, 4])])
    step.tokens.computed[:3] = True
    step.tokens.correction[1] = 1.0
    metrics = metrics_of(step)
    assert (metrics["rejected_tokens"], metrics["computed_tokens"], metrics["trained_tokens"]) == (2, 3, 4)


def test_engine_and_trainer_are_compared_at_the_tokens_that_the_trainer_scored() -> None:
    step = step_of([sequence([5, 6, 7, 8], [1, 2, 3], behaviour=[0, -1, -2, -4], versions=[0, 0, 0, 0])])
    step.tokens.proximal[:] = torch.tensor([-1.0, -2.5, -2.0])
    assert "engine_mismatch/log_prob_diff_max" not in metrics_of(step)
    for scored, largest in (([True, True, False], 0.5), ([True, True, True], 2.0)):
        at = torch.tensor(scored)
        step.record_statistics(at, {"entropy": torch.ones(int(at.sum()))})
        assert metrics_of(step)["engine_mismatch/log_prob_diff_max"] == largest


def test_penalised_rewards_are_those_of_the_tokens_where_an_episode_has_any() -> None:
    step = step_of([sequence(range(3, 6), trained, group=str(trained)) for trained in ([], [1], [1, 2])])
    step.tokens.rewards -= 0.25
    metrics = metrics_of(step, kl=KLConfig(coef=0.1, place="reward"))
    assert metrics["penalised_reward_mean"] == pytest.approx((1 + 0.75 + 0.5) / 3)
    assert "value_mean" not in metrics
    assert "penalised_reward_mean" not in metrics_of(step)
    assert "value_mean" in metrics_of(step, advantage="gae", critic=CriticConfig(learning_rate=1e-3))
