"""Policy losses per token, one tensor per episode of an update, by their names in a YAML."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any
import torch
from torch import Tensor


def _ratio(episode: Any) -> Tensor:
    return (episode.policy - episode.proximal).clamp(-20, 20).exp()


def _clipped(step: Any, ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's losses, and True where the clipped ratio decides, so that no gradient flows."""
    step.sure(ratio - low)
    step.sure(ratio - high)
    clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return -advantages * torch.where(clipped, ratio.detach().clamp(low, high), ratio), clipped


def ppo(
    step: Any, members: Any, clip_eps: float = 0.2, clip_eps_high: float | None = None, dual_clip: float = 0.0
) -> list[Tensor]:
    losses = []
    for episode in members:
        ratio, high = _ratio(episode), clip_eps if clip_eps_high is None else clip_eps_high
        loss, _ = _clipped(step, ratio, episode.advantages, 1 - clip_eps, 1 + high)
        if dual_clip:
            step.sure(ratio - dual_clip)
            loss = torch.where((episode.advantages < 0) & (ratio > dual_clip), -episode.advantages * dual_clip, loss)
        losses.append(loss)
    return losses


def gspo(step: Any, members: Any, clip_eps: float = 3e-4, clip_eps_high: float = 4e-4) -> list[Tensor]:
    losses = []
    for episode in members:
        mean = (episode.policy - episode.proximal).mean().detach()
        ratio = (mean + episode.policy - episode.policy.detach()).exp()
        losses.append(_clipped(step, ratio, episode.advantages, 1 - clip_eps, 1 + clip_eps_high)[0])
    return losses


def gmpo(step: Any, members: Any, clip_eps: float = 0.4, clip_eps_high: float | None = None) -> list[Tensor]:
    losses, high = [], clip_eps if clip_eps_high is None else clip_eps_high
    for episode in members:
        log_ratio, advantages = episode.policy - episode.proximal, episode.advantages
        if bool(advantages.any()):  # their sign decides, and 0 is a sign of its own
            step.sure(advantages)
        step.sure(log_ratio + clip_eps)
        step.sure(log_ratio - high)
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-clip_eps))
        bounded = torch.where(advantages == 0, 0.0, bounded)
        losses.append(-advantages.mean() * bounded.mean().exp().expand(episode.n))
    return losses


def cispo(step: Any, members: Any, clip_eps: float = 1.0, clip_eps_high: float = 0.28) -> list[Tensor]:
    return [
        -_ratio(one).detach().clamp(1 - clip_eps, 1 + clip_eps_high) * one.advantages * one.policy for one in members
    ]


def sapo(step: Any, members: Any, tau_positive: float = 1.0, tau_negative: float = 1.05) -> list[Tensor]:
    losses = []
    for episode in members:
        tau = torch.where(episode.advantages > 0, tau_positive, tau_negative).double()
        losses.append(-episode.advantages * 4 / tau * torch.sigmoid(tau * (_ratio(episode) - 1)))
    return losses


def reinforce(step: Any, members: Any) -> list[Tensor]:
    return [-episode.advantages * episode.policy for episode in members]


def _covariances(members: Any) -> Tensor:
    advantages = torch.cat([episode.advantages for episode in members])
    policy = torch.cat([episode.policy for episode in members]).detach()
    return (advantages - advantages.mean()) * (policy - policy.mean())


def clip_cov(
    step: Any,
    members: Any,
    clip_eps: float = 0.2,
    token_share: float = 1.0,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
) -> list[Tensor]:
    """With a share of 1: every token that qualifies is dropped, so no draw decides."""
    assert token_share == 1
    losses, covariances = [], _covariances(members)
    step.sure(covariances - min_covariance)
    step.sure(covariances - max_covariance)
    qualifies = (covariances > min_covariance) & (covariances < max_covariance)
    for episode, own in zip(members, qualifies.split([one.n for one in members]), strict=True):
        loss, clipped = _clipped(step, _ratio(episode), episode.advantages, 1 - clip_eps, 1 + clip_eps)
        losses.append(torch.where(own & ~clipped, 0.0, loss))
    return losses


def kl_cov(step: Any, members: Any, token_share: float = 2e-4, kl_coef: float = 1.0) -> list[Tensor]:
    covariances = _covariances(members)
    count = max(1, int(token_share * len(covariances)))
    ranked = covariances.sort(descending=True).values
    if count < len(ranked):
        step.sure(ranked[count - 1] - ranked[count])
    chosen = (covariances >= ranked[count - 1]).split([one.n for one in members])
    losses = []
    for episode, own in zip(members, chosen, strict=True):
        difference = episode.policy - episode.proximal
        if bool(difference.detach().any()):  # exactly 0 in the first update
            step.sure(difference)
        penalty = torch.where(own, kl_coef * difference.abs(), 0.0)
        losses.append(-episode.advantages * _ratio(episode) + penalty)
    return losses


def m2po(step: Any, members: Any, max_second_moment: float = 0.04) -> list[Tensor]:
    squares = torch.cat([(one.policy.detach() - one.behaviour) ** 2 for one in members])
    ranked = squares.sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1)
    step.sure(means - max_second_moment)
    count = int((means <= max_second_moment).sum())
    largest = float(ranked[count - 1]) if count else -1.0
    return [
        torch.where((e.policy.detach() - e.behaviour) ** 2 <= largest, -e.advantages * _ratio(e), 0.0) for e in members
    ]


LOSSES: dict[str, Callable[..., list[Tensor]]] = {
    one.__name__: one for one in (ppo, gspo, gmpo, cispo, sapo, reinforce, clip_cov, kl_cov, m2po)
} | {"gpg": reinforce}
