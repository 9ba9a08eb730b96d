"""Truncated sampling replayed in the trainer: log-probs, gradients and metrics of the truncated distribution."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import CorrectionConfig, KLConfig, TrainerConfig
from areal_lite.models import truncation
from areal_lite.models.kernels.score_kernels import TokenScores
from areal_lite.models.truncation import Truncation
from areal_lite.trainer.forward import logprobs
from areal_lite.trainer.forward.logprobs import ChunkedScores, Scoring, TokenScorer, _score_logits
from areal_lite.trainer.rl.policy_trainer import EngineSampling, PolicyTrainer
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, training_batch

WORDS = 13
"""Tokens of the vocabulary of drawn logits."""

truncations = st.builds(
    Truncation,
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([None, 1, 3, 7, WORDS, 50]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@pytest.fixture(autouse=True, scope="module")
def _small_sizes() -> Any:
    """Chunks of three positions, and a first try of four tokens, so that some nuclei take a second one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "LOGIT_BYTES", 3 * 4 * WORDS)
        patch.setattr(truncation, "_FIRST_TRY", 4)
        yield


def naive(logits: Tensor, targets: Tensor, limits: Truncation, temperature: float) -> list[Tensor]:
    """Return log-probs, entropies, squares and the log of the kept mass from full sorts in float64."""
    rows = []
    for row, target in zip(logits.double() / temperature, targets.tolist(), strict=True):
        probs = row.detach().softmax(-1)
        keep, before = set(), 0.0
        for rank, token in enumerate(probs.argsort(descending=True).tolist()):
            in_k = limits.top_k is None or rank < limits.top_k
            if in_k and before <= limits.top_p and probs[token] >= limits.min_p * probs.max():
                keep.add(token)
            before += probs[token].item()
        kept = torch.tensor(sorted(keep | {target}))
        truncated = row[kept].log_softmax(-1)
        log_kept = row[kept].logsumexp(-1) - row.logsumexp(-1)
        chosen = truncated[(kept == target).nonzero()[0, 0]]
        rows.append([chosen, -(truncated.exp() * truncated).sum(), truncated.exp().square().sum(), log_kept])
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def chunked(logits: Tensor, targets: Tensor, limits: Truncation, temperature: float) -> TokenScores:
    eye = torch.eye(logits.shape[1])
    return TokenScores(
        *ChunkedScores.apply(logits, eye, None, targets, Scoring(temperature, limits, entropy_grad=True))
    )


def full(logits: Tensor, targets: Tensor, limits: Truncation, temperature: float) -> TokenScores:
    return _score_logits(logits, targets, Scoring(temperature, limits, entropy_grad=True))


