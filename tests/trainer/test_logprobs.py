from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_lite.data.training_sample import TrainingSample
from areal_lite.errors import ConfigError
from areal_lite.trainer.logprobs import LOGIT_POSITIONS, ChunkedScores, TokenScorer, pack
from areal_lite.trainer.microbatches import plan_rows
from areal_lite.trainer.policy_model import load_policy
from tests.trainer.oracle import oracle
from tests.trainer.training_data import VOCABULARY, drawn_batch, sample

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip


def alone(model: Any, one: TrainingSample, temperature: float = 1.0) -> Tensor:
    """Log-probs of a sample's trained tokens from full logits of that sequence."""
    ids = torch.from_numpy(one.input_ids)
    logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / temperature, -1)
    return torch.stack([logprobs[t - 1, ids[t]] for t in one.loss_mask.nonzero()[0]])


def packed_scores(scorer: TokenScorer, batch: list[TrainingSample], **how: Any) -> tuple[Tensor, Tensor]:
    rows = plan_rows(
        batch, range(len(batch)), max_tokens=10_000, balance_length=10_000, share=scorer.shares_prefixes
    )
    assert [index for row in rows for index in row.samples] == list(range(len(batch)))
    return scorer(pack(batch, rows, device=CPU), **how)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_policy(str(tiny), device=CPU)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.7, 1.0, 1.5]))
def test_packed_log_probs_are_those_of_each_sequence_alone(model: Any, seed: int, temperature: float) -> None:
    batch = drawn_batch(seed)
    with torch.no_grad():
        ours, _ = packed_scores(TokenScorer(model, temperature=temperature), batch)
        expected = torch.cat([alone(model, one, temperature) for one in batch])
    assert len(ours) == sum(one.num_trained_tokens for one in batch)
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-5)


ARCHITECTURES = {
    "qwen2": (transformers.Qwen2Config, {}, True, True),
    "qwen3": (transformers.Qwen3Config, {}, True, True),
    "gpt2": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        True,
        True,
    ),
    "mistral with a window": (transformers.MistralConfig, {"sliding_window": 4}, False, True),
    "gemma2 with soft caps": (transformers.Gemma2Config, {}, False, False),
    "mamba": (transformers.MambaConfig, {"hidden_size": 32, "num_hidden_layers": 2}, False, True),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures_agree_too(name: str) -> None:
    config_class, settings, shares, plain_head = ARCHITECTURES[name]
    torch.manual_seed(0)
    small = {"vocab_size": VOCABULARY} if name in ("gpt2", "mamba") else SMALL
    model = transformers.AutoModelForCausalLM.from_config(config_class(**small, **settings)).eval()
    scorer = TokenScorer(model, temperature=0.9)
    assert (scorer.shares_prefixes, scorer._head is not None) == (shares, plain_head)
    batch = drawn_batch(3)
    with torch.no_grad():
        ours, _ = packed_scores(scorer, batch)
        torch.testing.assert_close(
            ours, torch.cat([alone(model, one, 0.9) for one in batch]), atol=1e-4, rtol=1e-4
        )


def test_verl_computes_the_same_log_probs_and_entropies_from_logits() -> None:
    logits, labels = oracle("in/logits").flatten(0, 1).float(), oracle("in/labels").flatten()
    identity = torch.eye(logits.shape[1])
    logprobs, entropies = ChunkedScores.apply(logits, identity, None, labels, 1.0, False)
    torch.testing.assert_close(
        logprobs.double(), oracle("out/logp.naive/value").flatten(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        entropies.double(), oracle("out/entropy.from_logits/value").flatten(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunked_gradients_are_those_of_the_full_softmax(entropy_grad: bool) -> None:
    torch.manual_seed(0)
    tokens = 2 * LOGIT_POSITIONS + 3
    inputs = [torch.randn(tokens, 5), torch.randn(7, 5), torch.randn(7)]
    targets, weights = torch.randint(7, (tokens,)), torch.randn(tokens)

    def full(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax((states @ weight.T + bias) / 0.8, -1)
        entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, targets[:, None])[:, 0], entropies

    def chunked(states: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return ChunkedScores.apply(states, weight, bias, targets, 0.8, entropy_grad)

    gradients = []
    for scores in (full, chunked):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        logprobs, entropies = scores(*leaves)
        loss = (weights * logprobs).sum() + (entropies.square().sum() if entropy_grad else 0.0)
        loss.backward()
        gradients.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-3, rtol=1e-4)


def test_nothing_after_the_last_trained_token_is_read(model: Any) -> None:
    scorer = TokenScorer(model, temperature=1.0)
    with torch.no_grad():
        short, _ = packed_scores(scorer, [sample([5, 6, 7], [2])])
        long, _ = packed_scores(scorer, [sample([5, 6, 7, 8, 9], [2])])
    assert short.item() == long.item()


def test_a_temperature_of_zero_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        TokenScorer(model, temperature=0.0)
