"""What several answers to one prompt say of a model: mean@N, best@N, worst@N and the majority's maj@N.

A pure function over the rows of a validation, equal to verl's figures, its resamples included.
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
    """Return ``{source}/{score}/{figure}``, a mean over the prompts of each data source.

    With N answers to a prompt the figures are ``mean@N`` and ``std@N`` and, for n = 2, 4, 8, ... below N and
    for N itself, ``best@n/mean``, ``worst@n/mean`` and ``maj@n/mean`` with their ``std``: of the best and the
    worst of n answers, and of the answer whose prediction most of the n share (the first of them; a tie goes
    to the prediction that came first). They are estimated from resamples with replacement, the same in every
    call. A prompt with one answer has ``mean@1`` alone.

    Args:
        scores: ``[B]`` numbers by name, such as ``reward``.
        prompt_ids: ``[B]`` rows of one data source with the same id are answers to the same prompt.
        data_sources: ``[B]`` where each row comes from.
        predictions: ``[B]`` the answer that was read out of each response; None leaves maj@n out.

    Raises:
        ValueError: If lengths differ.

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
                f"{name} has {len(column)} entries for {len(data_sources)} rows: give one per row, in one order"
            )
    prompts: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, prompt in enumerate(zip(data_sources, prompt_ids, strict=True)):
        prompts[prompt].append(row)
    found: dict[str, list[float]] = defaultdict(list)
    arrays = {name: np.array(column, np.float64) for name, column in scores.items()}
    votes = None if predictions is None else np.unique(np.array(predictions, str), return_inverse=True)[1]
    for (source, _), rows in prompts.items():
        for name, array in arrays.items():
            for figure, number in _figures(array[rows], None if votes is None else votes[rows]):
                found[f"{source}/{name}/{figure}"].append(number)
    return {name: float(np.mean(numbers)) for name, numbers in found.items()}


def _figures(scores: NDArray[np.float64], votes: NDArray[np.int64] | None) -> Iterator[tuple[str, float]]:
    """Yield the figures of one prompt."""
    count = len(scores)
    yield f"mean@{count}", scores.mean()
    if count == 1:
        return
    yield f"std@{count}", scores.std()
    for size in [*(2**power for power in range(1, count.bit_length()) if 2**power < count), count]:
        rows = _resamples(count, size)
        drawn = scores[rows]
        figures = {"best": drawn.max(axis=1), "worst": drawn.min(axis=1)}
        if votes is not None:
            chosen = _first_of_majority(votes[rows])
            figures["maj"] = np.take_along_axis(drawn, chosen[:, None], axis=1)
        for name, values in figures.items():
            yield f"{name}@{size}/mean", values.mean()
            yield f"{name}@{size}/std", values.std()


@lru_cache(maxsize=64)
def _resamples(count: int, size: int) -> NDArray[np.int64]:
    """Return ``[RESAMPLES, size]`` rows out of ``count``, with replacement."""
    return np.random.RandomState(SEED).randint(0, count, (RESAMPLES, size))


def _first_of_majority(votes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[R]`` for ``votes`` ``[R, n]`` where the first vote of each row's majority stands."""
    shares = np.zeros(votes.shape, np.int64)
    for vote in np.unique(votes):
        same = votes == vote
        shares += same * same.sum(axis=1, keepdims=True)
    places: NDArray[np.int64] = shares.argmax(axis=1)
    return places
