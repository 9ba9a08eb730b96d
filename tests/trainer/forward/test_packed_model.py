from __future__ import annotations
import copy
import dataclasses
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
import pytest
import torch
import transformers
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import LearnerConfig
from areal_lite.errors import ConfigError
from areal_lite.models.kernels import ragged_attention
from areal_lite.models.kernels.ragged_attention import Segments, _by_kernel, _one_by_one
from areal_lite.models.policy_model import check_scorable, has_bfloat16, load_policy
from areal_lite.trainer.forward import packed_model
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.microbatches import Block, num_inputs
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences, pack
from areal_lite.trainer.learner import Learner
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, sequence

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {  # config, settings, whether bins may hold several sequences
    "llama": (transformers.LlamaConfig, SMALL, True),
    "qwen2": (transformers.Qwen2Config, SMALL, True),
    "qwen3": (transformers.Qwen3Config, SMALL, True),
    "gpt2": (
        transformers.GPT2Config,
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2},
        True,
    ),
    "mistral with a window": (transformers.MistralConfig, SMALL | {"sliding_window": 4}, True),
    "gemma3 with windows": (
        transformers.Gemma3TextConfig,
        SMALL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        True,
    ),
    "mamba": (
        transformers.MambaConfig,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
        False,
    ),
}


def packed_sequences(model: PackedModel, batch: Sequence[TokenSequence]) -> PackedSequences:
    packed, _ = packed_together(batch, share=model.shares_prefixes)
    assert (len(packed.lengths) < len(batch)) == model.shares_prefixes
    return packed


def states_alone(model: PackedModel, one: TokenSequence) -> Tensor:
    states = model._decoder[0](input_ids=torch.from_numpy(one.input_ids)[None])[0][0]
    return states[torch.from_numpy(one.loss_mask.nonzero()[0] - 1)]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_token_attends_only_to_its_own_sequence(name: str) -> None:
    config_class, settings, shares = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = PackedModel(transformers.AutoModelForCausalLM.from_config(config_class(**settings)).eval())
    assert model.shares_prefixes == shares
    batch = drawn_batch(3)
    with torch.no_grad():
        packed, order = packed_together(batch, share=model.shares_prefixes)
        assert (len(packed.lengths) < len(batch)) == model.shares_prefixes
        torch.testing.assert_close(
            model.states(packed), torch.cat([states_alone(model, one) for one in order]), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_side_by_side_a_token_attends_only_to_its_own_sequence(name: str) -> None:
    config_class, settings, shares = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = PackedModel(transformers.AutoModelForCausalLM.from_config(config_class(**settings)).eval())
    batch = [*drawn_batch(3), sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 9], [2]), sequence([5, 6], [1])]
    packed, _ = packed_together(batch, share=shares)
    weights = list(model.parameters())
    below = states_and_gradients(model, packed, weights)
    assert model.read_ragged() == model.ragged == shares
    side_by_side = states_and_gradients(model, packed, weights)
    torch.testing.assert_close(below[0], side_by_side[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(below[1], side_by_side[1], atol=1e-3, rtol=1e-3)


def test_side_by_side_a_bfloat16_token_on_a_cpu_attends_only_to_its_own_sequence() -> None:
    torch.manual_seed(0)
    model = PackedModel(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL)).eval())
    packed, _ = packed_together(drawn_batch(3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model.states(packed)
        assert model.read_ragged()
        torch.testing.assert_close(model.states(packed), expected, atol=0.05, rtol=0.05)


def test_states_alone_are_no_score() -> None:
    model = PackedModel(transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL)).eval())
    packed, _ = packed_together(drawn_batch(3))
    with pytest.raises(NotImplementedError, match="PackedModel gives states alone: use a scorer"):
        model(packed)


TREE = [  # forks inside trained tokens, a chain, nested forks, equal inputs, and a stranger without a common prefix
    sequence([5, 6, 7, 8, 9], [2, 3]),
    sequence([5, 6, 7, 8, 9, 10, 11], [4, 6]),
    sequence([5, 6, 7, 12, 13, 14], [3, 4, 5]),
    sequence([5, 6, 7, 12, 13, 15, 16, 17], [6, 7]),
    sequence([5, 6, 7, 12, 13, 15, 16, 18], [7]),
    sequence([5, 6, 20], [2]),
    sequence([30, 31, 32, 33], [1, 3]),
    sequence([30, 31, 32, 33, 34, 35], [4, 5], group="chain"),
    sequence([30, 31, 32, 33], [1, 3], group="chain"),
]


