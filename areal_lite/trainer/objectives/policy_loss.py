"""Policy losses per token, by name: pure functions of detached data and the policy's log-probs; and the loss of values.

The trust region is drawn around the proximal policy. The weight ``proximal / behaviour`` for tokens sampled by another
policy multiplies the losses afterwards (corrections.py), so every loss has a decoupled form. Without a separate
proximal policy the caller passes the behaviour log-probs for both ("bypass").

A token's loss depends on its own episode alone, so episodes can be spread over micro-batches and ranks. A loss that
chooses among the tokens of a minibatch reports its choice in :attr:`LossTerms.chosen`: it is called once over the
whole minibatch before the update, and then finds its choice in :attr:`PolicyInputs.chosen` for each micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
import torch
from torch import Tensor
from areal_lite.config.schema import Above0, Above1, AtLeast0, Share
from areal_lite.config.trainer_config import AggregationMode
from areal_lite.errors import ConfigError
from areal_lite.trainer.objectives.aggregation import LossTerms, episode_mean, episode_sum
from areal_lite.trainer.objectives.kl import MAX_LOG_RATIO, clamped_log_ratio

ONE_TOKEN_AT_A_TIME = frozenset({"ppo", "cispo", "sapo", "reinforce", "gpg", "clip_cov", "kl_cov", "m2po"})
"""Losses in which a token depends on no other token, once the chosen tokens are fixed."""

VANISHES_WITHOUT_ADVANTAGE = frozenset({"ppo", "gspo", "gmpo", "cispo", "sapo", "reinforce", "gpg", "clip_cov", "m2po"})
"""Losses that are 0, gradient included, for an episode with advantages of 0, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Inputs of a policy loss: ``[T]`` each, one entry per trained token, whole episodes."""

    policy: Tensor
    """Log-probs (nats) under the weights being trained; the only input with gradient."""
    proximal: Tensor
    """Log-probs under the weights at the start of the step."""
    behaviour: Tensor
    """Log-probs the engine sampled with."""
    advantages: Tensor
    """Equal along an episode that is rewarded as a whole."""
    episodes: Tensor
    """int64, the episode of each token."""
    chosen: Tensor | None = None
    """bool, the loss's choice among the tokens of the minibatch; None when the inputs are the whole minibatch."""

    @property
    def log_ratio(self) -> Tensor:
        """Log of policy / proximal in nats, clamped so that no ratio overflows."""
        return clamped_log_ratio(self.policy, self.proximal)


def aggregation_of(loss: str, configured: AggregationMode | None = None, *, where: str) -> AggregationMode:
    """Return the aggregation mode of ``loss``: the one configured by the key ``where``, else that of its paper."""
    if loss in ("gspo", "gmpo") and configured not in (None, "seq-mean-token-mean"):
        raise ConfigError(
            f"{where} is {configured}: {loss} has one ratio per episode and is a mean over episodes; remove the key, "
            "or set seq-mean-token-mean"
        )
    return configured or ("seq-mean-token-mean" if loss in ("gspo", "gmpo", "sapo") else "token-mean")


def ppo(
    inputs: PolicyInputs,
    *,
    clip_eps: AtLeast0 = 0.2,
    clip_eps_high: AtLeast0 | None = None,
    dual_clip: Above1 | None = None,
) -> LossTerms:
    """Return PPO's clipped loss: the larger of the losses with the free and with the clipped ratio, ``1 +- clip_eps``.
    ``clip_eps_high`` is another upper half-width (clip-higher, DAPO, arXiv:2503.14476); ``dual_clip``, above 1, caps
    the ratio of tokens with a negative advantage (arXiv:1912.09729). Source: PPO (arXiv:1707.06347); around the
    proximal policy: arXiv:2110.00641 and AReaL (arXiv:2505.24298)."""
    advantages = inputs.advantages
    losses, clipped = _clipped_losses(inputs.log_ratio.exp(), advantages, clip_eps, clip_eps_high)
    shares = _sides(clipped, above=advantages > 0)
    capped = torch.zeros_like(clipped)
    if dual_clip is not None:
        cap = -advantages * dual_clip
        capped = (advantages < 0) & (losses > cap)
        losses = torch.where(capped, cap, losses)
    return LossTerms(losses, _statistics(inputs, **shares, clip_fraction_lower=capped))


