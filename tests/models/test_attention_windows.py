"""Over the border of a sliding window, server and trainer compute what transformers' eager attention does."""

from __future__ import annotations
import shutil
import numpy as np
import pytest
import torch
from areal_lite.embedded.decoder.lean_decoder_kernels import CompiledOperations
from areal_lite.embedded.model_runner import ModelRunner
from areal_lite.models.attention_windows import causal_window, short_windows, window_of
from areal_lite.models.fused_decoder import FusedDecoder
from areal_lite.trainer.forward.logprobs import TokenScorer
from tests.fixtures.windowed_models import FAMILIES, reference, windowed
from tests.trainer.training_data import packed_together, sequence

LEAN = ["mistral", "qwen2", "qwen3"]
IDS = np.random.default_rng(0).integers(3, 259, 80).tolist()


def read(runner: ModelRunner, slot: int, ids: list[int], past: int, *, lengths: list[int]) -> torch.Tensor:
    """Return log-probs after ``ids[:past]``, read in pieces of these lengths, then one by one; only each last token's.

    The places between have NaN.
    """
    parts = []
    while past < len(ids):
        end = past + (lengths.pop(0) if lengths else 1)
        logits = runner.forward([3, slot], [IDS[past:end], ids[past:end]], [past, past])
        parts.append(torch.full((end - past - 1, logits.shape[1]), torch.nan))
        parts.append(logits[1:].float().log_softmax(-1))
        past = end
    return torch.cat(parts)


