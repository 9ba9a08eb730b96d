"""Losses of one micro-batch and the statistics that tell whether they mean anything; pure functions.

Everything is ``[T]``, one entry per token, aligned to the token itself: no shift happens here.
Sums are divided by the tokens of the whole step, so that adding up micro-batches gives the step's loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held to this before exp, as verl does: exp(20) is 5e8."""


def decoupled_ppo_loss(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: int,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    max_behaviour_weight: float = 5.0,
) -> Tensor:
    """Return the decoupled PPO loss of one micro-batch.

    The trust region is drawn around the proximal policy (the weights this training step
    began with); staleness is corrected by weighting each token with ``proximal / behaviour``.
    With fresh data the three policies agree and this is plain PPO.

    Args:
        policy_logprobs: ``[T]`` float, log-probs (nats) under the weights being trained.
            The only input that carries gradient.
        proximal_logprobs: ``[T]`` float, log-probs under the weights at the start of the step.
        behaviour_logprobs: ``[T]`` float, log-probs the inference engine sampled with.
        advantages: ``[T]`` float, one per token; equal along a trajectory for GRPO.
        loss_mask: ``[T]`` bool, True where the policy wrote the token and is trained on it.
        num_loss_tokens: Trained tokens in the whole training step, over all micro-batches and
            ranks, so that the gradient does not depend on how the step is cut.
        clip_eps: Half-width of the trust region; the ratio is held to ``1 +- clip_eps``.
        clip_eps_high: Upper half-width where it differs (clip-higher); None is ``clip_eps``.
        max_behaviour_weight: Upper bound on ``proximal / behaviour`` per token.

    Returns:
        Scalar float tensor; sum it over micro-batches and ranks to get the step's loss.

    Raises:
        ValueError: If shapes differ, or ``num_loss_tokens`` is below 1.

    Source: AReaL (arXiv:2505.24298), decoupled objective; after Hilton et al. (arXiv:2110.00641).
    """
    inputs = (policy_logprobs, proximal_logprobs, behaviour_logprobs, advantages, loss_mask)
    if len({tensor.shape for tensor in inputs}) != 1:
        raise ValueError(
            f"shapes differ: policy, proximal, behaviour, advantages, loss_mask are "
            f"{[list(tensor.shape) for tensor in inputs]}: give [T] to all, one entry per token"
        )
    ratio = _ratio(policy_logprobs, proximal_logprobs)
    clipped = ratio.clamp(1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high))
    weight = _ratio(proximal_logprobs, behaviour_logprobs).clamp(max=max_behaviour_weight).detach()
    per_token = -weight * torch.minimum(ratio * advantages, clipped * advantages)
    return _sum_over_step(per_token, loss_mask, num_loss_tokens)


def kl_k3(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ``[T]`` the k3 estimate of KL(policy || reference) per token, never negative.

    ``exp(d) - d - 1`` with ``d = reference - policy``, capped at 10. Gradient flows to the policy.

    Source: Schulman, "Approximating KL divergence" (2020); caps as in verl's low_var_kl.
    """
    difference = (reference_logprobs - policy_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (difference.exp() - difference - 1).clamp(-10.0, 10.0)


def kl_penalty(
    policy_logprobs: Tensor, reference_logprobs: Tensor, loss_mask: Tensor, *, num_loss_tokens: int
) -> Tensor:
    """Return the scalar k3 penalty of one micro-batch: add ``kl_coef`` times it to the loss."""
    return _sum_over_step(kl_k3(policy_logprobs, reference_logprobs), loss_mask, num_loss_tokens)


def entropy_bonus(entropy: Tensor, loss_mask: Tensor, *, num_loss_tokens: int) -> Tensor:
    """Return the scalar entropy (nats per token) of one micro-batch: subtract ``entropy_coef`` times it."""
    return _sum_over_step(entropy, loss_mask, num_loss_tokens)


@torch.no_grad()
def ppo_statistics(
    policy_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    max_behaviour_weight: float = 5.0,
) -> dict[str, float]:
    """Return what :func:`decoupled_ppo_loss` did on these tokens, averaged over the mask.

    ``clip_fraction``: tokens whose clipped branch was the binding one. ``approx_kl``: k3 of policy
    against proximal. ``mismatch_*``: |proximal - behaviour| in nats, 0 when engine and trainer agree
    and the data is fresh. ``behaviour_weight_capped``: share of tokens at the weight's bound.
    An empty mask gives zeros.
    """
    chosen = loss_mask.bool()
    policy, proximal, behaviour, advantage = (
        tensor[chosen].float()
        for tensor in (policy_logprobs, proximal_logprobs, behaviour_logprobs, advantages)
    )
    if not policy.numel():
        policy = proximal = behaviour = advantage = torch.zeros(1)
    ratio = _ratio(policy, proximal)
    clipped = ratio.clamp(1 - clip_eps, 1 + (clip_eps if clip_eps_high is None else clip_eps_high))
    mismatch = (proximal - behaviour).abs()
    weight = _ratio(proximal, behaviour)
    return {
        "clip_fraction": (clipped * advantage < ratio * advantage).float().mean().item(),
        "approx_kl": kl_k3(proximal, policy).mean().item(),
        "ratio_mean": ratio.mean().item(),
        "ratio_max": ratio.max().item(),
        "mismatch_mean": mismatch.mean().item(),
        "mismatch_max": mismatch.max().item(),
        "behaviour_weight_mean": weight.clamp(max=max_behaviour_weight).mean().item(),
        "behaviour_weight_capped": (weight > max_behaviour_weight).float().mean().item(),
    }


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    return (over - under).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sum_over_step(per_token: Tensor, loss_mask: Tensor, num_loss_tokens: int) -> Tensor:
    if num_loss_tokens < 1:
        raise ValueError(
            f"num_loss_tokens is {num_loss_tokens}: a step without trained tokens has no loss; skip it"
        )
    # where, not a product: a non-finite value at a token that does not train must not leak.
    return torch.where(loss_mask.bool(), per_token, 0.0).sum() / num_loss_tokens
