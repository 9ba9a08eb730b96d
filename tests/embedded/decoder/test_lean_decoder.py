"""A lean pass gives the logits of the model's own forward, in bfloat16 bit for bit."""

from __future__ import annotations
from typing import Any
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from areal_lite.embedded.decoder import lean_decoder_kernels
from areal_lite.embedded.model_runner import ModelRunner
from areal_lite.models.decoder_family import FAMILIES

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
}
PAST = [5, 1, 9]
TOKENS = [[(7 * i + 11 * slot) % 60 for i in range(20)] for slot in range(3)]


def tiny(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **sizes, **heads, max_position_embeddings=64, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name or "bias" in name:  # ones and zeros would hide a weight that is left out
            weight.data.normal_(0.0, 0.5)
    return model


def run(runner: ModelRunner, slots: list[int], *, steps: int = 6) -> torch.Tensor:
    """Return ``[2 + steps, n, vocab]`` logits after prompts, after extensions by 3, 1 and 2 tokens, and decoded."""
    past, logits = [0] * 3, []
    for lengths in (PAST, [3, 1, 2], *[[1] * 3] * steps):
        ends = [start + length for start, length in zip(past, lengths, strict=True)]
        tokens = [TOKENS[i][past[i] : ends[i]] for i in range(3)]
        logits.append(runner.forward(slots, tokens, past))
        past = ends
    return torch.stack(logits)


@pytest.mark.parametrize("slots", [[0, 1, 2], [3, 0, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_model(family: str, dtype: torch.dtype, slots: list[int]) -> None:
    model = tiny(family, dtype)
    own = ModelRunner(model, slots=5, context_length=32, compiled=False)
    own._lean = None
    expected = run(own, slots)
    passes: list[int] = []
    model.model.register_forward_pre_hook(lambda _model, _inputs: passes.append(1))
    actual = run(ModelRunner(model, slots=5, context_length=32, compiled=False), slots)
    assert not passes, "a pass went through the model's own forward"
    torch.testing.assert_close(actual, expected, atol=1e-5 if dtype == torch.float32 else 0.0, rtol=0.0)


def test_every_family_is_tested() -> None:
    assert {type(tiny(family, torch.float32)).__name__ for family in MODELS} == {
        f"{name}ForCausalLM"
        for name in FAMILIES
        if "VL" not in name  # tests/embedded/test_images.py
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODELS)
def test_new_weights_act(family: str, dtype: torch.dtype) -> None:
    model, other = tiny(family, dtype), tiny(family, dtype)
    torch.manual_seed(1)
    tensors = {name: torch.randn_like(tensor) * 0.2 for name, tensor in model.named_parameters()}
    runner = ModelRunner(model, slots=5, context_length=32, compiled=False)
    before = run(runner, [0, 1, 2])
    runner.load_tensors(tensors.items(), tensors.keys())
    other.load_state_dict(tensors, strict=False)
    own = ModelRunner(other, slots=5, context_length=32, compiled=False)
    own._lean = None
    after = run(runner, [0, 1, 2])
    atol = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(after, run(own, [0, 1, 2]), atol=atol, rtol=0.0)
    assert not torch.allclose(before, after, atol=0.1)


@pytest.mark.parametrize("change", ["missing", "another signature", "another result"])
def test_a_torch_whose_private_operators_changed_gets_plain_products(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, Any] = {"missing": AttributeError(), "another signature": RuntimeError()}

    def packed_product(states: Any, packed: Any, bias: Any) -> Any:
        if error := results.get(change):
            raise error
        return states + 1

    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    monkeypatch.setattr(lean_decoder_kernels, "_reordered", lambda weight: weight)
    monkeypatch.setattr(lean_decoder_kernels, "_reordered_product", packed_product)
    assert not lean_decoder_kernels.can_pack.__wrapped__()
    monkeypatch.setattr(lean_decoder_kernels, "_reordered_product", lambda states, packed, bias: states @ packed)
    assert lean_decoder_kernels.can_pack.__wrapped__()
