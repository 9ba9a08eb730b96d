"""Policy losses per token, by name; every one is a pure function of detached data and the policy's log-probs.

The trust region is drawn around the proximal policy. Where another policy sampled the tokens, the
weight ``proximal / behaviour`` is not in here: it multiplies the losses afterwards (corrections.py),
so that every loss has a decoupled form. Without a proximal policy of its own the caller passes the
behaviour log-probs for both ("bypass"). How tokens are averaged is aggregation.py's.

A token's loss depends on its own row alone, so nothing changes when rows are spread over micro-batches
and ranks. A loss that chooses among the tokens of a minibatch reports its choice in
:attr:`LossTerms.chosen`. It is asked for it once, over the whole minibatch and before the update, and
gets it back with each micro-batch in :attr:`PolicyInputs.chosen`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.aggregation import AggregationMode, LossTerms
from areal_lite.trainer.objectives.log_ratio import MAX_LOG_RATIO, clamped_log_ratio
from areal_lite.trainer.objectives.token_rows import row_mean, row_sum
from areal_lite.trainer.registry import Registry

POLICY_LOSSES: Registry[Callable[..., LossTerms]] = Registry("policy loss")

VANISHES_WITHOUT_ADVANTAGE = frozenset(
    {"ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "gpg", "clip_cov", "m2po"}
)
"""Losses that are 0, gradient included, for a row whose advantages are 0, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """What every policy loss sees: ``[T]`` each, one entry per trained token, whole rows.

    Raises:
        ValueError: If the shapes differ.
    """

    policy: Tensor
    """Log-probs (nats) under the weights being trained; the only one with gradient."""

    proximal: Tensor
    """Log-probs under the weights at the start of the step."""

    behaviour: Tensor
    """Log-probs the engine sampled with."""

    advantages: Tensor
    """Equal along a row where one score judges the whole."""

    rows: Tensor
    """int64, the row of each token."""

    chosen: Tensor | None = None
    """bool, what the loss chose among the tokens of the minibatch these are a part of; None: these are all."""

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        shapes = {name: list(value.shape) for name, value in values.items() if value is not None}
        if any(shape != [len(self.rows)] for shape in shapes.values()):
            raise ValueError(f"shapes differ: {shapes}: give [T] to all, one entry per trained token")


def aggregation_of(loss: str, configured: AggregationMode | None = None, *, where: str) -> AggregationMode:
    """Return how the losses of ``loss`` are averaged: as configured, else as its paper does.

    Raises:
        ConfigError: If another mode than a mean over rows is ``configured`` (by the key ``where``) for a loss
            that has one ratio per row.
    """
    if loss in ("gspo", "gmpo") and configured not in (None, AggregationMode.SEQ_MEAN_TOKEN_MEAN):
        raise ConfigError(
            f"{where} is {configured!s}: {loss} has one ratio per row and is a mean over rows; leave it out, or choose "
            f"{AggregationMode.SEQ_MEAN_TOKEN_MEAN!s}"
        )
    by_row = loss in ("gspo", "gmpo", "sapo")
    return configured or (AggregationMode.SEQ_MEAN_TOKEN_MEAN if by_row else AggregationMode.TOKEN_MEAN)


@POLICY_LOSSES.register("ppo")
def ppo(
    inputs: PolicyInputs,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
) -> LossTerms:
    """Return PPO's clipped loss: the worse of the free and the held ratio.

    Args:
        clip_eps: Half-width of the trust region; the ratio is held to ``1 +- clip_eps``.
        clip_eps_high: Upper half-width where it differs (clip-higher, DAPO, arXiv:2503.14476).
        dual_clip: Above 1; where the advantage is below 0 the ratio counts at most this much.

    Source: PPO (arXiv:1707.06347); around the proximal policy: arXiv:2110.00641 and AReaL
    (arXiv:2505.24298); dual clip: arXiv:1912.09729.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ConfigError(f"dual_clip is {dual_clip}: it bounds ratios above 1 and must exceed 1; 3 is usual")
    advantages, log_ratio = inputs.advantages, clamped_log_ratio(inputs.policy, inputs.proximal)
    losses, clipped = _clipped_losses(log_ratio.exp(), advantages, clip_eps, clip_eps_high)
    capped = torch.zeros_like(clipped)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        capped = (advantages < 0) & (losses > cap)
        losses = torch.where(capped, cap, losses)
    return LossTerms(losses, _statistics(log_ratio, clip_fraction=clipped, clip_fraction_lower=capped))


@POLICY_LOSSES.register("gspo")
def gspo(inputs: PolicyInputs, *, clip_eps: float = 3e-4, clip_eps_high: float | None = 4e-4) -> LossTerms:
    """Return the clipped loss with one ratio per row, the geometric mean of its tokens' ratios.

    Each token carries its own gradient of that ratio, so advantages may differ along a row (GSPO-token).

    Args:
        clip_eps: As of :func:`ppo`; ratios of rows vary far less than those of tokens.
        clip_eps_high: Upper half-width.

    Source: GSPO (arXiv:2507.18071).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    of_row = row_mean(log_ratio.detach(), inputs.rows) + (inputs.policy - inputs.policy.detach())
    ratio = of_row.clamp(max=10.0).exp()
    losses, clipped = _clipped_losses(ratio, inputs.advantages, clip_eps, clip_eps_high)
    return LossTerms(losses, _statistics(log_ratio, clip_fraction=clipped))


