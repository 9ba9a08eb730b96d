"""What this machine's CPU can do at most: rate of matrix products by shape, and memory bandwidth.

    python benchmarks/roofline.py [--model FOLDER] [--threads 2] [--dtypes bfloat16 float32]

The shapes are those of a model, SmolLM2-135M by default, for 1 to 2,048 rows (tokens at once). Weights take turns, so
that they come from memory. The limit of a shape is the longer of reading its weights and computing at the peak, the
rate of the best large square product. Best of several windows each.

Other benchmarks import :func:`limits`, and from it :func:`decode_limit`, :func:`prefill_limit` and
:func:`training_limit`. These count only matrix products and reading weights and keys and values, so that nothing can be
faster.
"""

from __future__ import annotations
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import Figure, make_parser, of_limit, write_figures

ROWS = (1, 8, 64, 512, 2048)
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What the hardware allows."""

    gflops: float
    """GFLOP/s of the best large square matrix product."""
    bandwidth: float
    """GB/s of reading memory."""
    itemsize: int
    """Bytes of a number."""

    def seconds(self, flops: float, read: float) -> float:
        """Return the shortest time of a product that reads so many bytes."""
        return max(flops / self.gflops, read / self.bandwidth) / 1e9


@dataclass(frozen=True)
class Matrix:
    """A weight of a model, and how many of its shape a token passes."""

    name: str
    inputs: int
    outputs: int
    count: int

    @property
    def size(self) -> int:
        """Numbers in all of them."""
        return self.inputs * self.outputs * self.count


def smollm2_config() -> Any:
    """Return the config of a Llama of SmolLM2-135M's shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def matrices(config: Any) -> list[Matrix]:
    """Return the weights of a Llama; the head is the last."""
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    queries, keys = config.num_attention_heads * _head_dim(config), config.num_key_value_heads * _head_dim(config)
    return [
        Matrix("query", hidden, queries, layers),
        Matrix("key, value", hidden, keys, 2 * layers),
        Matrix("attention output", queries, hidden, layers),
        Matrix("gate, up", hidden, mlp, 2 * layers),
        Matrix("down", mlp, hidden, layers),
        Matrix("head", hidden, config.vocab_size, 1),
    ]


def limits(threads: int, dtype: torch.dtype, *, smoke: bool = False) -> Limits:
    """Measure peak and bandwidth."""
    sizes, mebibytes, window_s = ((64,), 1, 0.0) if smoke else ((1024, 2048, 4096), 256, 0.2)
    numbers = torch.ones(mebibytes * MEBIBYTE // 4)
    gflops = 0.0
    with _threads(threads):
        for size in sizes:
            square = torch.randn(size, size).to(dtype)
            gflops = max(gflops, 2 * size**3 / _best_seconds(lambda square=square: square @ square, window_s) / 1e9)
        bandwidth = numbers.nbytes / _best_seconds(lambda: torch.dot(numbers, numbers), window_s, least=8) / 1e9
    return Limits(gflops=gflops, bandwidth=bandwidth, itemsize=dtype.itemsize)


def decode_limit(config: Any, limits: Limits, *, in_flight: int, context: int) -> float:
    """Return the most tokens/s of decoding ``in_flight`` requests with ``context`` tokens each."""
    weights = sum(limits.seconds(2 * in_flight * m.size, m.size * limits.itemsize) for m in matrices(config))
    states = 2 * config.num_hidden_layers * config.num_key_value_heads * _head_dim(config)
    cache = limits.seconds(0, in_flight * context * states * limits.itemsize)
    return in_flight / (weights + cache)


def prefill_limit(config: Any, limits: Limits) -> float:
    """Return the most tokens/s of prompts that come many at a time; no token of them passes the head."""
    *layers, _head = matrices(config)
    return 1 / limits.seconds(2 * sum(m.size for m in layers), 0)


def training_limit(config: Any, limits: Limits, *, tokens: int, trained: int) -> float:
    """Return the least seconds of forward and backward; only ``trained`` tokens pass the head."""
    *layers, head = matrices(config)
    return limits.seconds(6 * (tokens * sum(m.size for m in layers) + trained * head.size), 0)


def product_rate(matrix: Matrix, rows: int, dtype: torch.dtype, *, smoke: bool = False) -> float:
    """Return GFLOP/s of ``rows`` times one such weight, which comes from memory."""
    total, window_s = (1, 0.0) if smoke else (256, 0.1)
    size = matrix.inputs * matrix.outputs
    copies = -(-total * MEBIBYTE // (size * dtype.itemsize))
    weights = itertools.cycle(torch.randn(copies, matrix.outputs, matrix.inputs, dtype=dtype))
    states = torch.randn(rows, matrix.inputs, dtype=dtype)
    repeats = max(1, int(1e-3 * 1e11 / (2 * rows * size)))  # about a millisecond, so that the clock costs nothing

    def products() -> None:
        for _ in range(repeats):
            torch.nn.functional.linear(states, next(weights))

    return 2 * rows * size * repeats / _best_seconds(products, window_s) / 1e9


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _best_seconds(call: Callable[[], object], window_s: float, least: int = 3) -> float:
    """Return the shortest of the calls that fit into a window, at least ``least`` after one that warms up."""
    call()
    best, began = float("inf"), time.perf_counter()
    for number in itertools.count():
        start = time.perf_counter()
        if number >= least and start - began >= window_s:
            return best
        call()
        best = min(best, time.perf_counter() - start)
    raise AssertionError


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="folder of a model with a Llama's matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    if args.model:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(args.model)
    else:
        config = smollm2_config()
    figures = []
    for name in args.dtypes:
        dtype = getattr(torch, name)
        best = limits(args.threads, dtype, smoke=args.smoke)
        figures += [Figure(f"{name}, largest product", best.gflops, "GFLOP/s")]
        figures += [Figure(f"{name}, memory", best.bandwidth, "GB/s")]
        print(f"{name}, {args.threads} threads: {best.gflops:,.0f} GFLOP/s, {best.bandwidth:.1f} GB/s")
        with _threads(args.threads), torch.inference_mode():
            for matrix in matrices(config)[: 2 if args.smoke else None]:
                size = matrix.inputs * matrix.outputs
                for rows in ROWS[: 2 if args.smoke else None]:
                    rate = product_rate(matrix, rows, dtype, smoke=args.smoke)
                    flops = 2 * rows * size
                    limit = flops / best.seconds(flops, size * best.itemsize) / 1e9
                    shape = f"{rows} x {matrix.inputs} x {matrix.outputs}"
                    figures.append(Figure(f"{name}, {matrix.name}, {shape}", rate, "GFLOP/s", limit=limit))
                    print(f"{matrix.name:18}{shape:20}{rate:10,.1f} GFLOP/s  {of_limit(figures[-1])}")
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
