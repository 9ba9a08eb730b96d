"""Compiled operations give what torch's give in float32, up to one rounding to bfloat16."""

from __future__ import annotations
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from areal_lite.models.decoder_family import Heads
from areal_lite.models.kernels import fused_decoder_kernels
from areal_lite.models.kernels.fused_decoder_kernels import (
    CompiledOperations,
    DecoderOperations,
    Tokens,
    fused_decoder_operations,
)
from areal_lite.models.kernels.ragged_attention import Segments

HALF_STEP = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
PLAIN = DecoderOperations()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 3], ids="{} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


def compiled() -> CompiledOperations:
    operations = fused_decoder_operations(torch.bfloat16)
    assert isinstance(operations, CompiledOperations)
    return operations


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


def assert_rounded(found: Tensor, exact: Tensor, atol: float = 1e-6) -> None:
    """Check that ``found`` is ``exact`` in bfloat16, but for errors of float32 that turn the rounding around."""
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, atol=atol, rtol=HALF_STEP)
    large = exact.abs() > 100 * atol
    assert (found != exact.bfloat16())[large].sum() <= 5 + 0.05 * large.sum()


def with_gradient(operation: Callable[..., Tensor], states: Tensor, grad: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the operation's result, and the gradient of ``states`` from that of the result."""
    states = states.detach().requires_grad_()
    result = operation(states, *given)
    return result.detach(), torch.autograd.grad(result, states, grad)[0]


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 48), (7, 33)])
@pytest.mark.usefixtures("threads")
def test_sum_and_norm_and_their_gradients(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    hidden, added, scale = torch.randn(shape) * 3, half(*shape, scale=3.0), torch.randn(shape[1])
    total, normed, inverse = compiled().add_norm(hidden, added, scale, 1e-2)
    expected = PLAIN.add_norm(hidden, added.float(), scale, 1e-2)
    torch.testing.assert_close((total, inverse), (expected[0], expected[2]), atol=0.0, rtol=1e-6)
    assert_rounded(normed, expected[1])
    grad, grad_total = half(*shape), torch.randn(shape[1]).expand(shape)
    found = compiled().norm_gradient(grad, grad_total, total, scale, inverse)
    exact = PLAIN.norm_gradient(grad.float(), grad_total, total, scale, inverse)
    torch.testing.assert_close((found[0], found[2]), (exact[0], exact[2]), atol=1e-5, rtol=1e-5)
    assert_rounded(found[1], exact[0], atol=1e-5)


@needs_compiler
def test_numbers_half_way_between_two_are_rounded_to_the_even_one() -> None:
    numbers = torch.arange(-600.0, 600.0).view(2, 600)  # above 256 every other one
    nothing, scale = torch.zeros_like(numbers).bfloat16(), torch.ones(600)
    _, rounded, _ = compiled().norm_gradient(nothing, numbers, numbers, scale, torch.ones(2, 1))
    assert torch.equal(rounded, numbers.bfloat16())


@needs_compiler
@pytest.mark.usefixtures("threads")
def test_the_gate_and_its_gradient_for_numbers_of_any_size() -> None:
    torch.manual_seed(0)
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 20.0, -20.0, 79.0, -79.0, 90.0, -90.0, 3e38, -3e38]).repeat(5, 4)
    joined = torch.cat([gate.bfloat16(), half(5, 400), half(5, 448)], -1)
    bounded = joined.float().clamp(min=-80.0)
    grad = half(5, 448)
    found = with_gradient(compiled().gate, joined, grad)
    for one, exact in zip(found, with_gradient(PLAIN.gate, bounded, grad.float()), strict=True):
        assert_rounded(one, exact, atol=1e-30)