@POLICY_LOSSES.register("gmpo")
def gmpo(inputs: PolicyInputs, *, clip_eps: float = 0.4, clip_eps_high: float | None = None) -> LossTerms:
    """Return ``-A * ratio`` of the row at each of its tokens, the ratio being a geometric mean of clipped ones.

    Clipping is per token, in log space and on the side that the advantage's sign makes harmful; ``A``
    is the row's mean advantage.

    Args:
        clip_eps: Nats below 0 that a token's log-ratio is held to.
        clip_eps_high: Nats above 0.

    Source: GMPO (arXiv:2507.20673).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    held = log_ratio.clamp(-clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    sign = inputs.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * held)
    losses = -row_mean(inputs.advantages, inputs.rows) * row_mean(pessimistic, inputs.rows).exp()
    return LossTerms(losses, _statistics(log_ratio, clip_fraction=sign * log_ratio > sign * held))


@POLICY_LOSSES.register("cispo")
def cispo(inputs: PolicyInputs, *, clip_eps: float = 1.0, clip_eps_high: float | None = 0.28) -> LossTerms:
    """Return ``-clip(ratio) * A * log p`` with no gradient through the ratio: clipped tokens still teach.

    Args:
        clip_eps: As of :func:`ppo`; 1 leaves ratios below 1 as they are.
        clip_eps_high: Upper half-width.

    Source: CISPO, MiniMax-M1 (arXiv:2506.13585).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    ratio = log_ratio.detach().exp()
    held = _held(ratio, clip_eps, clip_eps_high)
    losses = -held * inputs.advantages * inputs.policy
    return LossTerms(losses, _statistics(log_ratio, clip_fraction=held != ratio))


