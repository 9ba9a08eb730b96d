"""The algorithm a ``trainer:`` section names: estimator, policy loss, correction; arithmetic on flat tokens, no model.

Guarantees that settings which cannot work are refused before a model is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.api.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.estimator import ESTIMATORS, Estimate, EstimatorInputs
from areal_lite.trainer.estimators.kl_controller import (
    AdaptiveKL,
    FixedKL,
    KLController,
    kl_in_reward,
    mean_kl,
)
from areal_lite.trainer.estimators.normalize import normalize_advantages
from areal_lite.trainer.objectives.aggregation import AggregationMode, LossTerms
from areal_lite.trainer.objectives.corrections import (
    WeightLevel,
    icepop_weights,
    importance_weights,
    rejection_mask,
)
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.overlong import overlong_penalty
from areal_lite.trainer.objectives.policy_loss import (
    POLICY_LOSSES,
    VANISHES_WITHOUT_ADVANTAGE,
    PolicyInputs,
    aggregation_of,
)
from areal_lite.trainer.step_tokens import StepTokens


class Algorithm:
    """What is computed from rewards and log-probs.

    Args:
        config: The ``trainer:`` section.
        max_new_tokens: Limit of an answer, for the penalty on overlong ones.

    Raises:
        ConfigError: If a name is not known, an option is not taken, or settings contradict each other.
    """

    def __init__(self, config: TrainerConfig, *, max_new_tokens: int | None) -> None:
        self.config = config
        self._max_new_tokens = max_new_tokens
        self._estimate = ESTIMATORS.bound(
            config.advantage, config.advantage_kwargs, where="trainer.advantage"
        )
        self._loss = POLICY_LOSSES.bound(config.loss, config.loss_kwargs, where="trainer.loss")
        mode = None if config.loss_aggregation is None else AggregationMode(config.loss_aggregation)
        self.aggregation = aggregation_of(config.loss, mode, where="trainer.loss_aggregation")
        kl = config.kl
        self.kl_controller: KLController = (
            AdaptiveKL(kl.coef, target=kl.target, horizon=kl.horizon)
            if kl is not None and kl.target is not None
            else FixedKL(0.0 if kl is None else kl.coef)
        )
        _check(config, max_new_tokens)
        self._try_out()

    @property
    def penalizes_reward(self) -> bool:
        """Whether the KL penalty is taken from the rewards."""
        return self.config.kl is not None and self.config.kl.place == "reward"

    @property
    def needs_proximal_early(self) -> bool:
        """Whether something before the update needs proximal log-probs."""
        return (
            self.config.proximal == "behaviour"
            or self.penalizes_reward
            or self.config.correction.normalize
            or self.config.advantage == "optimal_token_baseline"
        )

    @property
    def needs_every_sample(self) -> bool:
        """Whether samples of advantage 0 may have a gradient, too."""
        in_loss = self.config.kl is not None and not self.penalizes_reward
        return in_loss or self.config.entropy_coef != 0 or self.config.loss not in VANISHES_WITHOUT_ADVANTAGE

    def shape(self, scores: Tensor, tokens: StepTokens) -> None:
        """Take the penalty on overlong answers from ``scores [N]``, and give each to its last token."""
        if self.config.overlong_buffer:
            lengths = torch.bincount(tokens.rows, minlength=len(scores))
            scores += overlong_penalty(
                lengths, max_length=self._max_new_tokens or 0, buffer=self.config.overlong_buffer
            )
        tokens.rewards[tokens.ends] = scores[tokens.rows[tokens.ends]]

    def penalize(self, tokens: StepTokens, num_rows: int) -> dict[str, float]:
        """Take the KL penalty from the rewards, adapt its coefficient for the next step, and return metrics."""
        assert self.config.kl is not None
        controller = self.kl_controller
        penalty = kl_penalty(tokens.proximal, tokens.reference, self.config.kl.estimator)
        tokens.rewards = kl_in_reward(tokens.rewards, penalty, controller.coef)
        metrics = {"reward_kl": mean_kl(penalty, tokens.rows), "reward_kl_coef": controller.coef}
        controller.update(metrics["reward_kl"], num_rows)
        return metrics

    def advantages(
        self, tokens: StepTokens, scores: Tensor, baselines: Tensor | None, group_ids: list[str]
    ) -> None:
        """Fill in advantages, and returns where the estimator has them."""
        config, early = self.config, self.needs_proximal_early
        estimate: Estimate = self._estimate(
            EstimatorInputs(
                scores=scores,
                group_ids=group_ids,
                rows=tokens.rows,
                token_rewards=tokens.rewards,
                values=tokens.values if config.critic is not None else None,
                baselines=baselines,
                proximal_logprobs=tokens.proximal if early else None,
                sum_squared_probs=tokens.sum_squared_probs
                if early and config.proximal == "trainer"
                else None,
                importance_weights=tokens.correction if early else None,
            )
        )
        tokens.advantages = normalize_advantages(
            estimate.advantages, tokens.rows, group_ids, mean=config.advantage_mean, std=config.advantage_std
        )
        if estimate.returns is not None:
            tokens.returns = estimate.returns

    def policy_loss(self, inputs: PolicyInputs) -> LossTerms:
        """Return the losses of tokens of whole samples."""
        terms: LossTerms = self._loss(inputs)
        return terms

    def correction(self, proximal: Tensor, behaviour: Tensor, rows: Tensor) -> Tensor:
        """Return ``[T]`` what each token's loss is multiplied by for being sampled from another policy."""
        config = self.config.correction
        if config.level == "none":
            weights = torch.ones_like(proximal)
        elif config.outside == "mask":
            weights = icepop_weights(proximal, behaviour, lower=config.min_weight, upper=config.max_weight)
        else:
            weights = importance_weights(
                proximal,
                behaviour,
                rows,
                level=WeightLevel(config.level),
                max_weight=config.max_weight,
                normalize=config.normalize,
            )
        if config.reject is not None:
            bounds = config.reject_bounds or ""
            weights = weights * rejection_mask(proximal, behaviour, rows, option=config.reject, bounds=bounds)
        return weights

    def _try_out(self) -> None:
        """Compute one step of two tokens, so that settings the functions refuse are refused at the start."""
        config, pair, rows = self.config, torch.tensor([-1.0, -2.0]), torch.arange(2)
        tokens = StepTokens.zeros(rows)
        tokens.sum_squared_probs.fill_(0.5)
        tokens.returns.fill_(torch.nan)
        try:
            self.advantages(tokens, pair.clone(), pair, ["", ""])
            inputs = PolicyInputs(
                policy=pair, proximal=pair, behaviour=pair, advantages=tokens.advantages, rows=rows
            )
            losses = self.policy_loss(inputs).losses
            if config.overlong_buffer and self._max_new_tokens is not None:
                self.shape(pair.clone(), tokens)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"trainer.advantage {config.advantage!r} or trainer.loss {config.loss!r} does not work with its "
                f"options {config.advantage_kwargs} and {config.loss_kwargs}: {type(error).__name__}: {error}"
            ) from error
        for where, values in (("advantage", tokens.advantages), ("loss", losses)):
            if not bool(values.isfinite().all()):
                raise ConfigError(
                    f"trainer.{where}_kwargs: with these options {getattr(config, where)!r} gives {values.tolist()}: "
                    "choose others"
                )
        if config.critic is not None and bool(tokens.returns.isnan().any()):
            raise ConfigError(
                f"trainer.critic has nothing to learn from {config.advantage!r}, which gives no returns: choose gae, "
                "or remove the critic"
            )


