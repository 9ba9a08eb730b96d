"""Metrics of a batch and of its timing: pure functions over sequences and seconds.

Knows nothing of models and losses. The names are those of docs/metrics.md, without their prefix.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from areal_lite.api.trajectory import TokenSequence

Floats = NDArray[np.float32] | NDArray[np.float64]


def batch_metrics(
    sequences: Sequence[TokenSequence],
    episodes: Sequence[int],
    advantages: Floats,
    *,
    version: int,
    penalised_rewards: Floats | None = None,
    returns: Floats | None = None,
    values: Floats | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, float]:
    """Return the metrics of one training batch; mean, max and min of most.

    Rewards count episodes, however many sequences these were cut into. A response begins at a sequence's first
    trained token and ends with the sequence, so tool results in between count; sequences without a
    trained token have no lengths. ``response_length_clip_ratio`` is the share of sequences in which the policy
    wrote ``max_new_tokens`` tokens in one go.

    Args:
        sequences: ``B`` of them, at least one.
        episodes: ``[B]`` the episode of each, numbered from 0.
        advantages: ``[T]``, one per trained token, sequence by sequence.
        penalised_rewards: ``[E]`` rewards of episodes less their KL penalty, where there is one.
        returns: ``[T]``, where there is a critic.
        values: ``[T]``, likewise.
        max_new_tokens: Most tokens of one model call; None leaves the clip ratio out.

    Raises:
        ValueError: If there are no sequences, or an array has another length.
    """
    if not sequences:
        raise ValueError("there are no sequences to describe: give at least one")
    counts = [sequence.num_trained_tokens for sequence in sequences]
    per_token = {"advantage": advantages, "return": returns, "value": values}
    for name, array in per_token.items():
        _check_length(
            f"{name}s", array, sum(counts), "one per trained token: np.repeat(per_sequence, counts)"
        )
    numbers = np.asarray(episodes)
    sizes = np.bincount(numbers)
    _check_length("penalised_rewards", penalised_rewards, len(sizes), "one per episode")
    rewards = np.bincount(numbers, [sequence.reward or 0.0 for sequence in sequences]) / sizes
    teaching = np.unique(np.repeat(numbers, counts)[np.asarray(advantages) != 0])
    metrics = {
        "sequences": float(len(sequences)),
        "episodes": float(len(sizes)),
        "groups": float(len({sequence.group_id for sequence in sequences})),
        **_spread("reward", rewards),
        "reward_std": float(rewards.std()),
        **_spread("penalised_reward", penalised_rewards),
        **{key: number for name, array in per_token.items() for key, number in _spread(name, array).items()},
        "advantage_std": float(np.std(advantages, dtype=np.float64)) if len(advantages) else 0.0,
        "advantage_zero_fraction": 1 - len(teaching) / len(sizes),
        **_ages(sequences, version),
        **_lengths(sequences, counts, max_new_tokens),
    }
    if returns is not None and values is not None and (spread := np.var(returns, dtype=np.float64)) > 0:
        unexplained = np.var(np.subtract(returns, values, dtype=np.float64))
        metrics["value_explained_variance"] = float(1 - unexplained / spread)
    return metrics


def _ages(sequences: Sequence[TokenSequence], version: int) -> dict[str, float]:
    ages = [age for sequence in sequences if (age := sequence.staleness(version)) is not None] or [0]
    return {"staleness_mean": float(np.mean(ages)), "staleness_max": float(max(ages))}


def _lengths(
    sequences: Sequence[TokenSequence], counts: Sequence[int], max_new_tokens: int | None
) -> dict[str, float]:
    trained = [sequence.loss_mask for sequence, count in zip(sequences, counts, strict=True) if count]
    prompts = np.array([mask.argmax() for mask in trained])
    lengths = {
        **_spread("prompt_length", prompts),
        **_spread("response_length", np.array([len(mask) for mask in trained]) - prompts),
    }
    if max_new_tokens is not None:
        clipped = sum(_longest_run(mask) >= max_new_tokens for mask in trained)
        lengths["response_length_clip_ratio"] = clipped / len(sequences)
    return lengths


def timing_metrics(phases: Mapping[str, float], total: float, *, num_tokens: int) -> dict[str, float]:
    """Return seconds and milliseconds per token by phase, and tokens per second of the whole.

    Args:
        total: Seconds of the whole, at least the sum of the phases; above 0.
        num_tokens: Tokens that went through, prompts included; at least 1.
    """
    return {
        **{f"seconds_{phase}": seconds for phase, seconds in phases.items()},
        "seconds_step": total,
        **{f"ms_per_token_{phase}": 1000 * seconds / num_tokens for phase, seconds in phases.items()},
        "tokens_per_second": num_tokens / total,
    }


def _spread(name: str, array: Floats | NDArray[np.int64] | None) -> dict[str, float]:
    """Return mean, max and min; nothing where there are no numbers."""
    if array is None or not len(array):
        return {}
    exact = np.asarray(array, np.float64)
    return {
        f"{name}_mean": exact.mean().item(),
        f"{name}_max": exact.max().item(),
        f"{name}_min": exact.min().item(),
    }


def _longest_run(mask: NDArray[np.bool_]) -> int:
    """Return the length of the longest run of True."""
    borders = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return int((borders[1::2] - borders[::2]).max(initial=0))


def _check_length(name: str, array: Floats | None, length: int, fix: str) -> None:
    if array is not None and np.shape(array) != (length,):
        raise ValueError(f"{name} is of shape {np.shape(array)}, it must be [{length}]: give {fix}")


class PhaseClock:
    """Sums up seconds by phase; on a GPU a phase ends when its work is done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """Return seconds and milliseconds per token by phase, and tokens per second since the clock was made."""
        return timing_metrics(self._seconds, time.perf_counter() - self._began, num_tokens=num_tokens)
