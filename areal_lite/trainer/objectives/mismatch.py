"""How far the engine that sampled and the trainer that learns disagree on the same tokens.

Two causes, reported apart. Tokens sampled under the policy version the step began with should have
the trainer's own log-probs: what differs is numerics (kernels, precision, quantised weights,
truncated sampling) and calls for a repair. Older tokens differ also because the policy has moved on:
that is staleness, which the corrections are for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.token_rows import index_rows, row_mean


@torch.no_grad()
def mismatch_statistics(
    proximal: Tensor, behaviour: Tensor, versions: Tensor, rows: Tensor, version: int
) -> dict[str, float]:
    """Return figures under ``engine_mismatch/`` and ``staleness_drift/``.

    Each has ``kl_k1`` and ``kl_k3`` of behaviour against proximal (nats), ``log_prob_diff_mean`` and ``_max`` of
    the absolute difference, ``prob_diff_mean``, ``_max`` and ``_std`` of probabilities, ``prob_pearson``,
    ``proximal_perplexity`` and ``behaviour_perplexity`` (mean over rows) and ``perplexity_ratio``, the mean over
    rows of the one over the other. A set without tokens is left out, and so is a correlation of
    probabilities that do not vary.

    Args:
        proximal: ``[T]`` log-probs (nats) of the trainer at the start of the step.
        behaviour: ``[T]`` log-probs the engine sampled with.
        versions: ``[T]`` int, the policy version each token was sampled under.
        rows: ``[T]`` the row of each token.
        version: Policy version at the start of the step.
    """
    current = versions == version
    figures: dict[str, float] = {}
    for name, chosen in (("engine_mismatch", current), ("staleness_drift", ~current)):
        if chosen.any():
            disagreement = _disagreement(proximal[chosen].double(), behaviour[chosen].double(), rows[chosen])
            figures |= {f"{name}/{key}": value.item() for key, value in disagreement.items()}
    return figures


def _disagreement(proximal: Tensor, behaviour: Tensor, rows: Tensor) -> dict[str, Tensor]:
    difference = (proximal - behaviour).abs()
    probabilities = torch.stack((proximal.exp(), behaviour.exp()))
    apart = (probabilities[0] - probabilities[1]).abs()
    figures = {
        "kl_k1": kl_penalty(behaviour, proximal, "k1").mean(),
        "kl_k3": kl_penalty(behaviour, proximal, "k3").mean(),
        "log_prob_diff_mean": difference.mean(),
        "log_prob_diff_max": difference.max(),
        "prob_diff_mean": apart.mean(),
        "prob_diff_max": apart.max(),
        "prob_diff_std": apart.std(correction=0),
    }
    if (probabilities.std(1, correction=0) > 0).all():
        figures["prob_pearson"] = torch.corrcoef(probabilities)[0, 1]
    index, counts = index_rows(rows)
    share = torch.ones_like(proximal) / counts[index] / len(counts)  # of a token in the mean over rows
    figures["proximal_perplexity"] = (row_mean(-proximal, rows).exp() * share).sum()
    figures["behaviour_perplexity"] = (row_mean(-behaviour, rows).exp() * share).sum()
    figures["perplexity_ratio"] = (row_mean(behaviour - proximal, rows).exp() * share).sum()
    return figures
