"""V47: differences between engine and trainer, apart from staleness."""

from __future__ import annotations
import pytest
import torch
from areal_lite.trainer.rl.data_metrics import mismatch_statistics
from tests.trainer.oracle_cases import case, inputs


def test_metrics_equal_verls() -> None:
    mask = inputs("mask").bool()
    proximal, behaviour, episodes = (
        inputs("old_log_prob")[mask],
        inputs("rollout_log_prob")[mask],
        mask.nonzero()[:, 0],
    )
    ours = mismatch_statistics(proximal, behaviour, torch.full_like(episodes, 3), episodes, 3)
    theirs = case("corr.metrics_only", "metrics")
    names = {
        "kl_k1": "kl", "kl_k3": "k3_kl", "proximal_perplexity": "training_ppl",
        "behaviour_perplexity": "rollout_ppl", "perplexity_ratio": "ppl_ratio",
        "chi2_token": "chi2_token", "chi2_seq": "chi2_seq",
    }  # fmt: skip
    for name, their_name in names.items():
        assert ours[f"engine_mismatch/{name}"] == pytest.approx(theirs[f"rollout_corr/{their_name}"], rel=1e-7)
    assert not [name for name in ours if name.startswith("staleness_drift")]


def test_metrics_by_hand() -> None:
    """V47: probabilities 0.5 and 0.2 against 0.4 and 0.2, one episode."""
    proximal, behaviour = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.4, 0.2]).log()
    figures = mismatch_statistics(proximal, behaviour, torch.tensor([1, 1]), torch.tensor([0, 0]), 1)
    expected = {
        "chi2_token": (1.25**2 + 1) / 2 - 1, "chi2_seq": 1.25**2 - 1,
        "kl_k1": -0.1115718, "kl_k3": 0.0134282, "log_prob_diff_mean": 0.1115718, "log_prob_diff_max": 0.2231436,
        "prob_diff_mean": 0.05, "prob_diff_max": 0.1, "prob_diff_std": 0.05, "prob_pearson": 1.0,
        "proximal_perplexity": 10**0.5, "behaviour_perplexity": 12.5**0.5, "perplexity_ratio": 0.8**0.5,
    }  # fmt: skip
    assert figures == pytest.approx({f"engine_mismatch/{name}": value for name, value in expected.items()}, abs=1e-6)


def test_opposite_probabilities_have_a_correlation_of_minus_1() -> None:
    proximal, behaviour = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.2, 0.4]).log()
    figures = mismatch_statistics(proximal, behaviour, torch.tensor([1, 1]), torch.tensor([0, 0]), 1)
    assert figures["engine_mismatch/prob_pearson"] == pytest.approx(-1)


def test_older_tokens_count_as_drift_not_mismatch() -> None:
    proximal = torch.tensor([-1.0, -1.0, -2.0])
    behaviour = torch.tensor([-1.0, -1.5, -1.0])
    figures = mismatch_statistics(proximal, behaviour, torch.tensor([4, 3, 2]), torch.tensor([0, 0, 0]), 4)
    assert figures["engine_mismatch/log_prob_diff_max"] == 0
    assert figures["staleness_drift/log_prob_diff_mean"] == pytest.approx(0.75)
    assert figures["staleness_drift/log_prob_diff_max"] == 1


def test_constant_probabilities_have_no_correlation() -> None:
    one = torch.tensor([-1.0])
    figures = mismatch_statistics(one, one, torch.tensor([0]), torch.tensor([0]), 0)
    assert "engine_mismatch/prob_pearson" not in figures
    assert figures["engine_mismatch/perplexity_ratio"] == 1


def test_an_empty_step_has_no_metrics() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert mismatch_statistics(nothing, nothing, none, none, 0) == {}