@pytest.mark.parametrize("how", ["padded", "wide", "ragged"])
@pytest.mark.parametrize("name", [name for name, (_, _, shares) in ARCHITECTURES.items() if shares])
def test_in_a_tree_a_token_attends_only_to_its_own_sequence(
    name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_class, settings, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = PackedModel(transformers.AutoModelForCausalLM.from_config(config_class(**settings)).eval())
    by_segment: list[Segments] = []
    attend = _one_by_one
    monkeypatch.setattr(ragged_attention, "_one_by_one", lambda *given: by_segment.append(given[3]) or attend(*given))
    for batch in (TREE, TREE[::-1], [one for one in TREE if one.group_id == "chain"]):
        packed, order = packed_together(batch)
        if how == "wide":
            monkeypatch.setattr(
                packed_model, "WIDE", len(packed.lengths) * max(packed.lengths) ** 2 - packed.num_pairs - 1
            )
        with torch.no_grad():
            model.ragged = False
            expected = [states_alone(model, one) for one in order]
            assert not by_segment
            model.ragged = how == "ragged" and model.read_ragged()
            states = model.states(packed)
        torch.testing.assert_close(states, torch.cat(expected), atol=1e-4, rtol=1e-4)
        assert packed.targets.tolist() == [int(token) for one in order for token in one.input_ids[one.loss_mask]]
        assert sum(one.num_trained_tokens for one in batch) == len(packed.predicted_at)
        assert bool(by_segment) == (how == "ragged" or (how == "wide" and not packed.is_causal))
        by_segment.clear()


def test_a_chain_is_causal_and_a_fork_is_not() -> None:
    chain = [one for one in TREE if one.group_id == "chain"]
    assert packed_together(chain)[0].is_causal
    assert pack(chain, [Block((1,), (0,), 3)], device=CPU).is_causal
    assert packed_together(chain)[0].input_ids.tolist() == [30, 31, 32, 33, 34]
    fork, _ = packed_together(TREE)
    assert not fork.is_causal
    tree = [one.input_ids[: num_inputs(one)].tolist() for one in TREE if one.input_ids[0] == 5]
    prefixes = {tuple(ids[:end]) for ids in tree for end in range(1, len(ids) + 1)}
    assert max(fork.lengths) == len(prefixes)  # every prefix is computed once
    assert len(fork.lengths) == 3


def test_a_mask_shows_each_token_its_own_path_and_padding_itself() -> None:
    packed, _ = packed_together(TREE)
    width = max(packed.lengths) + 1
    seen = packed.segments.seen(packed.lengths, width)
    assert seen.shape == (3, 1, width, width)
    start = 0
    for length, bin in zip(packed.lengths, seen[:, 0], strict=True):
        ids, positions = (part[start : start + length].tolist() for part in (packed.input_ids, packed.position_ids))
        for place, position in enumerate(positions):
            path = bin[place].nonzero()[:, 0].tolist()
            assert [positions[other] for other in path] == [*range(position + 1)]
            assert path[-1] == place
            text = [ids[other] for other in path]
            assert any(one.input_ids[: len(text)].tolist() == text for one in TREE)
        assert torch.equal(bin[length:], torch.eye(width, dtype=torch.bool)[length:])
        start += length
    assert int(seen.sum()) == packed.num_pairs + sum(width - length for length in packed.lengths)


def test_side_by_side_a_sequence_without_tokens_of_its_own_adds_no_segment() -> None:
    same = [sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 7, 9], [3])]
    packed, _ = packed_together([*same, sequence([30, 31, 32], [2], group="other")])
    assert packed.segments.query_ends.tolist() == [0, 3, 5]
    assert packed.segments.key_ends.tolist() == [0, 3, 5]
    assert packed.segments.keys.tolist() == [0, 1, 2, 3, 4]
    assert packed.predicted_at.tolist() == [1, 2, 2, 4]


def test_a_model_with_layers_other_than_full_attention_gets_a_bin_per_sequence(tiny: Path) -> None:
    """Whatever four tokens show: a window may be longer."""
    model = load_policy(str(tiny), device=CPU)
    for kinds, shares in ((["full_attention"] * 2, True), (["full_attention", "chunked_attention"], False)):
        model.config.layer_types = kinds
        assert PackedModel(model).shares_prefixes == shares


def states_and_gradients(model: PackedModel, packed: PackedSequences, weights: list[Tensor]) -> tuple[Tensor, Any]:
    states = model.states(packed)
    loss = (states * torch.linspace(-1, 1, states.shape[1])).sum()
    return states.detach(), torch.autograd.grad(loss, weights, allow_unused=True)


def test_a_model_that_reads_side_by_side_is_saved_normally(tiny: Path, tmp_path: Path) -> None:
    model = load_policy(str(tiny), device=CPU)
    model.save_pretrained(tmp_path / "before")
    assert PackedModel(model).read_ragged()
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert before == after


