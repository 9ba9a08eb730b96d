"""The fused decoder gives the states and gradients of the model's own forward pass."""

from __future__ import annotations
import copy
from collections.abc import Sequence
from typing import Any
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.config.trainer_config import LearnerConfig
from areal_lite.models import fused_decoder
from areal_lite.models.decoder_family import Heads
from areal_lite.models.fused_decoder import FusedDecoder
from areal_lite.models.kernels import fused_decoder_kernels
from areal_lite.models.kernels.fused_decoder_kernels import DecoderOperations, Tokens
from areal_lite.models.policy_model import prepare
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences
from areal_lite.trainer.learner import Learner
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, sequence

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama with biases": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama with long rope": transformers.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    ),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SMALL | {"num_key_value_heads": 4}),
    "qwen3": transformers.Qwen3Config(**SMALL),
}
OTHERS = {
    "gelu": transformers.LlamaConfig(**SMALL, hidden_act="gelu"),
    "gemma": transformers.GemmaConfig(**SMALL),
    "a window": transformers.MistralConfig(**SMALL, sliding_window=4),
    "granite": transformers.GraniteConfig(**SMALL, residual_multiplier=0.5),
}


def packed_model(config: Any) -> PackedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms begin at 1 and biases at 0
                weight.add_(0.3 * torch.randn_like(weight), alpha=1.0 if "norm" in name else 0.5)
    return PackedModel(model)


def states_and_gradients(model: PackedModel, packed: PackedSequences, states: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    (states * torch.randn_like(states)).sum().backward()
    weights = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"states": states.detach()} | {name: grad.clone() for name, grad in weights.items()}


def by_fused(model: PackedModel, packed: PackedSequences, dtype: torch.dtype) -> dict[str, Tensor]:
    fused = FusedDecoder(model._decoder[0], dtype)
    layout = packed.lengths, None if packed.is_causal else packed.segments
    hidden = model.model.get_input_embeddings()(packed.input_ids)
    return states_and_gradients(
        model, packed, fused.states(hidden, packed.position_ids[None], *layout, packed.predicted_at)
    )


def by_model(model: PackedModel, packed: PackedSequences) -> dict[str, Tensor]:
    return states_and_gradients(model, packed, model.states(packed))


LAYOUTS = {
    "shared prompts": drawn_batch(3),
    "a chain": [sequence([5, 6, 7, 8, 9, 10], [2, 3, 5]), sequence([30, 31, 32], [1, 2])],
}


