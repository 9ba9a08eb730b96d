"""Balance and time of the two ways to divide sequences into parts.

    python benchmarks/packing_plans.py [--repeats 7]

`LPT` is longest-processing-time, `KK` Karmarkar-Karp, `equal` the same with equally many items per part.
Lengths are log-normal (median 665 tokens, sigma 0.8), drawn anew for each repeat from a fixed seed; every
figure is the median over repeats. `max/mean` is the heaviest part over the mean: 1 is perfect, and a single
long item can make that impossible.
"""

from __future__ import annotations
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.data.batch.partition import karmarkar_karp, longest_processing_time, totals
from benchmarks.report import Figure, make_parser, write_figures

SIZES = [(64, 4), (256, 8), (1024, 8), (4096, 64), (4096, 256)]
METHODS = {"LPT": longest_processing_time, "KK": karmarkar_karp}
LONGEST = 16_384
P = ParamSpec("P")
T = TypeVar("T")


def draw_lengths(items: int, repeats: int) -> list[list[int]]:
    return [
        np.clip(np.random.default_rng(seed).lognormal(6.5, 0.8, items), 1, LONGEST).astype(int).tolist()
        for seed in range(repeats)
    ]


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return what ``call`` returns, and the milliseconds it took."""
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return result, (time.perf_counter() - start) * 1000


def compare_methods(sizes: list[tuple[int, int]], repeats: int) -> list[Figure]:
    figures = []
    print(f"{'items':>6}{'parts':>7}  {'method':<10}{'max/mean':>10}{'ms':>9}")
    for items, k in sizes:
        for equal_size in (False, True):
            for name, method in METHODS.items():
                balances, times = [], []
                for lengths in draw_lengths(items, repeats):
                    parts, ms = timed(method, lengths, k, equal_size)
                    weights = totals(lengths, parts)
                    balances.append(max(weights) / (sum(weights) / k))
                    times.append(ms)
                label = name + " equal" * equal_size
                print(f"{items:>6}{k:>7}  {label:<10}{median(balances):>10.5f}{median(times):>9.2f}")
                figures += [
                    Figure(f"{items} items, {k} parts, {label}: time", median(times), "ms"),
                    Figure(f"{items} items, {k} parts, {label}: max/mean", median(balances), ""),
                ]
    return figures


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    sizes, repeats = (SIZES[:2], 1) if args.smoke else (SIZES, args.repeats)
    write_figures(args.json, compare_methods(sizes, repeats))


if __name__ == "__main__":
    main()
