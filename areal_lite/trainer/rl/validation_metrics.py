"""Metrics of several answers per prompt: mean@N, best@N and worst@N.

A pure function with the same results as verl's validation, resamples included.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 42


def validation_metrics(
    scores: Mapping[str, Sequence[float]],
    *,
    prompt_ids: Sequence[str],
    data_sources: Sequence[str],
) -> dict[str, float]:
    """Return ``{source}/{score}/{metric}``, averaged over the prompts of each data source.

    With N answers to a prompt the metrics are ``mean@N`` and ``std@N`` and, for n = 2, 4, 8, ... below N and
    for N itself, ``best@n/mean`` and ``worst@n/mean`` with their ``std``: the best and the worst of n answers. They
    are estimated by resampling with replacement, with the same resamples in every call. A prompt with one answer has
    only ``mean@1``. ``scores`` are ``[B]`` by name, such as ``reward``; ``prompt_ids [B]`` are those of the prompts
    within a data source. Source: the bootstrap of verl's validation."""
    for name, column in {"prompt_ids": prompt_ids, **scores}.items():
        if len(column) != len(data_sources):
            raise ValueError(
                f"{name} has {len(column)} entries for {len(data_sources)} answers: give one per answer, in one order"
            )
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, prompt in enumerate(zip(data_sources, prompt_ids, strict=True)):
        prompts[prompt].append(index)
    metrics: dict[str, list[float]] = defaultdict(list)
    arrays = {name: np.array(column, np.float64) for name, column in scores.items()}
    for (source, _), own in prompts.items():
        for name, array in arrays.items():
            for metric, number in _prompt_metrics(array[own]):
                metrics[f"{source}/{name}/{metric}"].append(number)
    return {name: float(np.mean(numbers)) for name, numbers in metrics.items()}


def _prompt_metrics(scores: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    count = len(scores)
    yield f"mean@{count}", scores.mean()
    if count == 1:
        return
    yield f"std@{count}", scores.std()
    for size in [*(2**power for power in range(1, (count - 1).bit_length())), count]:
        drawn = scores[_resamples(count, size)]
        for name, values in (("best", drawn.max(axis=1)), ("worst", drawn.min(axis=1))):
            yield f"{name}@{size}/mean", values.mean()
            yield f"{name}@{size}/std", values.std()


@lru_cache(maxsize=64)
def _resamples(count: int, size: int) -> NDArray[np.int64]:
    """Return ``[RESAMPLES, size]`` indices below ``count``, drawn with replacement."""
    return np.random.RandomState(SEED).randint(0, count, (RESAMPLES, size))