def _check(config: TrainerConfig, max_new_tokens: int | None) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: With the key.
    """
    correction = config.correction
    pair, rows = torch.tensor([-1.0, -2.0]), torch.arange(2)
    if correction.reject is not None:
        try:
            rejection_mask(pair, pair, rows, option=correction.reject, bounds=correction.reject_bounds or "")
        except ConfigError as error:
            raise ConfigError(f"trainer.correction.reject: {error}") from error
    complaints = {
        "correction.reject_bounds is without reject: name a statistic for each bound": (
            correction.reject is None and correction.reject_bounds is not None
        ),
        "correction.reject compares proximal and behaviour, which proximal: behaviour makes the same: remove one": (
            correction.reject is not None and config.proximal == "behaviour"
        ),
        f"correction.level is {correction.level} with outside: mask, which masks single tokens: set level: token": (
            correction.outside == "mask" and correction.level != "token"
        ),
        f"correction.min_weight is {correction.min_weight}, not below max_weight {correction.max_weight}: nothing "
        "would be trained": correction.outside == "mask" and correction.min_weight >= correction.max_weight,
        "kl.target adapts the penalty in the reward: set place: reward, or remove it": (
            config.kl is not None and config.kl.target is not None and config.kl.place == "loss"
        ),
        "loss_aggregation seq-mean-token-sum-norm divides by loss_scale: give it, in tokens": (
            config.loss_aggregation == "seq-mean-token-sum-norm" and config.loss_scale is None
        ),
        "overlong_buffer needs the limit it lies before: give the trainer max_new_tokens": (
            config.overlong_buffer > 0 and max_new_tokens is None
        ),
    }
    for complaint, holds in complaints.items():
        if holds:
            raise ConfigError(f"trainer.{complaint}")