def test_the_varlen_kernel_accepts_its_arguments() -> None:
    # Its own implementation needs a GPU; shapes and dtypes are checked without one.
    segments = Segments(*torch.zeros(2, 4, dtype=torch.int32), torch.zeros(12, dtype=torch.int64), 5, 7)
    query, key = torch.empty(9, 8, 64, dtype=torch.bfloat16), torch.empty(12, 2, 64, dtype=torch.bfloat16)
    arguments = [tensor.to("meta") for tensor in (query, key, key)]
    for window in (None, 4):
        assert _by_kernel(*arguments, segments, 0.125, window).shape == query.shape


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("groups_heads", [True, False])
def test_a_kernel_that_groups_no_heads_gets_repeated_keys(
    monkeypatch: pytest.MonkeyPatch, groups_heads: bool, window: int | None
) -> None:
    segments = Segments(*torch.tensor([[0, 3, 8, 9], [0, 3, 11, 12]], dtype=torch.int32), torch.arange(12), 5, 8)
    query, key, value = torch.randn(9, 8, 64), *torch.randn(2, 12, 2, 64)

    def kernel(
        query: Any, key: Any, value: Any, *_: Any, enable_gqa: bool = False, scale: float, window_size: Any
    ) -> Any:
        before, after = window_size  # of keys beside the query's own
        assert after == 0
        assert before == (-1 if window is None else 3)
        assert enable_gqa or key.shape[1] == query.shape[1]
        return _one_by_one(query, key, value, segments, scale, window)

    monkeypatch.setattr(ragged_attention, "varlen_attn", kernel)
    monkeypatch.setattr(ragged_attention, "_KERNEL_GROUPS_HEADS", groups_heads)
    expected = _one_by_one(query, key, value, segments, 0.125, window)
    torch.testing.assert_close(_by_kernel(query, key, value, segments, 0.125, window), expected)


@pytest.mark.parametrize("window", [None, 4])
def test_a_segment_without_a_prefix_needs_no_memory_for_pairs_of_tokens(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    segments, (query, key, value) = Segments.causal([7, 3]), torch.randn(3, 10, 2, 8)
    limit = 7 if window is None else window
    places = torch.arange(10)
    after = places[:, None] - places
    seen = (after >= 0) & (after < limit) & ((places[:, None] < 7) == (places < 7))
    heads = (part.transpose(0, 1) for part in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, seen).transpose(0, 1)
    monkeypatch.delattr(ragged_attention, "causal_lower_right")
    torch.testing.assert_close(_one_by_one(query, key, value, segments, None, window), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_varlen_kernel_computes_what_segments_one_by_one_give() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def heads(tokens: int, number: int) -> torch.Tensor:
        return torch.randn(tokens, number, 64, generator=generator, device="cuda")

    ends = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in ([0, 3, 8, 9], [0, 3, 11, 12])]
    segments = Segments(*ends, torch.arange(12, device="cuda"), 5, 8)
    query, key, value = heads(9, 8), heads(12, 2), heads(12, 2)
    expected = _one_by_one(query, key, value, segments, 0.125)
    found = _by_kernel(*(each.bfloat16() for each in (query, key, value)), segments, 0.125)
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)


def zeros(query: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(query)


def without_prefix(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None, _window: int | None
) -> Tensor:
    ends = segments.query_ends.tolist()
    own = [
        end - (last - first) for (first, last), end in zip(pairwise(ends), segments.key_ends.tolist()[1:], strict=True)
    ]
    kept = torch.cat([torch.arange(start, end) for start, end in zip(own, segments.key_ends.tolist()[1:], strict=True)])
    alone = dataclasses.replace(segments, key_ends=segments.query_ends)
    return _one_by_one(query, key[kept], value[kept], alone, scale)


def broken(*_: Any) -> Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize("attend", [zeros, without_prefix, broken])
def test_a_model_that_would_read_other_things_side_by_side_keeps_padded_bins(
    attend: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(tiny), device=CPU)
    before = policy.config._attn_implementation
    monkeypatch.setattr(ragged_attention, "_one_by_one", attend)
    model = PackedModel(policy)
    assert not model.read_ragged()
    assert policy.config._attn_implementation == before
    assert model.balance_length == _balance_length(policy)
    monkeypatch.setattr(ragged_attention, "_one_by_one", lambda *given: 1.05 * _one_by_one(*given))  # rounded otherwise
    model = PackedModel(policy)
    assert not model.ragged
    assert model.read_ragged()
    assert model.balance_length > 10**9


def _balance_length(policy: Any) -> int:
    return sys.maxsize if has_bfloat16() else 6 * policy.config.hidden_size


def test_a_model_that_ignores_masks_gets_a_bin_per_sequence(tiny: Path) -> None:
    class IgnoresMasks(transformers.LlamaModel):
        def forward(self, input_ids: Any, position_ids: Any = None, **_: Any) -> Any:
            return super().forward(input_ids, position_ids=position_ids)

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | {"initializer_range": 0.02})).eval()
    assert PackedModel(model).shares_prefixes
    model.model.__class__ = IgnoresMasks
    assert not PackedModel(model).shares_prefixes


