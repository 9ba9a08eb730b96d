"""Trainer and embedded server compute a token with the same bits, alone or in its sequence."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
import transformers
from areal_lite.embedded.model_runner import ModelRunner, load_model
from areal_lite.models.kernels.exact_attention import read_exactly
from areal_lite.models.policy_model import load_policy
from areal_lite.trainer.forward.logprobs import TokenScorer
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, sequence

CONTEXT = 80


def decoded_logprobs(runner: ModelRunner, ids: list[int], prompt: int) -> list[float]:
    """Return the log-probs of the tokens after the prompt, computed one by one."""
    logprobs = []
    for past in range(prompt - 1, len(ids) - 1):
        start = past if past >= prompt else 0
        logits = runner.forward([0], [ids[start : past + 1]], [start])
        logprobs.append(torch.log_softmax(logits / torch.tensor([[0.7]]), -1)[0, ids[past + 1]].item())
    return logprobs


@pytest.mark.parametrize("length", [7, 20, 33, CONTEXT])
def test_token_by_token_gives_the_bits_of_the_whole_sequence(tiny: Path, length: int) -> None:
    scorer = TokenScorer(load_policy(str(tiny), device=torch.device("cpu")), temperature=0.7)
    assert scorer.read_exactly()
    runner = ModelRunner(
        load_model(tiny, dtype=torch.float32, device="cpu"), slots=2, context_length=CONTEXT, exact=True
    )
    runner.check_against_plain_forward()
    ids = np.random.default_rng(length).integers(3, VOCABULARY, length).tolist()
    one = sequence(ids, range(5, length))
    expected = torch.tensor(decoded_logprobs(runner, ids, 5))
    for batch in ([one], [*drawn_batch(0), one]):  # alone, and with others in one micro-batch
        packed, order = packed_together(batch, share=scorer.shares_prefixes)
        scores = scorer(packed).logprobs.split([other.num_trained_tokens for other in order])
        (own,) = (part for part, other in zip(scores, order, strict=True) if other is one)
        assert torch.equal(own.detach(), expected)


def test_exact_attention_has_the_gradients_of_plain_attention() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(VOCABULARY, (2, 40))
    gradients = []
    for _ in range(2):
        model.zero_grad()
        model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[..., 3].sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert read_exactly(model)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_model_in_half_precision_keeps_its_attention(tiny: Path) -> None:
    model = load_model(tiny, dtype=torch.bfloat16, device="cpu")
    assert not read_exactly(model)
    assert model.config._attn_implementation == "sdpa"
