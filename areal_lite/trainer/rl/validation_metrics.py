"""Metrics of several answers per prompt: mean@N, best@N, worst@N and the majority's maj@N.

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
    predictions: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return ``{source}/{score}/{metric}``, averaged over the prompts of each data source.

    With N answers to a prompt the metrics are ``mean@N`` and ``std@N`` and, for n = 2, 4, 8, ... below N and
    for N itself, ``best@n/mean``, ``worst@n/mean`` and ``maj@n/mean`` with their ``std``: the best and the worst of
    n answers, and the first answer with the most common prediction (in a tie the prediction that came first). They
    are estimated by resampling with replacement, with the same resamples in every call. A prompt with one answer has
    only ``mean@1``.

    Args:
        scores: ``[B]`` scores by name, such as ``reward``.
        prompt_ids: ``[B]`` answers of one data source with the same id belong to the same prompt.
        data_sources: ``[B]`` data source of each answer.
        predictions: ``[B]`` the prediction extracted from each answer; None omits maj@n.

    Source: the bootstrap of verl's validation.
    """
    columns = {
        "prompt_ids": prompt_ids,
        **scores,
        **({} if predictions is None else {"predictions": predictions}),
    }
    for name, column in columns.items():
        if len(column) != len(data_sources):
            raise ValueError(
                f"{name} has {len(column)} entries for {len(data_sources)} answers: give one per answer, in one order"
            )
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, prompt in enumerate(zip(data_sources, prompt_ids, strict=True)):
        prompts[prompt].append(index)
    metrics: dict[str, list[float]] = defaultdict(list)
    arrays = {name: np.array(column, np.float64) for name, column in scores.items()}
    votes = None if predictions is None else np.unique(np.array(predictions, str), return_inverse=True)[1]
    for (source, _), own in prompts.items():
        for name, array in arrays.items():
            for metric, number in _prompt_metrics(array[own], None if votes is None else votes[own]):
                metrics[f"{source}/{name}/{metric}"].append(number)
    return {name: float(np.mean(numbers)) for name, numbers in metrics.items()}


def _prompt_metrics(scores: NDArray[np.float64], votes: NDArray[np.int64] | None) -> Iterator[tuple[str, float]]:
    """Yield the metrics of one prompt."""
    count = len(scores)
    yield f"mean@{count}", scores.mean()
    if count == 1:
        return
    yield f"std@{count}", scores.std()
    for size in [*(2**power for power in range(1, (count - 1).bit_length())), count]:
        resamples = _resamples(count, size)
        drawn = scores[resamples]
        metrics = {"best": drawn.max(axis=1), "worst": drawn.min(axis=1)}
        if votes is not None:
            chosen = _first_of_majority(votes[resamples])
            metrics["maj"] = np.take_along_axis(drawn, chosen[:, None], axis=1)
        for name, values in metrics.items():
            yield f"{name}@{size}/mean", values.mean()
            yield f"{name}@{size}/std", values.std()


@lru_cache(maxsize=64)
def _resamples(count: int, size: int) -> NDArray[np.int64]:
    """Return ``[RESAMPLES, size]`` indices below ``count``, drawn with replacement."""
    return np.random.RandomState(SEED).randint(0, count, (RESAMPLES, size))


def _first_of_majority(votes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[R]``, the index of the first vote for the majority in each line of ``votes [R, n]``."""
    shares = np.zeros(votes.shape, np.int64)
    for vote in np.unique(votes):
        same = votes == vote
        shares += same * same.sum(axis=1, keepdims=True)
    indices: NDArray[np.int64] = shares.argmax(axis=1)
    return indices
