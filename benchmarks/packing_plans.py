"""Balance and time of the two ways to divide sequences into parts, and time of a whole packing plan.

    python benchmarks/packing_plans.py [--repeats 7]

`LPT` is longest-processing-time, `KK` Karmarkar-Karp, `equal` the same with equally many items per part.
Lengths are log-normal (median 665 tokens, sigma 0.8), drawn anew for each repeat from a fixed seed; every
figure is the median over repeats. `max/mean` is the heaviest part over the mean: 1 is perfect, and a single
long item can make that impossible. A plan packs the same lengths under 16,384 tokens on 8 ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import ParamSpec, TypeVar

import numpy as np

from areal_lite.data.batch.packing_plan import plan_packing
from areal_lite.data.batch.partition import karmarkar_karp, longest_processing_time, totals

SIZES = [(64, 4), (256, 8), (1024, 8), (4096, 64), (4096, 256)]
METHODS = {"LPT": longest_processing_time, "KK": karmarkar_karp}
MAX_TOKENS = 16_384
P = ParamSpec("P")
T = TypeVar("T")


def draw_lengths(items: int, repeats: int) -> list[list[int]]:
    return [
        np.clip(np.random.default_rng(seed).lognormal(6.5, 0.8, items), 1, MAX_TOKENS).astype(int).tolist()
        for seed in range(repeats)
    ]


def timed(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return what ``call`` returns, and the milliseconds it took."""
    start = time.perf_counter()
    result = call(*args, **kwargs)
    return result, (time.perf_counter() - start) * 1000


def compare_methods(repeats: int) -> None:
    print(f"{'items':>6}{'parts':>7}  {'method':<10}{'max/mean':>10}{'ms':>9}")
    for items, k in SIZES:
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


def time_plans(repeats: int) -> None:
    print(f"\n{'items':>6}{'mini-batches':>14}{'full':>7}{'ms':>9}")
    for items in (256, 1024, 4096):
        counts, shares, times = [], [], []
        for lengths in draw_lengths(items, repeats):
            plan, ms = timed(plan_packing, lengths, max_tokens=MAX_TOKENS, num_ranks=8)
            counts.append(sum(len(rank) for rank in plan.ranks))
            shares.append(sum(lengths) / (counts[-1] * MAX_TOKENS))
            times.append(ms)
        print(f"{items:>6}{median(counts):>14.0f}{median(shares):>7.0%}{median(times):>9.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    compare_methods(args.repeats)
    time_plans(args.repeats)


if __name__ == "__main__":
    main()
