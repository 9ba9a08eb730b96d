from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from areal_lite.api.trajectory import TokenSequence
from areal_lite.errors import ConfigError
from areal_lite.models.kernels import score_kernels
from areal_lite.models.kernels.exact_attention import MIN_ROWS
from areal_lite.models.kernels.score_kernels import TokenScores
from areal_lite.models.policy_model import load_policy
from areal_lite.trainer.forward import logprobs
from areal_lite.trainer.forward.logprobs import ChunkedScores, Scoring, TokenScorer
from tests.trainer.oracle_cases import case, inputs
from tests.trainer.training_data import VOCABULARY, drawn_batch, packed_together, sequence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_policy(str(tiny), device=CPU)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGIT_BYTES", 3 * 4 * 7)  # three positions over seven tokens


def packed_scores(scorer: TokenScorer, batch: list[TokenSequence], **how: Any) -> TokenScores:
    return scorer(packed_together(batch, share=scorer.shares_prefixes)[0], **how)


def scores_alone(model: Any, one: TokenSequence, temperature: float) -> list[Tensor]:
    """Return the scores of a sequence's trained tokens from its full logits."""
    ids, trained = torch.from_numpy(one.input_ids), torch.from_numpy(one.loss_mask.nonzero()[0])
    logits = model(input_ids=ids[None]).logits[0, trained - 1].double() / temperature
    return full_scores(logits, ids[trained])


def full_scores(logits: Tensor, targets: Tensor) -> list[Tensor]:
    every = torch.log_softmax(logits, -1)
    probs = every.exp()
    return [every.gather(1, targets[:, None])[:, 0], -(probs * every).sum(1), probs.square().sum(1)]


def assert_scores_are_those_alone(model: Any, batch: list[TokenSequence], temperature: float) -> None:
    scorer = TokenScorer(model, temperature=temperature)
    with torch.no_grad():
        packed, order = packed_together(batch, share=scorer.shares_prefixes)
        ours = scorer(packed)
        expected = [
            torch.cat(parts) for parts in zip(*(scores_alone(model, one, temperature) for one in order), strict=True)
        ]
    assert [scores.dtype for scores in ours] == [torch.float32] * 4
    assert not ours.log_kept.any()
    torch.testing.assert_close([scores.double() for scores in ours[:3]], expected, atol=5e-5, rtol=5e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), temperature=st.sampled_from([0.7, 1.0, 1.5, 2.0]))
def test_packed_scores_equal_those_of_each_sequence_alone(model: Any, seed: int, temperature: float) -> None:
    assert_scores_are_those_alone(model, drawn_batch(seed), temperature)


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def built(config: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize(("spread", "cap"), [(0.2, 2.0), (0.02, 30.0)])
def test_a_model_that_caps_logits_computes_full_logits(entropy_grad: bool, spread: float, cap: float) -> None:
    model = built(transformers.Gemma2Config(**SMALL, head_dim=8, initializer_range=spread, final_logit_softcapping=cap))
    assert_scores_are_those_alone(model, drawn_batch(3), 0.9)
    scorer = TokenScorer(model, temperature=0.9)
    assert scorer._head == (None,)
    scores = packed_scores(scorer, drawn_batch(3), entropy_grad=entropy_grad)
    assert [one.requires_grad for one in scores] == [True, entropy_grad, False, False]


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(**SMALL),
        transformers.Qwen3Config(**SMALL, tie_word_embeddings=True),
        transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2),
        transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    ],
    ids=lambda config: config.model_type,
)
def test_other_models_never_build_full_logits(config: Any) -> None:
    model = built(config)
    assert TokenScorer(model, temperature=1.0)._head == (model.lm_head,)