@pytest.mark.parametrize("scores", [chunked, full])
@given(limits=truncations, seed=st.integers(0, 10_000), temperature=st.sampled_from([0.6, 1.0, 1.3]))
def test_scores_and_gradients_equal_those_of_a_naive_full_sort(
    scores: Any, limits: Truncation, seed: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(8, WORDS, generator=generator)
    targets = torch.randint(WORDS, (8,), generator=generator)  # also tokens outside of the kept set
    results = []
    for compute in (scores, naive):
        leaf = logits.clone().requires_grad_()
        chosen, entropy, squared, log_kept = compute(leaf, targets, limits, temperature)
        (chosen.sum() + entropy.square().sum()).backward()
        results.append([*(part.detach().double() for part in (chosen, entropy, squared, log_kept)), leaf.grad])
    torch.testing.assert_close(*results, atol=2e-5, rtol=2e-5)


@given(limits=truncations, seed=st.integers(0, 10_000))
def test_probabilities_of_the_kept_tokens_sum_to_1(limits: Truncation, seed: int) -> None:
    logits = torch.randn(1, WORDS, generator=torch.Generator().manual_seed(seed)).expand(WORDS, -1)
    every = torch.arange(WORDS)
    plain = logits[0].log_softmax(-1)
    kept = plain >= limits.smallest_kept(plain[None])[0]
    scores = chunked(logits, every, limits, 1.0)
    assert scores.logprobs[kept].exp().sum().item() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(scores.logprobs + scores.log_kept, plain, atol=1e-5, rtol=1e-5)
    if limits.top_p == 1 and limits.min_p == 0 and (limits.top_k or WORDS) >= WORDS:
        torch.testing.assert_close(scores.logprobs, plain, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("limits", [Truncation(top_p=0.8), Truncation(top_k=3), Truncation(min_p=0.3)], ids=str)
def test_the_expected_gradient_is_that_of_the_truncated_objective(limits: Truncation) -> None:
    """Tokens are drawn from the truncated policy, so its expected reward is what training increases."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    rewards = torch.tensor([1.0, 2.0, 0.5, 3.0, 5.0, 4.0]).double()
    exact = logits.double().requires_grad_()
    probs = exact.softmax(-1)[0]
    before = (probs.cumsum(0) - probs).detach()  # the logits are sorted
    kept = (before <= limits.top_p) & (torch.arange(6) < (limits.top_k or 6)) & (probs >= limits.min_p * probs.max())
    assert 1 < kept.sum() < 6
    truncated = torch.where(kept, probs, 0.0) / probs[kept].sum()
    (truncated * rewards).sum().backward()

    def expected_gradient(replayed: Truncation | None) -> Tensor:
        leaf = logits.clone().requires_grad_()
        tokens = kept.nonzero()[:, 0]
        scores = chunked(leaf.expand(len(tokens), -1), tokens, replayed, 1.0)  # type: ignore[arg-type]
        ((truncated * rewards)[tokens].detach() * scores.logprobs).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    assert exact.grad is not None
    torch.testing.assert_close(expected_gradient(limits), exact.grad, atol=1e-6, rtol=1e-5)
    assert (expected_gradient(None) - exact.grad).abs().max() > 0.05


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    plain = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
    assert (plain >= Truncation(top_k=2).smallest_kept(plain)).sum() == 3


def test_without_top_p_the_tail_of_a_sure_token_is_kept() -> None:
    """Probabilities may add up to more than 1, by rounding."""
    plain = torch.tensor([[0.0, -20.0, -21.0, -22.0]])
    assert (plain >= Truncation(top_k=3).smallest_kept(plain)).sum() == 3


def test_a_model_that_caps_logits_truncates_too() -> None:
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    scorer = TokenScorer(model, temperature=0.9, truncation=Truncation(top_k=5))
    packed, _ = packed_together(drawn_batch(3), share=scorer.shares_prefixes)
    with torch.no_grad():
        scores, plain = scorer(packed), scorer(packed, truncated=False)
    assert scores.log_kept.max() < -1
    torch.testing.assert_close(scores.logprobs + scores.log_kept, plain.logprobs, atol=1e-5, rtol=1e-5)


def trainer_of(model: Path, limits: Truncation | None, **changes: Any) -> PolicyTrainer:
    options: dict[str, Any] = {"learning_rate": 1e-3, "dtype": "float32", "num_threads": 1, "device": "cpu"}
    config = TrainerConfig(total_steps=9, **options | changes)
    return PolicyTrainer(config, model_path=str(model), seed=1, sampling=EngineSampling(truncation=limits))


def sampled_by(trainer: PolicyTrainer, *, version: int) -> list[TokenSequence]:
    """Return sequences with the trainer's own log-probs as those of the engine."""
    batch = drawn_batch(0)
    own = trainer.logprobs_of(batch).numpy()
    places = np.cumsum([0, *(one.num_trained_tokens for one in batch)])
    for one, start in zip(batch, places, strict=False):
        column = np.zeros(len(one), np.float32)
        column[one.loss_mask] = own[start : start + one.num_trained_tokens]
        one.logprobs, one.versions = column, np.full(len(one), version)
    return batch


@settings(max_examples=4)
@given(early=st.booleans(), minibatches=st.sampled_from([1, 2]))
def test_engine_and_trainer_agree_on_truncated_tokens(tiny: Path, early: bool, minibatches: int) -> None:
    trainer = trainer_of(
        tiny,
        Truncation(top_p=0.5),
        minibatches_per_step=minibatches,
        kl=KLConfig(coef=0.1, estimator="k1", place="reward" if early else "loss"),
        correction=CorrectionConfig(level="token", max_weight=10.0),
    )
    metrics = trainer.train_step(training_batch(sampled_by(trainer, version=5)), version=5)
    assert metrics["engine_mismatch/log_prob_diff_max"] < 1e-4
    assert 0.3 < metrics["kept_mass"] < 0.8
    if minibatches == 1:
        assert metrics["correction_weight"] == pytest.approx(1, abs=1e-4)
        assert metrics["kl"] > 0.2  # the reference's log-probs are of the whole vocabulary


def test_log_probs_that_the_engine_renormalized_are_used_as_they_are(tiny: Path) -> None:
    trainer = trainer_of(tiny, Truncation(top_k=20, reported=True))
    batch = sampled_by(trainer, version=5)
    step = trainer.begin(training_batch(batch), version=5)
    trainer._policy_update.score_proximal(step, step.all_indices)
    assert not step.tokens.log_kept.any()
    assert torch.equal(step.tokens.behaviour_or_proximal(), step.tokens.behaviour)
    assert bool((step.tokens.proximal > step.tokens.behaviour).all())
