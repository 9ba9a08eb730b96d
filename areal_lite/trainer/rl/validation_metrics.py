"""Metrics of several answers per prompt: mean@N, best@N and worst@N, with verl's results, resamples included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
SEED = 42


def validation_metrics(
    rewards: Sequence[float], *, prompt_ids: Sequence[str], data_sources: Sequence[str]
) -> dict[str, float]:
    """Return ``{source}/reward/{metric}`` of answers ``[B]``, averaged over the prompts of each data source.

    With N answers to a prompt the metrics are ``mean@N`` and ``std@N`` and, for n = 2, 4, 8, ... below N and for N
    itself, ``best@n/mean`` and ``worst@n/mean`` with their ``std``: the best and the worst of n answers, estimated by
    resampling with replacement, with the same resamples in every call. A prompt with one answer has only ``mean@1``.
    Source: the bootstrap of verl's validation.
    """
    prompts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for reward, *prompt in zip(rewards, data_sources, prompt_ids, strict=True):
        prompts[prompt[0], prompt[1]].append(reward)
    metrics: dict[str, list[float]] = defaultdict(list)
    for (source, _), own in prompts.items():
        for metric, number in _prompt_metrics(np.array(own, np.float64)):
            metrics[f"{source}/reward/{metric}"].append(number)
    return {name: float(np.mean(numbers)) for name, numbers in metrics.items()}


def _prompt_metrics(rewards: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    count = len(rewards)
    yield f"mean@{count}", rewards.mean()
    if count == 1:
        return
    yield f"std@{count}", rewards.std()
    for size in [*(2**power for power in range(1, (count - 1).bit_length())), count]:
        drawn = rewards[_resamples(count, size)]
        for name, values in (("best", drawn.max(axis=1)), ("worst", drawn.min(axis=1))):
            yield f"{name}@{size}/mean", values.mean()
            yield f"{name}@{size}/std", values.std()


@lru_cache(maxsize=64)
def _resamples(count: int, size: int) -> NDArray[np.int64]:
    """Return ``[RESAMPLES, size]`` indices below ``count``, drawn with replacement."""
    return np.random.RandomState(SEED).randint(0, count, (RESAMPLES, size))