def tokens_of(lengths: list[int], heads: Heads, *, trees: bool) -> Tokens:
    """Return tokens at random angles; with ``trees`` each bin is a random tree of branches."""
    angles = torch.rand(sum(lengths), heads.width // 2) * 6
    cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    return Tokens(cos, sin, lengths, Segments.of(branches(lengths), torch.device("cpu")) if trees else None, heads)


def branches(lengths: list[int]) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Yield the parts of a random tree for each bin: each continues a random part of an earlier path."""
    rng = np.random.default_rng(torch.randint(1 << 30, ()).item())
    start = 0
    for length in lengths:
        paths, begin = [np.arange(0)], start
        while begin < start + length:
            end = int(rng.integers(begin + 1, start + length + 1))
            path = paths[rng.integers(len(paths))]
            prefix = path[: rng.integers(len(path) + 1)]
            yield prefix, begin, end
            paths.append(np.concatenate((prefix, np.arange(begin, end))))
            begin = end
        start += length


def exact_attention(turned: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return what each query reads, and the log of its softmax denominator, in float32, bin by bin."""
    queries, keys, _, scale = tokens.heads
    parts = []
    for number, rows in enumerate(turned.split(tokens.lengths)):
        length = len(rows)
        query, key, value = rows[:, :queries], *rows[:, queries:].repeat_interleave(queries // keys, 1).chunk(2, 1)
        seen = torch.ones(length, length).tril() if tokens.seen is None else tokens.seen[number, 0, :length, :length]
        scores = torch.einsum("qhd,khd->qhk", query, key).mul(scale).masked_fill(seen[:, None] == 0, -torch.inf)
        parts.append((torch.einsum("qhk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)))
    read, normalizer = zip(*parts, strict=True)
    return torch.cat(read), torch.cat(normalizer)


def assert_attention(tokens: Tokens, scale: float = 1.0) -> None:
    (queries, keys, width, _), rows = tokens.heads, len(tokens.cos)
    states = half(rows, (queries + 2 * keys) * width, scale=scale).requires_grad_()
    grad = half(rows, queries * width)
    read = compiled().attend(states, tokens)
    (found,) = torch.autograd.grad(read, states, grad, retain_graph=True)
    turned: Tensor = read.grad_fn.saved_tensors[0]  # type: ignore[union-attr]
    exact = states.detach().view(rows, -1, width).float().requires_grad_()
    turning = torch.cat([tokens.turned(exact[:, :-keys]), exact[:, -keys:]], 1)
    assert_rounded(turned, turning.detach().flatten(1), atol=1e-6 * (1 + scale))
    # From here on exact, but for what was rounded before: the turned states, and in the gradient what was read.
    still = turned.float().view(rows, -1, width).requires_grad_()
    exactly_read, normalizer = exact_attention(still, tokens)
    assert_rounded(read.detach(), exactly_read.detach().flatten(1), atol=2e-5 * (1 + scale**2))
    by_head = grad.float().view(rows, queries, width)
    rounding = ((exactly_read - read.view(rows, queries, width).float()) * by_head).sum(-1).detach()
    (below,) = torch.autograd.grad((exactly_read * by_head).sum() + (normalizer * rounding).sum(), still)
    (back,) = torch.autograd.grad(turning, exact, below)
    assert_rounded(found, back.flatten(1), atol=3e-4 * (1 + scale**2))


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    keys=st.integers(1, 3),
    groups=st.integers(1, 7),
    width=st.sampled_from([2, 8, 16, 24, 64, 80]),
    trees=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 5.0]),
    seed=st.integers(0, 99),
)
def test_attention_and_its_gradient(
    lengths: list[int], keys: int, groups: int, width: int, trees: bool, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    assert_attention(tokens_of(lengths, Heads(keys * groups, keys, width, 0.3), trees=trees), scale)


@needs_compiler
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.usefixtures("threads")
def test_attention_of_longer_bins(trees: bool) -> None:
    torch.manual_seed(0)
    assert_attention(tokens_of([300, 255], Heads(4, 2, 16, 0.25), trees=trees))


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "threads", "kernel"),
    [([40, 3], 2, True), ([41, 3], 2, False), ([40, 3], 4, True), ([40, 3], 5, False)],
    indirect=["threads"],
)
def test_bins_that_are_too_long_or_too_few_are_torchs(
    lengths: list[int], threads: None, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_decoder_kernels, "_LONGEST", 40)
    torch.manual_seed(0)
    tokens = tokens_of(lengths, Heads(2, 2, 8, 0.25), trees=False)
    states, grad = half(sum(lengths), 48), half(sum(lengths), 16)
    results = [
        torch.cat(with_gradient(operations.attend, states, grad, tokens), 1) for operations in (PLAIN, compiled())
    ]
    assert torch.equal(*results) != kernel
    assert (results[0] - results[1]).norm() < 0.01 * results[0].norm()


@needs_compiler
def test_rows_in_another_order_are_refused() -> None:
    with pytest.raises(AssertionError):
        compiled().gate(half(8, 4).T)


def test_other_dtypes_use_torch() -> None:
    assert type(fused_decoder_operations(torch.float32)) is DecoderOperations


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert type(fused_decoder_operations.__wrapped__(torch.bfloat16)) is DecoderOperations
    assert caplog.messages[-1].startswith("no C++ compiler: training steps take a quarter longer. Install g++")
