"""Compiled operations give what torch's give, and their absence costs nothing but time."""

from __future__ import annotations
import itertools
import logging
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from areal_lite.embedded.decoder.lean_decoder_kernels import (
    CompiledOperations,
    LayerOperations,
    Turn,
    compiled_operations,
    lean_decoder_operations,
)
from areal_lite.embedded.decoder.slot_cache import SlotCache, SlotLayer
from areal_lite.embedded.model_runner import ModelRunner
from tests.embedded.decoder.test_lean_decoder import MODELS, PAST, TOKENS, run, tiny

HALF_STEP = 2.0**-8
"""Largest relative error of rounding to bfloat16."""
HIDDEN, WIDTH, GROUPS, HEADS = 48, 8, 3, 2
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@cache
def both(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, LayerOperations, CompiledOperations]:
    """Return a model's first layer, and operations: torch's and compiled."""
    model = tiny(family, dtype)
    compiled = compiled_operations(model)
    assert isinstance(compiled, CompiledOperations)
    return model.model.layers[0], LayerOperations(model), compiled


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outs", "width"), [(61, 48), (3, 96), (8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_torch(dtype: torch.dtype, outs: int, width: int, bias: bool) -> None:
    _, _, compiled = both(dtype=dtype)
    states, weight = drawn(100, 1, width, dtype=dtype), drawn(outs, width, dtype=dtype)
    added = drawn(outs, dtype=dtype) if bias else None
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    step = HALF_STEP if dtype == torch.bfloat16 else 4e-6
    for rows in (1, 2, 3, 4, 32, 49, 100):
        product = compiled.product(states[:rows], weight, added).double()
        torch.testing.assert_close(product, expected[:rows], atol=step * width**0.5 / 4, rtol=step)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "has_instructions", "most"),
    [(torch.float32, True, 32), (torch.float32, False, 32), (torch.bfloat16, True, 4), (torch.bfloat16, False, 900)],
)
def test_products_of_few_rows_are_compiled_ones(
    dtype: torch.dtype, has_instructions: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lite.embedded.decoder.lean_decoder_kernels.has_bfloat16", lambda: has_instructions)
    monkeypatch.setattr("areal_lite.embedded.decoder.lean_decoder_kernels.can_pack", lambda: True)
    operations = compiled_operations(tiny("llama", dtype))
    assert isinstance(operations, CompiledOperations)
    states, weight = torch.empty(900, 1, 48, dtype=dtype), torch.empty(5, 48, dtype=dtype)
    for panel in (0, 48):  # without and with packed products of our own, which are as fast with few rows
        monkeypatch.setattr(operations, "_panel", panel)
        half = dtype == torch.bfloat16
        packs = [operations.packs(states[:rows], weight) for rows in (1, most, most + 1)]
        assert packs == [bool(panel), bool(panel), bool(panel) or (half and most == 4)]
        assert operations.packs(states[:1, :, :47], weight[:, :47]) == (half and not panel), "no pairs of columns"


@needs_compiler
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outs", "width", "threads"), [(61, 48, 2), (3, 18, 1), (480, 64, 2), (48, 16, 3)])
def test_the_packed_product_is_that_of_torch_whatever_the_other_rows(
    outs: int, width: int, threads: int, bias: bool
) -> None:
    _, _, compiled = both()
    if not compiled._panel:
        pytest.skip("this CPU has no instructions for products in bfloat16, or better ones")
    states, weight = drawn(100, 1, width), drawn(outs, width)
    added = drawn(outs) if bias else None
    expected = F.linear(states.double(), weight.double(), None if added is None else added.double())
    packed, before = compiled.packed(weight), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = compiled.packed_product(states, packed, weight, added)
        torch.testing.assert_close(whole.double(), expected, atol=HALF_STEP * width**0.5 / 4, rtol=HALF_STEP)
        for first, rows in itertools.product((0, 5), (1, 2, 3, 4, 7, 8, 9, 64, 65)):
            part = compiled.packed_product(states[first : first + rows], packed, weight, added)
            assert torch.equal(part, whole[first : first + rows])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 7])
def test_sum_and_norm_are_those_of_torch(rows: int) -> None:
    layer, plain, compiled = both()
    hidden, added = drawn(rows, 1, HIDDEN, scale=3.0), drawn(rows, 1, HIDDEN, scale=3.0)
    expected_sum, expected = plain.add_norm(hidden.clone(), added, layer.input_layernorm)
    own_sum, own = compiled.add_norm(hidden, added, layer.input_layernorm)
    assert own_sum is hidden
    torch.testing.assert_close(own_sum, expected_sum, atol=0.0, rtol=0.0)
    torch.testing.assert_close(own.float(), expected.float(), atol=0.0, rtol=2 * HALF_STEP)


@needs_compiler
def test_the_gate_is_torchs_for_numbers_of_any_size() -> None:
    layer, plain, compiled = both()
    gate = torch.tensor([0.0, -0.0, 1.0, -1.0, 79.0, -79.0, 90.0, -90.0, 3e38, -3e38]).repeat(5, 4)
    joined = torch.cat([gate.bfloat16(), drawn(5, 400), drawn(5, 440)], -1)
    own, expected = (operations.gated(joined, layer.mlp.act_fn) for operations in (compiled, plain))
    torch.testing.assert_close(own, expected, atol=1e-30, rtol=2 * HALF_STEP)
    assert (own[:, 40:] == expected[:, 40:]).float().mean() > 0.98