def farthest(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of the places that were read."""
    difference = (got - expected).abs()
    assert (~difference.isnan()).sum() > 10
    return difference.nan_to_num(0.0).max()


@torch.inference_mode()
@pytest.mark.parametrize("window", [8, 24, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_reads_over_the_border_and_forks_from_any_place(family: str, window: int) -> None:
    model = windowed(family, window)
    runner = ModelRunner(model, slots=4, context_length=100)
    assert (runner._decoder is not None) == (family in LEAN)
    runner.check_against_plain_forward()
    got = read(runner, 1, IDS, 0, lengths=[window + 2, 5])
    assert farthest(got, reference(model, IDS)) < 2e-5
    for shared in (5, window - 1, window, window + 3, 70):  # a prefix of what the slot holds, copied
        fork = IDS[:shared] + IDS[::-1][: 78 - shared]
        runner.cache.copy_columns([1], [2], shared)
        got = read(runner, 2, fork, shared, lengths=[3])
        assert farthest(got, reference(model, fork)[shared:]) < 2e-5, shared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_of_one_token_less_gives_other_log_probs(family: str) -> None:
    wide, narrow = (reference(windowed(family, window), IDS) for window in (8, 7))
    assert (wide[:7] - narrow[:7]).abs().max() < 2e-5
    assert (wide[7] - narrow[7]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_model_reads_with_its_own_forward(family: str) -> None:
    model = windowed(family, 8)
    runner = ModelRunner(model, slots=4, context_length=100)
    runner._lean = None
    assert farthest(read(runner, 1, IDS, 0, lengths=[6, 9]), reference(model, IDS)) < 2e-5


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("family", LEAN)
def test_compiled_operations_are_as_near_to_float32_as_those_of_torch(family: str) -> None:
    model = windowed(family, 8, dtype=torch.bfloat16)
    expected, errors = reference(model, IDS), {}
    for compiled in (False, True):
        runner = ModelRunner(model, slots=4, context_length=100, compiled=compiled)
        assert runner._lean is not None
        assert (type(runner._lean._operations) is CompiledOperations) == compiled
        got = read(runner, 1, IDS, 0, lengths=[12, 5])
        errors[compiled] = (got - expected).square().nanmean().sqrt()
    assert errors[True] < 1.2 * errors[False]
    other = (reference(windowed(family, 9, dtype=torch.bfloat16), IDS) - expected).square().mean().sqrt()
    assert errors[True] < 0.3 * other


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma2"])  # exact attention caps no scores
def test_trainer_and_server_have_the_same_bits(family: str) -> None:
    scorer = TokenScorer(windowed(family, 24), temperature=1.0)
    assert scorer.read_exactly()
    runner = ModelRunner(windowed(family, 24), slots=4, context_length=100, exact=True)
    runner.check_against_plain_forward()
    widths: list[int] = []
    for model in (scorer.model, runner.model):  # what is left over after whole vector registers is rounded otherwise
        model.get_decoder().register_forward_hook(lambda _, __, out: widths.append(out[0].shape[1]))
    packed, _ = packed_together([sequence(IDS, range(5, 80))], share=False)
    logits = [runner.forward([0], [IDS[:5]], [0])]
    logits += [runner.forward([0], [[IDS[i]]], [i]) for i in range(5, 79)]
    expected = torch.cat(logits).log_softmax(-1).gather(1, torch.tensor(IDS[5:])[:, None])[:, 0]
    assert torch.equal(scorer(packed).logprobs.detach(), expected)
    assert set(widths) == {16, 80}
    assert (expected - reference(windowed(family, 24), IDS)[range(4, 79), IDS[5:]]).abs().max() < 2e-5


def test_exact_attention_is_refused_where_scores_are_capped() -> None:
    assert not TokenScorer(windowed("gemma2", 24), temperature=1.0).read_exactly()
    assert ModelRunner(windowed("gemma2", 24), slots=4, context_length=100, exact=True)._min_width == 0


TREE = [  # shared prefixes shorter and longer than the window of 8, forks inside them, a chain, a sequence alone
    sequence(IDS[:30], range(20, 30)),
    sequence(IDS[:40], range(30, 40)),
    sequence(IDS[:5] + IDS[50:70], range(12, 25)),
    sequence(IDS[:22] + IDS[60:80], range(22, 42)),
    sequence(IDS[:25] + IDS[60:70], range(25, 35)),
    sequence(IDS[40:], range(5, 40), group="other"),
]


def scores_and_gradients(scorer: TokenScorer, *, share: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of the tree's trained tokens, in the tree's order, and the gradient of their mean."""
    packed, order = packed_together(TREE, share=share)
    logprobs = scorer(packed).logprobs
    weights = list(scorer.parameters())
    gradients = torch.autograd.grad(logprobs.mean(), weights)
    parts = dict(zip(map(id, order), logprobs.detach().split([one.num_trained_tokens for one in order]), strict=True))
    return torch.cat([parts[id(one)] for one in TREE]), torch.cat([part.flatten() for part in gradients])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_as_a_tree_side_by_side_and_alone_log_probs_and_gradients_are_equal(family: str) -> None:
    model = windowed(family, 8)
    expected = [reference(model, one.input_ids.tolist()) for one in TREE]
    alone = torch.cat(
        [
            logprobs[one.loss_mask.nonzero()[0] - 1, one.input_ids[one.loss_mask]]
            for one, logprobs in zip(TREE, expected, strict=True)
        ]
    )
    scorer = TokenScorer(model.requires_grad_(True), temperature=1.0)
    assert scorer.shares_prefixes
    assert not FusedDecoder.fits(model.model)
    own, own_gradient = scores_and_gradients(scorer, share=False)
    assert (own - alone).abs().max() < 1e-4
    found = [scores_and_gradients(scorer)]
    assert scorer.read_ragged() == (family != "gemma2")
    if scorer.ragged:
        found += [scores_and_gradients(scorer), scores_and_gradients(scorer, share=False)]
    for logprobs, gradient in found:
        assert (logprobs - alone).abs().max() < 1e-4
        assert (gradient - own_gradient).norm() < 1e-3 * own_gradient.norm()


def test_without_segments_ragged_attention_keeps_the_window() -> None:
    model = windowed("gemma3", 8)
    model.set_attn_implementation("areal_lite_ragged")
    with torch.no_grad():
        logprobs = model(torch.tensor([IDS]), use_cache=False).logits[0].log_softmax(-1)
    assert (logprobs - reference(model, IDS)).abs().max() < 2e-5


def test_a_check_crosses_the_border_with_shorter_windows_and_restores_them() -> None:
    model = windowed("gemma3", 64)
    with short_windows(model, 3):
        assert window_of(model.config) == model.model.layers[0].self_attn.sliding_window == 3
        assert model.model.layers[1].self_attn.sliding_window is None
    assert window_of(model.config) == model.model.layers[0].self_attn.sliding_window == 64
    seen = causal_window(2, 4, 2, torch.device("cpu")).int().tolist()
    assert seen == [[0, 1, 1, 0], [0, 0, 1, 1]]