@POLICY_LOSSES.register("sapo")
def sapo(inputs: PolicyInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> LossTerms:
    """Return ``-A * (4 / tau) * sigmoid(tau * (ratio - 1))``: a gate that closes smoothly instead of a clip.

    Args:
        tau_positive: How fast it closes where the advantage is above 0.
        tau_negative: The same elsewhere.

    Source: SAPO (arXiv:2511.20347).
    """
    advantages, log_ratio = inputs.advantages, clamped_log_ratio(inputs.policy, inputs.proximal)
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    losses = -advantages * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
    return LossTerms(losses, _statistics(log_ratio))


@POLICY_LOSSES.register("gpg")
@POLICY_LOSSES.register("reinforce")
def reinforce(inputs: PolicyInputs) -> LossTerms:
    """Return ``-A * log p``.

    Source: REINFORCE (Williams, 1992); GPG (arXiv:2504.02546) has the same loss.
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    return LossTerms(-inputs.advantages * inputs.policy, _statistics(log_ratio))


@POLICY_LOSSES.register("clip_cov")
def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    token_share: float = 2e-4,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
) -> LossTerms:
    """Return PPO's loss, less a few tokens of high covariance, which would eat up the entropy.

    Tokens are drawn from those of the minibatch that are not clipped and whose covariance of log-prob and
    advantage lies between the bounds. The draw is a function of their behaviour log-probs alone.

    Args:
        clip_eps: As of :func:`ppo`, and so the next.
        clip_eps_high: Upper half-width.
        token_share: Share of the minibatch's tokens to drop; one at least, if any qualifies.
        min_covariance: Exclusive.
        max_covariance: Exclusive.

    Source: Clip-Cov (arXiv:2505.22617).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    losses, clipped = _clipped_losses(log_ratio.exp(), inputs.advantages, clip_eps, clip_eps_high)
    dropped = inputs.chosen
    if dropped is None:
        covariance = _covariance(inputs)
        candidates = (covariance > min_covariance) & (covariance < max_covariance) & ~clipped
        order = _lots(inputs).masked_fill(~candidates, torch.iinfo(torch.int64).max).argsort(stable=True)
        dropped = _marked(order[: max(1, int(token_share * len(order)))], candidates) & candidates
    return LossTerms(
        torch.where(dropped, 0.0, losses), _statistics(log_ratio, clip_fraction=dropped), dropped
    )


@POLICY_LOSSES.register("kl_cov")
def kl_cov(inputs: PolicyInputs, *, token_share: float = 2e-4, kl_coef: float = 1.0) -> LossTerms:
    """Return ``-A * ratio``, with a penalty on how far tokens of the highest covariance have moved.

    Args:
        token_share: Share of the minibatch's tokens to penalise; one at least.
        kl_coef: Weight of their ``|log ratio|``.

    Source: KL-Cov (arXiv:2505.22617).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    penalised = inputs.chosen
    if penalised is None:
        order = _covariance(inputs).argsort(descending=True, stable=True)
        penalised = _marked(order[: max(1, int(token_share * len(order)))], inputs.rows)
    losses = -inputs.advantages * log_ratio.exp() + torch.where(penalised, kl_coef * log_ratio.abs(), 0.0)
    return LossTerms(losses, _statistics(log_ratio), penalised)


@POLICY_LOSSES.register("m2po")
def m2po(inputs: PolicyInputs, *, max_second_moment: float = 0.04) -> LossTerms:
    """Return ``-A * ratio`` without the tokens that moved most since they were sampled.

    The largest ``|policy - behaviour|`` of the minibatch go first, until the mean square of the kept ones
    is within the bound.

    Args:
        max_second_moment: Upper bound on the mean of ``(policy - behaviour)^2`` in nats squared.

    Source: M2PO (arXiv:2510.01161).
    """
    log_ratio = clamped_log_ratio(inputs.policy, inputs.proximal)
    keep = inputs.chosen
    if keep is None:
        moved = clamped_log_ratio(inputs.policy.detach(), inputs.behaviour).nan_to_num(MAX_LOG_RATIO)
        squares, order = moved.double().square().sort(stable=True)
        means = squares.cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
        keep = _marked(order[means <= max_second_moment], order)
    losses = torch.where(keep, -inputs.advantages * log_ratio.exp(), 0.0)
    return LossTerms(losses, _statistics(log_ratio, clip_fraction=~keep), keep)


def _held(ratio: Tensor, eps: float, eps_high: float | None) -> Tensor:
    if eps < 0 or (eps_high is not None and eps_high < 0):
        raise ConfigError(
            f"trainer.loss_kwargs: clip_eps is {eps} and clip_eps_high {eps_high}: use 0 or more"
        )
    return ratio.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high))


def _clipped_losses(
    ratio: Tensor, advantages: Tensor, eps: float, eps_high: float | None
) -> tuple[Tensor, Tensor]:
    """Return the losses and where clipping was what decided."""
    free, held = -advantages * ratio, -advantages * _held(ratio, eps, eps_high)
    return torch.maximum(free, held), held > free


def _covariance(inputs: PolicyInputs) -> Tensor:
    policy, advantages = inputs.policy.detach().double(), inputs.advantages.double()
    return (advantages - advantages.mean()) * (policy - policy.mean())


def _marked(places: Tensor, like: Tensor) -> Tensor:
    """Return bool as long as ``like``, True at the places."""
    return torch.zeros_like(like, dtype=torch.bool).index_fill(0, places, True)


def _lots(inputs: PolicyInputs) -> Tensor:
    """Return ``[T]`` int64, a pseudo-random number made of the behaviour log-probs of the token and its row.

    So a draw depends neither on the order of rows nor on rounding in the trainer, nor on the global generator.
    """
    bits = inputs.behaviour.float().view(torch.int32).long()
    mixed = bits + row_sum(bits, inputs.rows) * 0x2545F4914F6CDD1D
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 32)


@torch.no_grad()
def _statistics(log_ratio: Tensor, **shares: Tensor) -> dict[str, Tensor]:
    """Return ``ratio`` and ``approx_kl`` (k3 of policy against proximal, nats), and the given shares of tokens."""
    ratio = log_ratio.exp()
    shares = {name: chosen.to(ratio.dtype) for name, chosen in shares.items()}
    return {"ratio": ratio, "approx_kl": ratio - 1 - log_ratio.detach(), **shares}