def test_verl_computes_the_same_scores_from_logits() -> None:
    logits, labels = inputs("logits", torch.float32).flatten(0, 1), inputs("labels", torch.float32).flatten()
    scores = ChunkedScores.apply(logits, torch.eye(logits.shape[1]), None, labels, Scoring(1.0))
    for ours, key in zip(scores[:3], ("logp.naive", "entropy.from_logits", "logp.sum_pi_squared"), strict=True):
        expected = case(key, "value", torch.float32).flatten()
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_gradients_equal_those_of_the_full_softmax(
    positions: int, entropy_grad: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lite.trainer.forward.logprobs.LOGIT_BYTES", positions * 4 * 7)
    torch.manual_seed(0)
    tokens = 8  # chunks of 3, 3 and 2, or of 1
    inputs = [torch.randn(tokens, 5), torch.randn(7, 5), *([torch.randn(7)] if bias else [])]
    targets, weights = torch.randint(7, (tokens,)), torch.randn(tokens)

    def full(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> list[Tensor]:
        return full_scores(torch.nn.functional.linear(states, weight, bias) / 0.8, targets)

    def chunked(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return ChunkedScores.apply(states, weight, bias, targets, Scoring(0.8, entropy_grad=entropy_grad))

    results = []
    for scores in (full, chunked):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        logprobs, entropies, squares = scores(*leaves)[:3]
        loss = (weights * logprobs).sum() + (entropies.square().sum() if entropy_grad else 0.0)
        loss.backward()
        results.append([logprobs, entropies, squares.detach(), *(leaf.grad for leaf in leaves)])
    assert results[1][1].requires_grad == entropy_grad
    torch.testing.assert_close(*([tensor.detach() for tensor in result] for result in results), atol=1e-5, rtol=1e-5)


class Shapes(TorchDispatchMode):
    """Notes the shape of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.seen |= {tuple(one.shape) for one in torch.utils._pytree.tree_leaves(made) if isinstance(one, Tensor)}
        return made


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_output_embedding_allocates_no_gradient(frozen: bool) -> None:
    states, weight = torch.randn(8, 5, requires_grad=True), torch.randn(7, 5, requires_grad=not frozen)
    scores = ChunkedScores.apply(states, weight, None, torch.zeros(8, dtype=torch.long), Scoring(1.0))
    with Shapes() as shapes:
        scores[0].sum().backward()
    assert states.grad is not None
    assert (weight.grad is None, (7, 5) not in shapes.seen) == (frozen, frozen)
    assert (8, 7) not in shapes.seen  # logits of all positions
    assert (3, 7) in shapes.seen


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("tokens", [3, 4])
def test_logits_of_a_single_chunk_are_computed_once(tokens: int) -> None:
    states, weight = torch.randn(tokens, 5, requires_grad=True), torch.randn(7, 5)
    scores = ChunkedScores.apply(states, weight, None, torch.zeros(tokens, dtype=torch.long), Scoring(1.0))
    with Shapes() as shapes:
        scores[0].sum().backward()
    assert ((MIN_ROWS, 7) in shapes.seen) == (tokens > 3)


@pytest.mark.parametrize("rows", [1, MIN_ROWS, MIN_ROWS + 3])
def test_a_product_of_few_positions_has_as_many_rows_as_give_the_same_bits(rows: int) -> None:
    head = logprobs._Head(torch.randn(7, 5), None)
    states = torch.randn(rows, 5)
    with Shapes() as shapes:
        logits = head.logits(states)
    torch.testing.assert_close(logits, states @ head.weight.T)
    assert max(shape[0] for shape in shapes.seen if shape[1:] == (7,)) == max(rows, MIN_ROWS)


@pytest.mark.parametrize(
    ("device", "dtype", "vocabulary", "positions"),
    [
        ("meta", torch.bfloat16, 49_152, 341),  # as on a GPU
        ("meta", torch.bfloat16, 151_936, 110),
        ("cpu", torch.bfloat16, 49_152, 682),
        ("cpu", torch.float32, 49_152, 341),
        ("cpu", torch.bfloat16, 50_000_000, 1),
    ],
)
def test_logits_that_exist_at_once_have_a_fixed_size(
    device: str, dtype: torch.dtype, vocabulary: int, positions: int
) -> None:
    weight = torch.empty(1, 1, dtype=dtype, device=device).expand(vocabulary, 1)
    assert logprobs._Head(weight, None).chunk == positions


@pytest.mark.parametrize(
    ("device", "vocabulary", "rows"), [("cpu", 7, 4), ("cpu", 9, 3), ("cpu", 99, 1), ("meta", 7, 8)]
)
def test_a_cpu_works_on_as_many_rows_as_its_cache_holds(
    device: str, vocabulary: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_kernels, "_BLOCK_BYTES", 4 * 4 * 7)
    blocks = [*score_kernels._blocks(torch.empty(8, vocabulary, device=device))]
    assert [block.start for block in blocks] == list(range(0, 8, rows))
    assert [block.stop for block in blocks] == [*range(0, 8, rows)][1:] + [8]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cpu_computes_a_weight_gradient_in_pieces(device: str, add: bool) -> None:
    total, states = torch.ones(5000, 2, device=device), torch.ones(3, 2, dtype=torch.bfloat16, device=device)
    head = logprobs._Head(total.bfloat16(), None)
    with Shapes() as shapes:
        head.weight_gradient(total, torch.ones(3, 5000, dtype=torch.bfloat16, device=device), states, add=add)
    assert ((5000, 2) in shapes.seen) == (device == "meta")
    assert device == "meta" or bool((total == 3 + add).all())


@pytest.mark.parametrize("add", [False, True])
def test_a_weight_gradient_of_the_same_dtype(add: bool) -> None:
    total = torch.ones(7, 2) if add else torch.full((7, 2), torch.nan)
    logprobs._Head(torch.ones(7, 2), None).weight_gradient(total, torch.ones(3, 7), torch.ones(3, 2), add=add)
    assert bool((total == 3 + add).all())


def test_without_a_request_entropies_carry_no_gradient(model: Any) -> None:
    scores = packed_scores(TokenScorer(model, temperature=1.0), [sequence([5, 6, 7], [2])])
    assert [one.requires_grad for one in scores] == [True, False, False, False]


def test_no_cache_of_keys_and_values_is_made(model: Any) -> None:
    scorer = TokenScorer(model, temperature=1.0)
    packed, _ = packed_together([sequence([5, 6, 7], [2])])
    caches = []

    def keep(_: Any, __: Any, out: Any) -> None:
        caches.append(out.past_key_values)

    with model.register_forward_hook(keep):
        scorer.read(model, packed)
    assert caches == [None]


def test_tokens_after_the_last_trained_one_are_not_read(model: Any) -> None:
    scorer = TokenScorer(model, temperature=1.0)
    with torch.no_grad():
        short = packed_scores(scorer, [sequence([5, 6, 7], [2])])
        long = packed_scores(scorer, [sequence([5, 6, 7, 8, 9], [2])])
    assert short.logprobs.item() == long.logprobs.item()


def test_a_temperature_of_zero_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="temperature is 0"):
        TokenScorer(model, temperature=0.0)