@needs_compiler
@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_reads_each_slot_to_its_end_in_any_order(family: str, scale: float) -> None:
    layer, plain, compiled = both(family)
    torch.manual_seed(3)
    slots, past = [4, 0, 2], [60, 0, 11]
    angles = torch.rand(3, 1, WIDTH // 2) * 6
    cos, sin = (torch.cat([part, part], -1).bfloat16() for part in (angles.cos(), angles.sin()))
    states = drawn(3, 1, (GROUPS + 2) * HEADS, WIDTH, scale=scale)
    stored = drawn(2, 5, HEADS, 65, WIDTH, scale=scale)
    read: dict[str, Tensor] = {}
    written: dict[str, tuple[Tensor, Tensor]] = {}
    for name, operations in (("plain", plain), ("compiled", compiled)):
        cache = SlotCache(layer.self_attn.config, slots=5, capacity=64, device=torch.device("cpu"))
        cached = cache.layers[0]
        assert isinstance(cached, SlotLayer)
        cached.lazy_initialization(*stored[:, :, :, :1])
        assert cached.keys is not None and cached.values is not None
        written[name] = cached.keys.copy_(stored[0]), cached.values.copy_(stored[1])
        cache.plan.set(slots, past, 1)
        visible = torch.arange(cache.plan.kv_length) <= cache.plan.columns[:, :, None]
        mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)[:, None].bfloat16()
        turn = Turn.of((cos, sin), mask, GROUPS)
        read[name] = operations.attend(states.clone(), layer.self_attn, cached, turn)
    for number, rtol in enumerate((2 * HALF_STEP, 0.0)):
        torch.testing.assert_close(written["compiled"][number], written["plain"][number], atol=0.0, rtol=rtol)
    torch.testing.assert_close(read["compiled"], read["plain"], atol=0.02 * scale, rtol=2 * HALF_STEP)
    assert (read["compiled"] - read["plain"]).abs().mean() < 0.002 * scale


@needs_compiler
@pytest.mark.parametrize("slots", [[0, 1, 2], [3, 0, 4]])
@pytest.mark.parametrize("family", sorted({*MODELS} - {"gemma"}))
def test_logits_are_as_near_to_float32_as_those_of_torch(family: str, slots: list[int]) -> None:
    half, exact = tiny(family, torch.bfloat16), tiny(family, torch.float32)
    exact.load_state_dict(half.state_dict())
    expected = run(ModelRunner(exact, slots=5, context_length=32), slots)
    errors = {}
    for compiled in (False, True):
        runner = ModelRunner(half, slots=5, context_length=32, compiled=compiled)
        assert runner._lean is not None
        assert type(runner._lean._operations) is (CompiledOperations if compiled else LayerOperations)
        errors[compiled] = (run(runner, slots).float() - expected).square().mean().sqrt()
    assert errors[True] < 1.2 * errors[False]


@needs_compiler
@pytest.mark.parametrize("family", sorted({*MODELS} - {"gemma"}))
def test_bits_of_logits_depend_on_no_other_request_and_on_no_split(family: str) -> None:
    if not both()[2]._panel:
        pytest.skip("this CPU has no instructions for products in bfloat16, or better ones")
    runner = ModelRunner(tiny(family, torch.bfloat16), slots=16, context_length=32)
    among = run(runner, [3, 0, 4])
    for i in range(3):
        end = PAST[i] + [3, 1, 2][i]
        alone = runner.forward([7], [TOKENS[i][:end]], [0])
        assert torch.equal(alone[0], among[1, i])
        others = [TOKENS[1][:5]] * 6
        crowd = runner.forward([*range(8, 14), 7], [*others, TOKENS[i][end : end + 1]], [0] * 6 + [end])
        assert torch.equal(crowd[-1], among[2, i])


@needs_compiler
@pytest.mark.parametrize("family", sorted({*MODELS} - {"gemma"}))
def test_a_large_model_in_float32_has_torchs_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family, torch.float32)
    expected = run(ModelRunner(model, slots=5, context_length=32, compiled=False), [3, 0, 4])
    monkeypatch.setattr("areal_lite.embedded.decoder.lean_decoder_kernels._MIN_FLOAT32", 0)
    runner = ModelRunner(model, slots=5, context_length=32)
    assert runner._lean is not None and type(runner._lean._operations) is CompiledOperations
    torch.testing.assert_close(run(runner, [3, 0, 4]), expected, atol=1e-5, rtol=0.0)


@needs_compiler
def test_arithmetic_and_threads_of_the_process_stay_as_they_are() -> None:
    both()
    assert (torch.tensor(1e-40) * 0.5).item() > 0, "numbers below the normal range are rounded to 0"
    maps = Path("/proc/self/maps")
    if maps.exists():
        pools = set(re.findall(r"\S*lib(?:gomp|omp|iomp5)[-.]\S*", maps.read_text()))
        assert len(pools) <= 1, pools


@pytest.mark.parametrize(("family", "dtype"), [("gemma", torch.bfloat16), ("llama", torch.float32)])
def test_other_models_use_torch(family: str, dtype: torch.dtype) -> None:
    assert type(lean_decoder_operations(tiny(family, dtype))) is LayerOperations


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (
            "no-such-compiler",
            "INFO no C++ compiler: decoding takes up to twice as long. Install g++, or set CXX to a c",
        ),
        (
            "false",
            "WARNING decoding takes up to twice as long: /.*/false cannot compile lean_decoder_kernels.cpp: Command ",
        ),
    ],
)
def test_without_a_compiler_torch_computes(
    compiler: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert type(lean_decoder_operations(tiny("llama", torch.bfloat16))) is LayerOperations
    assert re.match(said.replace("+", r"\+"), f"{caplog.records[-1].levelname} {caplog.messages[-1]}")
