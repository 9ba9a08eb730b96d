"""Compiled scores give what torch's give in float32, and their gradient one rounding to bfloat16."""

from __future__ import annotations
import logging
import math
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.models.kernels import score_kernels
from areal_lite.models.kernels.score_kernels import CompiledScores, ScoreOperations, score_operations
from areal_lite.models.truncation import Truncation
from tests.models.kernels.test_fused_decoder_kernels import assert_rounded, half, needs_compiler

CPU = torch.device("cpu")


def compiled(temperature: float) -> CompiledScores:
    operations = score_operations(CPU, torch.bfloat16, temperature, None)
    assert isinstance(operations, CompiledScores)
    return operations


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    vocabulary=st.integers(1, 70),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    entropy_grad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_and_their_gradient(
    rows: int, vocabulary: int, temperature: float, scale: float, entropy_grad: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    logits, targets = half(rows, vocabulary, scale=scale), torch.randint(vocabulary, (rows,))
    plain = ScoreOperations(temperature, None)
    (found, normalizer), (exact, kept) = (
        compiled(temperature).score(logits, targets),
        plain.score(logits.float(), targets),
    )
    torch.testing.assert_close(found, exact, atol=2e-5 * (1 + scale), rtol=1e-5)
    of_logprobs, of_entropy = torch.randn(2, rows)
    grads = of_logprobs, of_entropy if entropy_grad else None
    own = compiled(temperature).gradient(logits, targets, normalizer, found.entropy, grads)
    exact_gradient = plain.gradient(logits.float(), targets, kept, found.entropy, grads)
    assert_rounded(own, exact_gradient, atol=2e-5 * (1 + scale))


@needs_compiler
def test_each_number_has_its_place_whatever_the_strides() -> None:
    torch.manual_seed(0)
    logits, targets = half(3, 40), torch.tensor([0, 39, 7])
    scores, normalizer = compiled(1.0).score(logits, targets)
    grads = torch.randn(3, 2)
    strided = compiled(1.0).gradient(logits, targets, normalizer, scores.entropy, (grads[:, 0], grads[:, 1]))
    columns = grads[:, 0].contiguous(), grads[:, 1].contiguous()
    assert torch.equal(strided, compiled(1.0).gradient(logits, targets, normalizer, scores.entropy, columns))


@needs_compiler
def test_improbable_tokens_and_broken_logits() -> None:
    logits = torch.full((3, 33), -1e38).bfloat16()
    logits[0, 5], logits[1, 5], logits[2] = 1e38, 60.0, math.nan
    targets = torch.tensor([5, 5, 5])
    (found, _), (exact, _) = (
        compiled(1.0).score(logits, targets),
        ScoreOperations(1.0, None).score(logits.float(), targets),
    )
    torch.testing.assert_close([part[:2] for part in found], [part[:2] for part in exact])
    assert found.logprobs[2].isnan()


def test_what_does_not_fit_uses_torch() -> None:
    limits = Truncation(top_k=3)
    for device, dtype, truncation in (
        (CPU, torch.float32, None),
        (CPU, torch.bfloat16, limits),
        (torch.device("meta"), torch.bfloat16, None),
    ):
        operations = score_operations(device, dtype, 0.5, truncation)
        assert type(operations) is ScoreOperations
        assert (operations.temperature, operations.truncation) == (0.5, truncation)


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(score_kernels, "score_library", score_kernels.score_library.__wrapped__)
    with caplog.at_level(logging.INFO):
        assert type(score_operations(CPU, torch.bfloat16, 1.0, None)) is ScoreOperations
    assert caplog.messages[-1].startswith("no C++ compiler: log-probs of tokens take five times as long. Install")
