"""The algorithm a ``trainer:`` section names: estimator, policy loss, correction; arithmetic on flat tokens, no model.

Guarantees that settings which cannot work are refused before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from areal_lite.api.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.trainer.estimators.estimator import ESTIMATORS, Estimate, EstimatorInputs
from areal_lite.trainer.estimators.inputs import OF_PROXIMAL_POLICY, MissingInput
from areal_lite.trainer.estimators.kl_controller import (
    KLController,
    kl_in_reward,
    mean_kl,
)
from areal_lite.trainer.estimators.normalize import normalize_advantages
from areal_lite.trainer.objectives.aggregation import AggregationMode, LossTerms
from areal_lite.trainer.objectives.corrections import (
    WeightLevel,
    drifted_rows,
    icepop_weights,
    importance_weights,
    rejection_mask,
    row_weights,
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
        self.kl_controller = (
            KLController(kl.coef, target=kl.target, horizon=kl.horizon) if kl else KLController(0.0)
        )
        self.needs: frozenset[str] = frozenset()
        """Inputs that the estimator asks for."""
        self.chooses = self._try_out().chosen is not None
        """Whether the loss chooses among the tokens of a whole minibatch."""

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
            or not self.needs.isdisjoint(OF_PROXIMAL_POLICY)
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
        asked = {
            "values": tokens.values if config.critic is not None else None,
            "baselines": baselines,
            "proximal_logprobs": tokens.proximal if early else None,
            "sum_squared_probs": tokens.sum_squared_probs if early and config.proximal == "trainer" else None,
        }
        estimate = self._estimate(
            EstimatorInputs(
                scores=scores,
                group_ids=group_ids,
                rows=tokens.rows,
                token_rewards=tokens.rewards,
                importance_weights=tokens.correction if early else None,
                **{name: asked[name] for name in asked if name in self.needs},
            )
        )
        self._check("advantage", estimate, tokens.rows)
        tokens.advantages = normalize_advantages(
            estimate.advantages, tokens.rows, group_ids, mean=config.advantage_mean, std=config.advantage_std
        )
        if estimate.returns is not None:
            tokens.returns = estimate.returns

    def policy_loss(self, inputs: PolicyInputs) -> LossTerms:
        """Return the losses of tokens of whole samples."""
        terms: LossTerms = self._loss(inputs)
        self._check("loss", terms, inputs.rows)
        limit = self.config.correction.max_row_kl
        if limit is None:
            return terms
        drifted = drifted_rows(inputs.policy, inputs.behaviour, inputs.advantages, inputs.rows, max_kl=limit)
        told = terms.statistics | {"drifted_fraction": drifted.to(terms.losses.dtype)}
        return LossTerms(torch.where(drifted, 0.0, terms.losses), told, terms.chosen)

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
            if self.config.loss == "gmpo":
                weights = row_weights(weights, rows)
        if config.reject is not None:
            bounds = config.reject_bounds or ""
            weights = weights * rejection_mask(proximal, behaviour, rows, option=config.reject, bounds=bounds)
        return weights

    def _check(self, key: str, returned: Estimate | LossTerms, rows: Tensor) -> None:
        """Refuse what the function named by the config ``key`` returned if it is not one float for each token."""
        kind, names, mend = _RETURNS[key]
        where = f"trainer.{key} {getattr(self.config, key)!r} returns"
        if not isinstance(returned, kind):
            raise ConfigError(
                f"{where} a {type(returned).__name__}: return {kind.__name__}({', '.join(names)})"
            )
        for name in names:
            values = getattr(returned, name)
            if values is None:
                continue
            if not isinstance(values, Tensor):
                raise ConfigError(
                    f"{where} {name} as {type(values).__name__}: give a tensor of float numbers; {mend}"
                )
            if values.shape != rows.shape or not values.is_floating_point():
                raise ConfigError(
                    f"{where} {name} of shape {list(values.shape)} and {values.dtype}: give float numbers of shape "
                    f"{list(rows.shape)}, one for each token; {mend}"
                )

    def _try_out(self) -> LossTerms:
        """Return the losses of a step of two answers, so that what the functions cannot do is told at the start."""
        config, rows = self.config, torch.tensor([0, 0, 0, 1, 1])
        logprobs, scores = torch.tensor([-1.0, -2.0, -0.5, -1.5, -0.25]), torch.tensor([1.0, 0.0])
        tokens = StepTokens.zeros(rows)
        tokens.proximal.copy_(logprobs)
        tokens.sum_squared_probs.fill_(0.5)
        tokens.correction.fill_(1.0)
        tokens.returns.fill_(torch.nan)
        if config.overlong_buffer and self._max_new_tokens is None:
            raise ConfigError(
                "trainer.overlong_buffer needs the limit it lies before: give the trainer max_new_tokens"
            )
        self.shape(scores, tokens)
        try:
            self.correction(logprobs, logprobs, rows)
        except ConfigError as error:
            raise ConfigError(f"trainer.correction.reject: {error}") from error
        with self._names("advantage"):
            while True:
                try:
                    self.advantages(tokens, scores, scores, ["", ""])
                    break
                except MissingInput as missing:
                    if missing.name in self.needs:
                        raise
                    self.needs |= {missing.name}
        with self._names("loss"):
            terms = self.policy_loss(
                PolicyInputs(
                    policy=logprobs.clone().requires_grad_(),
                    proximal=logprobs,
                    behaviour=logprobs,
                    advantages=tokens.advantages,
                    rows=rows,
                )
            )
        if not terms.losses.requires_grad:
            raise ConfigError(
                f"trainer.loss {config.loss!r} returns losses without a gradient: make them of inputs.policy, not "
                "detached"
            )
        for key, values in (("advantage", tokens.advantages), ("loss", terms.losses)):
            if not bool(values.isfinite().all()):
                name, options = getattr(config, key), getattr(config, f"{key}_kwargs")
                raise ConfigError(
                    f"trainer.{key} {name!r} with its options {options} gives {values.tolist()}: these must be finite; "
                    "choose other options, or mend it"
                )
        if config.critic is not None:
            self._check_critic(tokens.returns)
        return terms

    def _check_critic(self, returns: Tensor) -> None:
        name = self.config.advantage
        if bool(returns.isnan().any()):
            raise ConfigError(
                f"trainer.critic has nothing to learn from {name!r}, which gives no returns: choose gae, have an "
                "estimator of yours return Estimate(advantages, returns), or remove the critic"
            )
        if "values" not in self.needs:
            raise ConfigError(
                f"trainer.critic learns for nothing: {name!r} does not ask for its values. Choose gae, take "
                "inputs.needed('values') in an estimator of yours, or remove the critic"
            )

    @contextmanager
    def _names(self, key: str) -> Iterator[None]:
        """Have what breaks inside name the function of the config ``key``."""
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            name, options = getattr(self.config, key), getattr(self.config, f"{key}_kwargs")
            raise ConfigError(
                f"trainer.{key} {name!r} does not work with its options {options}: {type(error).__name__}: {error}"
            ) from error


_RETURNS: dict[str, tuple[type, tuple[str, ...], str]] = {
    "advantage": (
        Estimate,
        ("advantages", "returns"),
        "inputs.per_token(values) makes them of one for each row",
    ),
    "loss": (
        LossTerms,
        ("losses",),
        "the trainer averages them, and inputs.rows says which row a token is of",
    ),
}
"""What the function that a config key names returns, what of it is one number for each token, and how to mend that."""