def gspo(inputs: PolicyInputs, *, clip_eps: AtLeast0 = 3e-4, clip_eps_high: AtLeast0 | None = 4e-4) -> LossTerms:
    """Return the clipped loss with one ratio per episode, the geometric mean of its tokens'. Each token has its own
    gradient of it, so advantages may differ along an episode (GSPO-token). Source: GSPO (arXiv:2507.18071)."""
    log_mean = episode_mean(inputs.log_ratio.detach(), inputs.episodes) + (inputs.policy - inputs.policy.detach())
    ratio = log_mean.clamp(max=10.0).exp()
    losses, clipped = _clipped_losses(ratio, inputs.advantages, clip_eps, clip_eps_high)
    return LossTerms(losses, _statistics(inputs, **_sides(clipped, above=inputs.advantages > 0)))


def gmpo(inputs: PolicyInputs, *, clip_eps: AtLeast0 = 0.4, clip_eps_high: AtLeast0 | None = None) -> LossTerms:
    """Return the episode's ``-A * ratio`` at each of its tokens; the ratio is a geometric mean of clipped ratios.
    Clipping is per token, to log-ratios of ``-clip_eps`` to ``clip_eps_high`` nats, on the side that the advantage
    pushes towards. ``A`` is the episode's mean advantage. Source: GMPO (arXiv:2507.20673)."""
    log_ratio = inputs.log_ratio
    bounded = log_ratio.clamp(-clip_eps, clip_eps if clip_eps_high is None else clip_eps_high)
    sign = inputs.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    advantages = episode_mean(inputs.advantages, inputs.episodes)
    losses = -advantages * episode_mean(pessimistic, inputs.episodes).exp()
    clipped = sign * log_ratio > sign * bounded
    return LossTerms(losses, _statistics(inputs, **_sides(clipped, above=sign > 0)))


def cispo(inputs: PolicyInputs, *, clip_eps: AtLeast0 = 1.0, clip_eps_high: AtLeast0 | None = 0.28) -> LossTerms:
    """Return ``-clip(ratio) * A * log p`` without gradient through the ratio: clipped tokens still train. A
    ``clip_eps`` of 1 leaves ratios below 1 unclipped. Source: CISPO, MiniMax-M1 (arXiv:2506.13585)."""
    ratio = inputs.log_ratio.detach().exp()
    clipped = _clip(ratio, clip_eps, clip_eps_high)
    losses = -clipped * inputs.advantages * inputs.policy
    return LossTerms(losses, _statistics(inputs, **_sides(clipped != ratio, above=ratio > 1)))


def sapo(inputs: PolicyInputs, *, tau_positive: Above0 = 1.0, tau_negative: Above0 = 1.05) -> LossTerms:
    """Return ``-A * (4 / tau) * sigmoid(tau * (ratio - 1))``: a smooth gate instead of a clip; its steepness ``tau``
    depends on the sign of the advantage. Source: SAPO (arXiv:2511.20347)."""
    advantages = inputs.advantages
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    return LossTerms(-advantages * 4 / tau * torch.sigmoid(tau * (inputs.log_ratio.exp() - 1)), _statistics(inputs))


def reinforce(inputs: PolicyInputs) -> LossTerms:
    """Return ``-A * log p``. Source: REINFORCE (Williams, 1992); GPG (arXiv:2504.02546) has the same loss."""
    return LossTerms(-inputs.advantages * inputs.policy, _statistics(inputs))


def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_eps: AtLeast0 = 0.2,
    clip_eps_high: AtLeast0 | None = None,
    token_share: Share = 2e-4,
    min_covariance: float = 1.0,
    max_covariance: float = 5.0,
) -> LossTerms:
    """Return PPO's loss without a few tokens of high covariance, which reduce the entropy most. A ``token_share`` of
    the minibatch's tokens, at least one, is drawn from the unclipped ones whose covariance of log-prob and advantage
    lies between the bounds; drawn by their behaviour log-probs alone. Source: Clip-Cov (arXiv:2505.22617)."""
    losses, clipped = _clipped_losses(inputs.log_ratio.exp(), inputs.advantages, clip_eps, clip_eps_high)
    dropped = inputs.chosen
    if dropped is None:
        covariance = _covariance(inputs)
        candidates = (covariance > min_covariance) & (covariance < max_covariance) & ~clipped
        order = _draw(inputs).masked_fill(~candidates, torch.iinfo(torch.int64).max).argsort(stable=True)
        dropped = _mask_at(order[: max(1, int(token_share * len(order)))], candidates) & candidates
    losses = torch.where(dropped, 0.0, losses)
    return LossTerms(losses, _statistics(inputs, clip_fraction=dropped), dropped)


