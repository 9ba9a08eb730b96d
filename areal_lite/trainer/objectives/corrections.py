"""Weights and masks for tokens that another policy sampled than the one the step began with.

The sampled-with (behaviour) and start-of-step (proximal) policies differ when data is stale and
when engine and trainer compute differently. All of this is on detached log-probs in nats; whoever sums
the losses multiplies the weights in and takes rejected tokens out.

Source: truncated importance sampling as in AReaL (arXiv:2505.24298) and IcePop ("Every Step
Evolves", arXiv:2510.18855); rejection options named as in verl.
"""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from torch import Tensor

from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.log_ratio import MAX_LOG_RATIO, clamped_log_ratio
from areal_lite.trainer.objectives.token_rows import index_rows, row_max, row_mean, row_sum


class WeightLevel(StrEnum):
    """What one importance ratio is of."""

    TOKEN = "token"
    SEQUENCE = "sequence"


@torch.no_grad()
def importance_weights(
    proximal: Tensor,
    behaviour: Tensor,
    rows: Tensor,
    *,
    level: WeightLevel,
    max_weight: float,
    normalize: bool = False,
) -> Tensor:
    """Return ``proximal / behaviour``, truncated from above.

    Args:
        proximal: ``[T]`` log-probs at the start of the step.
        behaviour: ``[T]`` log-probs the engine sampled with.
        rows: ``[T]`` the row of each token.
        level: A ratio per token, or the product over the row for each of its tokens.
        max_weight: Upper bound; a ratio of 3 under a bound of 2 counts 2.
        normalize: Divide by the mean (over tokens, or over rows), so that the step size stays.

    Returns:
        ``[T]`` above 0.
    """
    log_ratio = proximal - behaviour
    if level == WeightLevel.SEQUENCE:
        log_ratio = row_sum(log_ratio, rows)
    weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=max_weight)
    if normalize and len(rows):
        share = torch.ones_like(weights)
        if level == WeightLevel.SEQUENCE:
            index, counts = index_rows(rows)
            share /= counts[index]
        weights = weights * share.sum() / (weights * share).sum()
    return weights


def row_weights(weights: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T]`` the geometric mean of a row's weights, all above 0: for a loss whose ratio is one itself."""
    return row_mean(weights.log(), rows).exp()


@torch.no_grad()
def icepop_weights(proximal: Tensor, behaviour: Tensor, *, lower: float, upper: float) -> Tensor:
    """Return ``[T]`` ``proximal / behaviour`` where it lies in ``[lower, upper]``, and 0 elsewhere."""
    ratio = clamped_log_ratio(proximal, behaviour).exp()
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)


@torch.no_grad()
def rejection_mask(proximal: Tensor, behaviour: Tensor, rows: Tensor, *, option: str, bounds: str) -> Tensor:
    """Return True for the tokens that may train: those whose policies agree within the bounds.

    An option is a level and a measure. Levels: ``token``, and ``seq_sum``, ``seq_mean``, ``seq_max`` that
    judge whole rows. Measures: ``k1`` is the ratio ``proximal / behaviour`` itself, held to
    ``lower_upper`` (over a row: the product of ratios, or their geometric mean); ``k2`` and ``k3`` are
    the distances of :func:`kl_penalty` in nats, held to an upper bound. Several are joined by commas
    and must all agree. A log-prob that is not a number is rejected.

    ``token_k1`` with ``0.5_1.2`` keeps a ratio of 0.6 and rejects 1.6; ``seq_mean_k3,token_k2`` takes
    ``0.05,0.4``.

    Args:
        proximal: ``[T]`` log-probs at the start of the step.
        behaviour: ``[T]`` log-probs the engine sampled with.
        rows: ``[T]`` the row of each token.
        option: One or more options, joined by commas.
        bounds: As many bounds, joined by commas.

    Returns:
        ``[T]`` bool.

    Raises:
        ConfigError: If an option or a bound cannot be read, or their counts differ.
    """
    names, limits = option.split(","), bounds.split(",")
    if len(names) != len(limits):
        raise ConfigError(
            f"rejection {option!r} has {len(names)} options but bounds {bounds!r} {len(limits)}: give one bound to each"
        )
    keep = torch.ones_like(rows, dtype=torch.bool)
    for name, limit in zip(names, limits, strict=True):
        measure = _measure(name, proximal, behaviour, rows)
        lower, upper = _ratio_bounds(limit) if name.endswith("k1") else (-math.inf, _number(limit))
        keep &= (measure >= lower) & (measure <= upper)
    return keep


@torch.no_grad()
def drifted_rows(
    policy: Tensor, behaviour: Tensor, advantages: Tensor, rows: Tensor, *, max_kl: float
) -> Tensor:
    """Return ``[T]`` True for the tokens of bad rows that the policy has left already and need not be pushed from.

    Those are the tokens with an advantage below 0 of rows whose mean of ``behaviour - policy`` exceeds
    ``max_kl`` nats.

    Source: off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556).
    """
    return (advantages < 0) & (row_mean(behaviour - policy, rows) > max_kl)


_ROW_LEVELS = {"seq_sum": row_sum, "seq_mean": row_mean, "seq_max": row_max}


def _measure(name: str, proximal: Tensor, behaviour: Tensor, rows: Tensor) -> Tensor:
    level, _, kind = name.rpartition("_")
    if level not in ("token", *_ROW_LEVELS) or kind not in ("k1", "k2", "k3") or name == "seq_max_k1":
        raise ConfigError(
            f"rejection option {name!r} does not exist: join token, seq_sum, seq_mean or seq_max with _k1, _k2 or _k3 "
            "(seq_max_k1 has no meaning: it would not see small ratios)"
        )
    per_token = (
        clamped_log_ratio(proximal, behaviour) if kind == "k1" else kl_penalty(behaviour, proximal, kind)
    )
    return per_token if level == "token" else _ROW_LEVELS[level](per_token, rows)


def _ratio_bounds(text: str) -> tuple[float, float]:
    lower, joint, upper = text.partition("_")
    if not joint or not 0 < _number(lower) <= _number(upper):
        raise ConfigError(
            f"rejection bound {text!r} of a k1 option: give the ratio's bounds as lower_upper, say 0.5_2.0"
        )
    return math.log(_number(lower)), math.log(_number(upper))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"rejection bound {text!r} is no number") from None