def test_operations_of_other_architectures() -> None:
    mamba = PackedModel(transformers.MambaForCausalLM(transformers.MambaConfig(**ARCHITECTURES["mamba"][1])))
    gpt2, single = (
        PackedModel(
            transformers.GPT2LMHeadModel(transformers.GPT2Config(**ARCHITECTURES["gpt2"][1] | {"n_head": heads}))
        )
        for heads in (4, 1)
    )
    packed, _ = packed_together([sequence([5, 6, 7, 8], [2, 3])])
    for model, attention in ((mamba, 0), (gpt2, 4 * 2 * 32 * 6), (single, 4 * 2 * 32 * 6)):
        decoder = model._decoder[0]
        layers = sum(p.numel() for p in decoder.parameters()) - decoder.get_input_embeddings().weight.numel()
        assert model.flops(packed) == 2 * 3 * layers + attention


def test_operations_without_a_head_are_those_of_the_layers(tiny: Path) -> None:
    model = PackedModel(load_policy(str(tiny), device=CPU))
    packed, _ = packed_together([sequence([5, 6, 7, 8], [2, 3])])
    config = model.model.config
    weights = sum(p.numel() for name, p in model.model.named_parameters() if "embed" not in name)
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * (1 + 2 + 3)
    assert model.flops(packed) == 2 * 3 * weights + attention
    assert model.balance_length == _balance_length(model.model)
    assert model.vocab_size == VOCABULARY
    assert not model.ragged


def test_the_decoder_is_registered_once(tiny: Path) -> None:
    model = load_policy(str(tiny), device=CPU)
    packed = PackedModel(model)
    assert [name for name, _ in packed.named_parameters()] == [f"model.{name}" for name, _ in model.named_parameters()]


def test_a_deep_copy_reads_its_own_weights(untied: Path) -> None:
    scorer = TokenScorer(load_policy(str(untied), device=CPU), temperature=1.0)
    reference = copy.deepcopy(scorer)
    packed = packed_sequences(scorer, drawn_batch(0))
    with torch.no_grad():
        before = reference(packed).logprobs
        for weight in scorer.parameters():
            weight.mul_(1.1)
        assert torch.equal(reference(packed).logprobs, before)
        assert not torch.equal(scorer(packed).logprobs, before)


def test_targets_and_their_predicting_positions_are_in_order(
    tiny: Path,
) -> None:
    batch = [sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 9], [2]), sequence([1, 2], [1], group="other")]
    packed = packed_sequences(PackedModel(load_policy(str(tiny), device=CPU)), batch)
    assert packed.input_ids.tolist() == [5, 6, 7, 1]  # the last token of a sequence is never read
    assert packed.targets.tolist() == [9, 7, 8, 2]  # the shorter of two that begin alike comes first
    assert packed.predicted_at.tolist() == [1, 1, 2, 3]


def test_a_folder_without_weights_of_a_causal_lm_is_refused(tiny: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForTokenClassification.from_pretrained(tiny, num_labels=1)
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"no weights for \['lm_head.weight'\].*complete causal LM"):
        load_policy(str(tmp_path), device=CPU)


def test_an_update_smaller_than_the_resolution_of_bfloat16_is_kept(tiny: Path) -> None:
    scorer = TokenScorer(load_policy(str(tiny), device=CPU), temperature=1.0)
    learner = Learner(scorer, *[LearnerConfig(learning_rate=1e-7, device="cpu")] * 2, total_steps=1)
    weight = scorer.model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    packed = packed_sequences(scorer, drawn_batch(0))

    def loss_of(packed: PackedSequences) -> Tensor:
        with learner.autocast():
            return -scorer(packed).logprobs.mean()

    assert learner.update(lambda max_tokens: [packed], loss_of).applied
    after = weight.detach()
    large = before.abs() > 1e-3  # bfloat16 steps are 4e-6 or more there
    assert weight.dtype == torch.float32
    assert (after != before)[before.abs() < 0.5].float().mean() > 0.9
    assert (after.bfloat16() == before.bfloat16())[large].float().mean() > 0.9


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.FalconConfig(alibi=True), "falcon with alibi"),
        (transformers.Llama4TextConfig(), "llama4_text"),
        (transformers.ModernBertDecoderConfig(), "modernbert-decoder"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_models_that_cannot_be_scored_are_refused_before_weights_load(
    config: transformers.PretrainedConfig, name: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"is a {name} model, which .*: choose a model of another architecture"):
        load_policy(str(tmp_path), device=CPU)  # there are no weights
    transformers.FalconConfig(alibi=False).save_pretrained(tmp_path)
    check_scorable(str(tmp_path))