def kl_cov(inputs: PolicyInputs, *, token_share: Share = 2e-4, kl_coef: AtLeast0 = 1.0) -> LossTerms:
    """Return ``-A * ratio``, plus ``kl_coef * |log ratio|`` for the ``token_share`` (at least one token) of the
    minibatch with the highest covariance. Source: KL-Cov (arXiv:2505.22617)."""
    log_ratio = inputs.log_ratio
    penalised = inputs.chosen
    if penalised is None:
        order = _covariance(inputs).argsort(descending=True, stable=True)
        penalised = _mask_at(order[: max(1, int(token_share * len(order)))], inputs.episodes)
    losses = -inputs.advantages * log_ratio.exp() + torch.where(penalised, kl_coef * log_ratio.abs(), 0.0)
    return LossTerms(losses, _statistics(inputs), penalised)


def m2po(inputs: PolicyInputs, *, max_second_moment: AtLeast0 = 0.04) -> LossTerms:
    """Return ``-A * ratio`` without the tokens whose log-prob changed most since they were sampled: those of the
    largest ``|policy - behaviour|`` are dropped until the mean square of the rest (nats squared) is at most
    ``max_second_moment``. Source: M2PO (arXiv:2510.01161)."""
    keep = inputs.chosen
    if keep is None:
        change = clamped_log_ratio(inputs.policy.detach(), inputs.behaviour).nan_to_num(MAX_LOG_RATIO)
        squares, order = change.double().square().sort(stable=True)
        means = squares.cumsum(0) / torch.arange(1, len(order) + 1, device=order.device)
        keep = _mask_at(order[means <= max_second_moment], order)
    losses = torch.where(keep, -inputs.advantages * inputs.log_ratio.exp(), 0.0)
    return LossTerms(losses, _statistics(inputs, clip_fraction=~keep), keep)


POLICY_LOSSES: dict[str, Callable[..., LossTerms]] = {
    loss.__name__: loss for loss in (ppo, gspo, gmpo, cispo, sapo, reinforce, clip_cov, kl_cov, m2po)
} | {"gpg": reinforce}


def _clip(ratio: Tensor, eps: float, eps_high: float | None) -> Tensor:
    return ratio.clamp(1 - eps, 1 + (eps if eps_high is None else eps_high))


def _clipped_losses(ratio: Tensor, advantages: Tensor, eps: float, eps_high: float | None) -> tuple[Tensor, Tensor]:
    """Return the losses, and True for the tokens where the clipped ratio decided."""
    free, clipped = -advantages * ratio, -advantages * _clip(ratio, eps, eps_high)
    return torch.maximum(free, clipped), clipped > free


def _covariance(inputs: PolicyInputs) -> Tensor:
    policy, advantages = inputs.policy.detach().double(), inputs.advantages.double()
    return (advantages - advantages.mean()) * (policy - policy.mean())


def _mask_at(indices: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).index_fill(0, indices, True)


def _draw(inputs: PolicyInputs) -> Tensor:
    """Return ``[T]`` int64, pseudo-random numbers made from the behaviour log-probs of the token and its episode: a
    draw does not depend on the order of episodes, on rounding in the trainer, or on global random state."""
    bits = inputs.behaviour.float().view(torch.int32).long()
    mixed = bits + episode_sum(bits, inputs.episodes) * 0x2545F4914F6CDD1D
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
    return mixed ^ (mixed >> 32)


def _sides(clipped: Tensor, *, above: Tensor) -> dict[str, Tensor]:
    return {"clip_fraction": clipped, "clip_fraction_low": clipped & ~above, "clip_fraction_high": clipped & above}


@torch.no_grad()
def _statistics(inputs: PolicyInputs, **shares: Tensor) -> dict[str, Tensor]:
    """Return ``ratio`` and ``approx_kl`` (k3 of policy against proximal, nats), and the given shares of tokens."""
    ratio = inputs.log_ratio.exp()
    shares = {name: chosen.to(ratio.dtype) for name, chosen in shares.items()}
    return {"ratio": ratio, "approx_kl": ratio - 1 - inputs.log_ratio, **shares}


def value_loss(values: Tensor, proximal_values: Tensor, returns: Tensor, *, clip: float | None = None) -> LossTerms:
    """Return half the squared error of each token's value ``[T]``; statistic ``value_clip_fraction``. With ``clip``, in
    units of reward, it is the larger of the errors of the free value and of the one clipped around the proximal value,
    so there is no gain in leaving the band. Source: PPO's reference code (arXiv:1707.06347; arXiv:2005.12729)."""
    error = (values - returns).square()
    clipped_error = error
    if clip is not None:
        clipped = torch.clamp(values, proximal_values - clip, proximal_values + clip)
        clipped_error = (clipped - returns).square()
    statistics = {"value_clip_fraction": (clipped_error > error).to(values.dtype)}
    return LossTerms(torch.maximum(error, clipped_error) / 2, statistics)
