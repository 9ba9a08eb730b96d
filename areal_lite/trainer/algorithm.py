"""The algorithm a ``trainer:`` section names: estimator, policy loss, correction; arithmetic on flat tokens, no model.

Guarantees that settings which cannot work are refused before a model is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from areal_lite.api.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.estimator import ESTIMATORS, EstimatorInputs
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
from areal_lite.trainer.objectives.policy_loss import POLICY_LOSSES, PolicyInputs, aggregation_of
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
        """Whether samples of advantage 0 have a gradient, too."""
        return (self.config.kl is not None and not self.penalizes_reward) or self.config.entropy_coef != 0

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
        estimate = self._estimate(
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
        try:
            self.advantages(tokens, pair.clone(), pair, ["", ""])
            inputs = PolicyInputs(
                policy=pair, proximal=pair, behaviour=pair, advantages=tokens.advantages, rows=rows
            )
            self.policy_loss(inputs).losses.sum()
            self.correction(pair, pair, rows)
            if config.overlong_buffer and self._max_new_tokens is not None:
                self.shape(pair.clone(), tokens)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"trainer.advantage {config.advantage!r} or trainer.loss {config.loss!r} does not work with its "
                f"options {config.advantage_kwargs} and {config.loss_kwargs}: {type(error).__name__}: {error}"
            ) from error
        if config.correction.outside == "mask" and config.correction.level != "token":
            raise ConfigError(
                f"trainer.correction: outside is mask and level is {config.correction.level}: single tokens are "
                "masked, so set level: token, or reject sequences with reject"
            )
        if config.overlong_buffer and self._max_new_tokens is None:
            raise ConfigError(
                "trainer.overlong_buffer needs the limit it lies before: give the trainer max_new_tokens"
            )
