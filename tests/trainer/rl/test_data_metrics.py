"""V60: the figures of a batch and of a step's time, against numbers worked by hand."""

from __future__ import annotations
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from areal_lite.trainer.rl import data_metrics
from areal_lite.trainer.rl.data_metrics import PhaseClock, batch_metrics
from tests.trainer.training_data import sequence

SAMPLES = [
    sequence([1, 2, 3, 4, 5], [2, 3, 4], reward=1.0, group="a", versions=[-1, -1, 3, 4, 4]),  # prompt 2, response 3
    sequence([1, 2, 3, 4, 5, 6], [1, 4, 5], reward=0.0, group="a"),  # prompt 1; 2, 3 are a tool's
    sequence([1, 2, 3], [], reward=0.5, group="b"),  # nothing trained
]
EPISODES = [0, 1, 2]
ADVANTAGES = np.array([1.0, 1.0, 4.0, 0.0, 0.0, 0.0])


def test_v60_rewards_advantages_and_lengths() -> None:
    assert batch_metrics(SAMPLES, EPISODES, {"advantage": ADVANTAGES}, version=5) == pytest.approx(
        {
            "sequences": 3,
            "episodes": 3,
            "groups": 2,
            "reward_mean": 0.5,
            "reward_max": 1,
            "reward_min": 0,
            "reward_std": (1 / 6) ** 0.5,
            "reward_group_std": 0.25,  # of 1 and 0, and of 0.5 alone
            "turns_mean": 1,
            "turns_max": 2,
            "turns_min": 0,
            "advantage_mean": 1,
            "advantage_max": 4,
            "advantage_min": 0,
            "advantage_std": 2**0.5,
            "advantage_zero_fraction": 2 / 3,
            "staleness_mean": 2,
            "staleness_max": 2,
            "prompt_length_mean": 1.5,
            "prompt_length_max": 2,
            "prompt_length_min": 1,
            "response_length_mean": 4,
            "response_length_max": 5,
            "response_length_min": 3,
        }
    )


def test_v60_penalised_rewards_returns_and_values_if_present() -> None:
    metrics = batch_metrics(
        SAMPLES,
        EPISODES,
        {
            "advantage": ADVANTAGES,
            "return": np.array([0.0, 0.0, 0.0, 2.0, 2.0, 2.0]),
            "value": np.array([1.0, 0.0, 0.0, 2.0, 2.0, 1.0]),
        },
        version=5,
        penalised_rewards=np.array([0.9, -0.3, 0.3]),
    )
    without = batch_metrics(SAMPLES, EPISODES, {"advantage": ADVANTAGES}, version=5)
    more = {name: metrics[name] for name in metrics.keys() - without.keys()}
    assert more == pytest.approx(
        {
            "penalised_reward_mean": 0.3,
            "penalised_reward_max": 0.9,
            "penalised_reward_min": -0.3,
            "return_mean": 1,
            "return_max": 2,
            "return_min": 0,
            "value_mean": 1,
            "value_max": 2,
            "value_min": 0,
            "value_explained_variance": 2 / 3,  # the differences -1, 0, 0, 0, 0, 1 vary by 1/3, the returns by 1
        }
    )


@pytest.mark.parametrize(("max_new_tokens", "ratio"), [(2, 2 / 3), (3, 1 / 3), (4, 0.0)])
def test_v60_a_sequence_is_clipped_if_an_answer_reaches_the_length_limit(max_new_tokens: int, ratio: float) -> None:
    metrics = batch_metrics(SAMPLES, EPISODES, {"advantage": ADVANTAGES}, version=5, max_new_tokens=max_new_tokens)
    assert metrics["response_length_clip_ratio"] == pytest.approx(ratio)
    whole = {2: [], 3: [5], 4: [3, 5]}[max_new_tokens]  # responses without a cut answer
    figures = {name: metrics.get(f"terminated_length_{name}") for name in ("mean", "max", "min")}
    assert figures == ({"mean": sum(whole) / len(whole), "max": max(whole), "min": min(whole)} if whole else figures)
    assert (figures["mean"] is None) == (not whole)


def test_a_batch_without_trained_tokens_has_no_lengths_or_advantages() -> None:
    metrics = batch_metrics(SAMPLES[2:], [0], {"advantage": np.zeros(0)}, version=5, max_new_tokens=4)
    assert metrics["advantage_zero_fraction"] == 1
    assert metrics["advantage_std"] == metrics["staleness_mean"] == metrics["staleness_max"] == 0
    assert not [name for name in metrics if name.endswith("_length_mean") or name == "advantage_mean"]


def test_an_episode_in_two_sequences_counts_once() -> None:
    metrics = batch_metrics([SAMPLES[0], SAMPLES[0], SAMPLES[1]], [0, 0, 1], {"advantage": np.ones(9)}, version=5)
    assert (metrics["episodes"], metrics["sequences"]) == (2, 3)
    assert (metrics["reward_mean"], metrics["turns_max"], metrics["advantage_zero_fraction"]) == (0.5, 2, 0)


def test_equal_returns_have_no_variance_to_explain() -> None:
    metrics = batch_metrics(
        SAMPLES, EPISODES, {"advantage": ADVANTAGES, "return": np.ones(6), "value": ADVANTAGES}, version=5
    )
    assert "value_explained_variance" not in metrics
    metrics = batch_metrics(
        SAMPLES, EPISODES, {"advantage": ADVANTAGES, "return": 2 * ADVANTAGES, "value": np.ones(6)}, version=5
    )
    assert metrics["value_explained_variance"] == 0


@pytest.mark.parametrize(("device", "forward"), [("cpu", 5), ("cuda", 11)])
def test_a_phase_on_a_gpu_ends_when_its_work_is_done(
    monkeypatch: pytest.MonkeyPatch, device: str, forward: float
) -> None:
    seconds = [100.0]

    def pass_by(some: float) -> None:
        seconds[0] += some

    monkeypatch.setattr(data_metrics, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: pass_by(3))
    clock = PhaseClock(torch.device(device))
    with clock("forward"):
        pass_by(1)
    pass_by(7)
    with pytest.raises(KeyError), clock("forward"):
        pass_by(4)
        raise KeyError
    assert clock.metrics(num_tokens=1000) == pytest.approx(
        {
            "seconds_forward": forward,
            "ms_per_token_forward": forward,
            "seconds_step": forward + 7,
            "tokens_per_second": 1000 / (forward + 7),
        }
    )
