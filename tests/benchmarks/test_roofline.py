"""Limits by hand: what decoding and training cannot beat."""

from types import SimpleNamespace
import pytest
from benchmarks.roofline import Limits, decode_limit, prefill_limit, training_limit

CONFIG = SimpleNamespace(
    hidden_size=4,
    intermediate_size=8,
    vocab_size=10,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=2,
)
LAYERS, HEAD = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 2 * 4 * 8 + 8 * 4), 4 * 10


def test_one_request_is_bound_by_memory_and_many_by_products():
    limits = Limits(gflops=1e-9, bandwidth=1e-9, itemsize=2)  # one operation and one byte a second
    states = 2 * 2 * 2 * 2  # keys and values, two layers, two numbers, two bytes
    for in_flight, seconds in ((1, 2 * (LAYERS + HEAD)), (3, 3 * 2 * (LAYERS + HEAD))):
        rate = decode_limit(CONFIG, limits, in_flight=in_flight, context=5)
        assert rate == pytest.approx(in_flight / (seconds + in_flight * 5 * states))
    fast = Limits(gflops=1.0, bandwidth=1e-9, itemsize=2)
    assert decode_limit(CONFIG, fast, in_flight=3, context=0) == pytest.approx(3 / (2 * (LAYERS + HEAD)))
    assert prefill_limit(CONFIG, limits) == pytest.approx(1 / (2 * LAYERS))


def test_training_takes_six_operations_a_weight_and_the_head_for_trained_tokens_only():
    limits = Limits(gflops=1e-9, bandwidth=1e9, itemsize=2)
    assert training_limit(CONFIG, limits, tokens=7, trained=3) == pytest.approx(6 * (7 * LAYERS + 3 * HEAD))
