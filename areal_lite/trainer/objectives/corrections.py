"""Weights and masks for tokens sampled by another policy than the one at the start of the step.

The behaviour policy (which sampled) and the proximal policy (start of the step) differ when data is stale and when
engine and trainer compute differently. All functions take detached log-probs ``[T]`` in nats and, as ``episodes``, the
episode of each token; the caller multiplies the losses by the weights and drops rejected tokens.

Source: truncated importance sampling as in AReaL (arXiv:2505.24298) and IcePop ("Every Step
Evolves", arXiv:2510.18855); rejection options named as in verl.
"""

import math
from functools import partial
import torch
from torch import Tensor
from areal_lite.config.schema import AtLeast0, checked
from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.aggregation import episode_max, episode_mean, episode_sum, token_weights
from areal_lite.trainer.objectives.kl import MAX_LOG_RATIO, clamped_log_ratio, kl_penalty


@torch.no_grad()
def importance_weights(
    proximal: Tensor, behaviour: Tensor, episodes: Tensor, *, level: str, max_weight: float, normalize: bool = False
) -> Tensor:
    """Return ``[T]``, ``proximal / behaviour`` truncated to ``max_weight``: a ratio per token, or the product over the
    episode for each of its tokens. ``normalize`` divides by their mean to keep the step size."""
    log_ratio = proximal - behaviour
    if level == "sequence":
        log_ratio = episode_sum(log_ratio, episodes)
    weights = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=max_weight)
    if normalize and len(episodes):
        shares = token_weights("seq-mean-token-mean" if level == "sequence" else "token-mean", episodes)
        weights = weights / (weights * shares).sum().to(weights.dtype)
    return weights


@torch.no_grad()
def icepop_weights(proximal: Tensor, behaviour: Tensor, *, lower: float, upper: float) -> Tensor:
    """Return ``[T]``, ``proximal / behaviour`` where it lies in ``[lower, upper]`` and 0 elsewhere."""
    ratio = clamped_log_ratio(proximal, behaviour).exp()
    return torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)


@torch.no_grad()
def rejection_mask(proximal: Tensor, behaviour: Tensor, episodes: Tensor, *, option: str, bounds: str) -> Tensor:
    """Return ``[T]`` bool, True for the tokens to train on: those where the two policies agree within the bounds.

    An option is a level and a measure. Levels: ``token``, and ``seq_sum``, ``seq_mean``, ``seq_max``, which judge whole
    episodes. Measures: ``k1`` is the ratio ``proximal / behaviour`` itself, bounded by ``lower_upper`` (over an
    episode: the product of ratios, or their geometric mean); ``k2`` and ``k3`` are the distances of :func:`kl_penalty`
    in nats, with an upper bound. ``token_k1`` with ``0.5_1.2`` keeps a ratio of 0.6 and rejects 1.6. Options joined by
    commas must all pass: ``seq_mean_k3,token_k2`` takes ``0.05,0.4``. NaN log-probs are rejected."""
    names, limits = option.split(","), bounds.split(",")
    if len(names) != len(limits):
        raise ConfigError(
            f"rejection {option!r} has {len(names)} options, {bounds!r} {len(limits)} bounds: give one bound per option"
        )
    keep = torch.ones_like(episodes, dtype=torch.bool)
    for name, limit in zip(names, limits, strict=True):
        measure = _measure(name, proximal, behaviour, episodes)
        lower, upper = _ratio_bounds(limit) if name.endswith("k1") else (-math.inf, _number(limit))
        keep &= (measure >= lower) & (measure <= upper)
    return keep


@torch.no_grad()
def drifted_episodes(
    policy: Tensor, behaviour: Tensor, advantages: Tensor, episodes: Tensor, *, max_kl: float
) -> Tensor:
    """Return ``[T]``, True for tokens of negative advantage in episodes whose mean of ``behaviour - policy`` exceeds
    ``max_kl`` nats. Source: off-policy sequence masking, DeepSeek-V3.2 (arXiv:2512.02556)."""
    return (advantages < 0) & (episode_mean(behaviour - policy, episodes) > max_kl)


_number = partial(checked, annotation=AtLeast0, where="a rejection bound")
_EPISODE_LEVELS = {"seq_sum": episode_sum, "seq_mean": episode_mean, "seq_max": episode_max}


def _measure(name: str, proximal: Tensor, behaviour: Tensor, episodes: Tensor) -> Tensor:
    level, _, kind = name.rpartition("_")
    if level not in ("token", *_EPISODE_LEVELS) or kind not in ("k1", "k2", "k3") or name == "seq_max_k1":
        raise ConfigError(
            f"rejection option {name!r} does not exist: join token, seq_sum, seq_mean or seq_max with _k1, _k2 or _k3 "
            "(seq_max_k1 is not allowed: it would miss small ratios)"
        )
    per_token = clamped_log_ratio(proximal, behaviour) if kind == "k1" else kl_penalty(behaviour, proximal, kind)
    return per_token if level == "token" else _EPISODE_LEVELS[level](per_token, episodes)


def _ratio_bounds(text: str) -> tuple[float, float]:
    lower, _, upper = text.partition("_")
    if not 0 < _number(lower) <= _number(upper or 0):
        raise ConfigError(
            f"rejection bound {text!r} of a k1 option: give the bounds of the ratio as lower_upper, such as 0.5_2.0"
        )
    return math.log(_number(lower)), math.log(_number(upper))