@pytest.mark.parametrize("kernel", [False, True], ids=["products", "kernel"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_states_and_gradients_are_those_of_the_model(
    name: str, layout: str, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_decoder_kernels, "_PRODUCTS", 0 if kernel else 1000)
    monkeypatch.setattr(fused_decoder_kernels, "_SCORES", 4 * 12**2)  # one bin at once, or two
    model = packed_model(FAMILIES[name])
    assert model._fused
    packed, _ = packed_together(LAYOUTS[layout])
    assert packed.is_causal == (layout == "a chain")
    expected = by_model(model, packed)
    torch.testing.assert_close(by_fused(model, packed, torch.float32), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("with_compiler", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_under_autocast_it_is_as_close_to_float32_as_the_model(
    name: str, with_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_compiler:
        monkeypatch.setattr(fused_decoder, "fused_decoder_operations", lambda dtype: DecoderOperations())
    model = packed_model(FAMILIES[name])
    packed, _ = packed_together(LAYOUTS["shared prompts"])
    exact = by_model(model, packed)

    def error(found: dict[str, Tensor]) -> float:
        assert found.keys() == exact.keys()
        assert all(grad.dtype == torch.float32 for grad in found.values())
        errors = [(found[key] - exact[key]).norm() / exact[key].norm() for key in exact]
        return float(torch.stack(errors).mean())

    with torch.autocast("cpu", torch.bfloat16):
        fused = error(by_model(model, packed))
        model._fused = ()
        own = error(by_model(model, packed))
    assert 1e-3 < fused < 1.3 * own


def heads(queries: int) -> Heads:
    return Heads(queries, 1, 8, 1.0)


def test_pieces_hold_as_many_scores_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decoder_kernels, "_SCORES", 2 * 4 * 12**2)
    angles = torch.zeros(50, 8)
    tokens = Tokens(angles, angles, [12, 11, 9, 9, 9], None, heads(4))
    assert list(tokens.pieces()) == [slice(0, 2), slice(2, 5)]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), most=st.integers(1, 300))
def test_a_piece_is_one_bin_or_fits_and_the_next_bin_would_not(lengths: list[int], most: int) -> None:
    angles = torch.zeros(sum(lengths), 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_decoder_kernels, "_SCORES", most)
        pieces = list(Tokens(angles, angles, lengths, None, heads(2)).pieces())
    assert [place for piece in pieces for place in range(piece.start, piece.stop)] == list(range(len(lengths)))
    for piece in pieces:
        bins, longest = piece.stop - piece.start, max(lengths[piece])
        assert bins == 1 or 2 * bins * longest**2 <= most
        if piece.stop < len(lengths):
            assert 2 * (bins + 1) * max(longest, lengths[piece.stop]) ** 2 > most


@pytest.mark.parametrize("beyond", [0, 1])
def test_bins_up_to_the_longest_length_for_products_take_them(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it no mask is made: of a long bin it takes quadratic memory."""
    masks: list[Any] = []

    def kernel(query: Tensor, *_: Any, is_causal: bool, **__: Any) -> Tensor:
        masks.append(is_causal)
        return query

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    length = fused_decoder_kernels._PRODUCTS + beyond
    angles = torch.zeros(length, 8)
    DecoderOperations().attend(torch.zeros(length, 32), Tokens(angles, angles, [length], None, heads(2)))
    assert masks == [True] * beyond


def test_weights_that_stay_the_same_are_rounded_once() -> None:
    product = fused_decoder._Product(torch.bfloat16, torch.nn.Linear(4, 3))
    rounded = product.rounded()
    rounded.zero_()
    assert not product.rounded().any()


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_another_form_keep_their_own_forward_pass(name: str) -> None:
    assert not packed_model(OTHERS[name])._fused


def test_weights_of_another_dtype_keep_the_model_s_own_forward_pass() -> None:
    assert not PackedModel(packed_model(FAMILIES["llama"]).model.bfloat16())._fused


def test_recomputed_activations_keep_the_model_s_own_forward_pass() -> None:
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"])
    prepare(model, device=torch.device("cpu"), gradient_checkpointing=True)
    assert not PackedModel(model)._fused


def forward(model: PackedModel, batch: Sequence[Any]) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.states(packed_together(batch)[0])


@pytest.mark.parametrize("way", ["optimizer", "load_state_dict", "data"])
def test_changed_weights_are_rounded_again(way: str) -> None:
    model, batch = packed_model(FAMILIES["llama"]), LAYOUTS["a chain"]
    before = forward(model, batch)
    weight = model.model.model.layers[1].mlp.up_proj.weight
    if way == "optimizer":
        config = LearnerConfig(learning_rate=0.5)
        learner = Learner(model, config, config, total_steps=1)
        assert learner.update(lambda _: [weight], lambda weight: weight.sum()).applied
    elif way == "load_state_dict":
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    else:
        weight.data = weight.data * 2
    after = forward(model, batch)
    assert not torch.equal(after, before)
    assert torch.equal(after, forward(PackedModel(copy.deepcopy(model.model)), batch))


def test_a_copy_reads_its_own_weights() -> None:
    model, batch = packed_model(FAMILIES["llama"]), LAYOUTS["a chain"]
    before = forward(model, batch)
    frozen = copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        model.model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert not torch.equal(forward(model, batch), before)
    assert torch.equal(forward(frozen, batch), before)
