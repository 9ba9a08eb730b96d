"""Metrics of a batch: its data, its timing, and how far the engine's and the trainer's log-probs disagree.

Knows nothing of models and losses. The names are those of docs/metrics.md, without their prefix.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.trainer.objectives.aggregation import episode_mean, episode_sum, token_weights
from areal_lite.trainer.objectives.kl import MAX_LOG_RATIO, kl_penalty

Floats = NDArray[np.float32] | NDArray[np.float64]


def batch_metrics(
    sequences: Sequence[TokenSequence],
    episodes: Sequence[int],
    columns: Mapping[str, Floats],
    *,
    version: int,
    penalised_rewards: Floats | None = None,
    max_new_tokens: int | None = None,
) -> dict[str, float]:
    """Return the metrics of one training batch; mean, max and min of most.

    ``columns`` are advantages and, with a critic, returns and values ``[T]``, one per trained token. Rewards count
    episodes (``episodes [B]``, numbered from 0), however many sequences these were cut into. A response begins at a
    sequence's first trained token and ends with the sequence, so tool results in between count; sequences without a
    trained token have no lengths. ``response_length_clip_ratio`` is the share of sequences in which the policy wrote
    ``max_new_tokens`` tokens in one go; the others have ``terminated_length``. A turn is a run of trained tokens."""
    counts = [sequence.num_trained_tokens for sequence in sequences]
    advantages, returns, values = columns["advantage"], columns.get("return"), columns.get("value")
    numbers = np.asarray(episodes)
    sizes, firsts = np.bincount(numbers), np.unique(numbers, return_index=True)[1]
    rewards = np.bincount(numbers, [sequence.score or 0.0 for sequence in sequences]) / sizes
    ages = [age for sequence in sequences if (age := sequence.staleness(version)) is not None] or [0]
    groups: dict[str, list[float]] = {}
    for reward, first in zip(rewards.tolist(), firsts, strict=True):
        groups.setdefault(sequences[first].group_id, []).append(reward)
    teaching = np.unique(np.repeat(numbers, counts)[np.asarray(advantages) != 0])
    metrics = {
        "sequences": float(len(sequences)),
        "episodes": float(len(sizes)),
        "groups": float(len(groups)),
        **_spread("reward", rewards),
        "reward_std": float(rewards.std()),
        "reward_group_std": float(np.mean([np.std(group) for group in groups.values()])),
        **_spread("turns", np.bincount(numbers, [len(_runs(sequence.loss_mask)) for sequence in sequences])),
        **_spread("penalised_reward", penalised_rewards),
        **{key: number for name, array in columns.items() for key, number in _spread(name, array).items()},
        "advantage_std": float(np.std(advantages, dtype=np.float64)) if len(advantages) else 0.0,
        "advantage_zero_fraction": 1 - len(teaching) / len(sizes),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": float(max(ages)),
        **_lengths(sequences, counts, max_new_tokens),
    }
    if returns is not None and values is not None and (spread := np.var(returns, dtype=np.float64)) > 0:
        metrics["value_explained_variance"] = float(1 - np.var(np.subtract(returns, values, dtype=np.float64)) / spread)
    return metrics


def _lengths(sequences: Sequence[TokenSequence], counts: Sequence[int], max_new_tokens: int | None) -> dict[str, float]:
    trained = [sequence.loss_mask for sequence, count in zip(sequences, counts, strict=True) if count]
    prompts = np.array([mask.argmax() for mask in trained])
    responses = np.array([len(mask) for mask in trained]) - prompts
    lengths = {**_spread("prompt_length", prompts), **_spread("response_length", responses)}
    if max_new_tokens is not None:
        clipped = np.array([_runs(mask).max() >= max_new_tokens for mask in trained], dtype=bool)
        lengths["response_length_clip_ratio"] = float(clipped.sum() / len(sequences))
        lengths |= _spread("terminated_length", responses[~clipped])
    return lengths


def _spread(name: str, array: Floats | NDArray[np.int64] | None) -> dict[str, float]:
    """Return mean, max and min; nothing if there are no numbers."""
    if array is None or not len(array):
        return {}
    exact = np.asarray(array, np.float64)
    return {f"{name}_mean": exact.mean().item(), f"{name}_max": exact.max().item(), f"{name}_min": exact.min().item()}


def _runs(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    borders = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    return borders[1::2] - borders[::2]


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
        total = time.perf_counter() - self._began
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()},
            "seconds_step": total,
            **{f"ms_per_token_{phase}": 1000 * seconds / num_tokens for phase, seconds in self._seconds.items()},
            "tokens_per_second": num_tokens / total,
        }


@torch.no_grad()
def mismatch_statistics(
    proximal: Tensor, behaviour: Tensor, versions: Tensor, episodes: Tensor, version: int
) -> dict[str, float]:
    """Return metrics under ``engine_mismatch/`` and ``staleness_drift/``, from log-probs (nats) and versions ``[T]``.

    Tokens sampled under the policy version at the start of the step should have the trainer's own log-probs: a
    difference is numerics (kernels, precision, quantised weights, truncated sampling) and should be fixed. Older tokens
    also differ because the policy has changed: that is staleness, which the corrections handle. docs/metrics.md has the
    names; the chi-square divergence is verl's. A set without tokens, and the correlation of constants, are omitted."""
    current = versions == version
    metrics: dict[str, float] = {}
    for name, chosen in (("engine_mismatch", current), ("staleness_drift", ~current)):
        if chosen.any():
            statistics = _disagreement(proximal[chosen].double(), behaviour[chosen].double(), episodes[chosen])
            metrics |= {f"{name}/{key}": value.item() for key, value in statistics.items()}
    return metrics


def _disagreement(proximal: Tensor, behaviour: Tensor, episodes: Tensor) -> dict[str, Tensor]:
    difference = (proximal - behaviour).abs()
    share = token_weights("seq-mean-token-mean", episodes)
    probabilities = torch.stack((proximal.exp(), behaviour.exp()))
    apart = (probabilities[0] - probabilities[1]).abs()
    metrics = {
        "kl_k1": kl_penalty(behaviour, proximal, "k1").mean(),
        "kl_k3": kl_penalty(behaviour, proximal, "k3").mean(),
        "chi2_token": _chi2(proximal - behaviour),
        "chi2_seq": _chi2(episode_sum(proximal - behaviour, episodes), share),
        "log_prob_diff_mean": difference.mean(),
        "log_prob_diff_max": difference.max(),
        "prob_diff_mean": apart.mean(),
        "prob_diff_max": apart.max(),
        "prob_diff_std": apart.std(correction=0),
    }
    if (probabilities.std(1, correction=0) > 0).all():
        metrics["prob_pearson"] = torch.corrcoef(probabilities)[0, 1]
    metrics["proximal_perplexity"] = (episode_mean(-proximal, episodes).exp() * share).sum()
    metrics["behaviour_perplexity"] = (episode_mean(-behaviour, episodes).exp() * share).sum()
    metrics["perplexity_ratio"] = (episode_mean(behaviour - proximal, episodes).exp() * share).sum()
    return metrics


def _chi2(log_ratios: Tensor, share: Tensor | None = None) -> Tensor:
    """Return the mean of the squared ratio minus 1; log-ratios are clamped as in verl."""
    squares = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).mul(2).exp()
    return (squares.mean() if share is None else (squares * share).sum()) - 1
