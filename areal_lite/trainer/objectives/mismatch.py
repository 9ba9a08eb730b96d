"""How far the log-probs of the inference engine and of the trainer disagree on the same tokens.

Two causes are reported apart. Tokens sampled under the policy version at the start of the step should have the
trainer's own log-probs: a difference is numerics (kernels, precision, quantised weights, truncated sampling) and
should be fixed. Older tokens also differ because the policy has changed: that is staleness, which the corrections
handle.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.objectives.aggregation import episode_mean, index_episodes
from areal_lite.trainer.objectives.kl import kl_penalty


@torch.no_grad()
def mismatch_statistics(
    proximal: Tensor, behaviour: Tensor, versions: Tensor, episodes: Tensor, version: int
) -> dict[str, float]:
    """Return metrics under ``engine_mismatch/`` and ``staleness_drift/``.

    Each has ``kl_k1`` and ``kl_k3`` of behaviour against proximal (nats), ``log_prob_diff_mean`` and ``_max`` of
    the absolute difference, ``prob_diff_mean``, ``_max`` and ``_std`` of probabilities, ``prob_pearson``,
    ``proximal_perplexity`` and ``behaviour_perplexity`` (mean over episodes) and ``perplexity_ratio``, the mean over
    episodes of the first over the second. A set without tokens is left out, and so is the correlation of constant
    probabilities.

    Args:
        proximal: ``[T]`` log-probs (nats) of the trainer at the start of the step.
        behaviour: ``[T]`` log-probs the engine sampled with.
        versions: ``[T]`` int, the policy version each token was sampled under.
        episodes: ``[T]`` the episode of each token.
        version: Policy version at the start of the step.
    """
    current = versions == version
    metrics: dict[str, float] = {}
    for name, chosen in (("engine_mismatch", current), ("staleness_drift", ~current)):
        if chosen.any():
            disagreement = _disagreement(
                proximal[chosen].double(), behaviour[chosen].double(), episodes[chosen]
            )
            metrics |= {f"{name}/{key}": value.item() for key, value in disagreement.items()}
    return metrics


def _disagreement(proximal: Tensor, behaviour: Tensor, episodes: Tensor) -> dict[str, Tensor]:
    difference = (proximal - behaviour).abs()
    probabilities = torch.stack((proximal.exp(), behaviour.exp()))
    apart = (probabilities[0] - probabilities[1]).abs()
    metrics = {
        "kl_k1": kl_penalty(behaviour, proximal, "k1").mean(),
        "kl_k3": kl_penalty(behaviour, proximal, "k3").mean(),
        "log_prob_diff_mean": difference.mean(),
        "log_prob_diff_max": difference.max(),
        "prob_diff_mean": apart.mean(),
        "prob_diff_max": apart.max(),
        "prob_diff_std": apart.std(correction=0),
    }
    if (probabilities.std(1, correction=0) > 0).all():
        metrics["prob_pearson"] = torch.corrcoef(probabilities)[0, 1]
    index, counts = index_episodes(episodes)
    share = torch.ones_like(proximal) / counts[index] / len(counts)  # of a token in the mean over episodes
    metrics["proximal_perplexity"] = (episode_mean(-proximal, episodes).exp() * share).sum()
    metrics["behaviour_perplexity"] = (episode_mean(-behaviour, episodes).exp() * share).sum()
    metrics["perplexity_ratio"] = (episode_mean(behaviour - proximal, episodes).exp() * share).sum()
    return metrics
