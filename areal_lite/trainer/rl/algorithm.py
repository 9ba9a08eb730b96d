"""The algorithm of a ``trainer:`` section: estimator, policy loss, correction. Arithmetic on flat tensors, no model.
Guarantees that settings that cannot work fail before a model is loaded."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from inspect import Parameter
from typing import Any
import torch
from torch import Tensor
from areal_lite.config.dotted_path import load_object
from areal_lite.config.schema import checked
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.errors import ConfigError, did_you_mean
from areal_lite.trainer.estimators import ESTIMATORS, Estimate, EstimatorInputs
from areal_lite.trainer.estimators.inputs import PROXIMAL_INPUTS, MissingInput, Turns, normalize_advantages
from areal_lite.trainer.objectives import LossTerms, PolicyInputs, corrections, policy_loss
from areal_lite.trainer.objectives.aggregation import episode_mean
from areal_lite.trainer.objectives.kl import adapted_coef, kl_penalty, mean_kl
from areal_lite.trainer.rl.step_tokens import StepTokens


class Algorithm:
    """Rewards and log-probs in, advantages, losses and correction weights out; contradicting settings are refused."""

    def __init__(self, config: TrainerConfig, *, max_new_tokens: int | None) -> None:
        self.config = config
        self.max_new_tokens = max_new_tokens
        self._estimate = chosen_function(
            ESTIMATORS, config.advantage, config.advantage_kwargs, where="trainer.advantage"
        )
        self._loss = chosen_function(policy_loss.POLICY_LOSSES, config.loss, config.loss_kwargs, where="trainer.loss")
        self.aggregation = policy_loss.aggregation_of(
            config.loss, config.loss_aggregation, where="trainer.loss_aggregation"
        )
        self.kl_coef = config.kl.coef if config.kl else 0.0
        self.kl_place = config.kl.place if config.kl else None
        self.needs: frozenset[str] = frozenset()  # inputs that the estimator requests
        self.chooses = self._dry_run().chosen is not None  # the loss chooses among all tokens of a minibatch

    @property
    def needs_proximal_early(self) -> bool:
        """True if something before the update needs proximal log-probs."""
        return (
            self.config.proximal == "behaviour"
            or self.kl_place in ("reward", "advantage")
            or self.config.correction.normalize
            or not self.needs.isdisjoint(PROXIMAL_INPUTS)
        )

    @property
    def needs_every_episode(self) -> bool:
        """True if episodes with an advantage of 0 may have a gradient."""
        vanishes = self.config.loss in policy_loss.VANISHES_WITHOUT_ADVANTAGE
        return self.kl_place == "loss" or self.config.entropy_coef != 0 or not vanishes

    @property
    def couples_tokens(self) -> bool:
        """True if a token's loss depends on other tokens of its episode, which must then be computed together."""
        config, correction = self.config, self.config.correction
        by_episode = correction.level == "sequence" or "seq_" in (correction.reject or "")
        return by_episode or correction.max_episode_kl is not None or config.loss not in policy_loss.ONE_TOKEN_AT_A_TIME

    def shape_rewards(self, scores: Tensor, tokens: StepTokens) -> dict[str, float]:
        """Subtract the penalty on overlong answers from ``scores [E]`` and last tokens' rewards; return metrics."""
        if not self.config.overlong_buffer:
            return {}
        assert self.max_new_tokens is not None
        lengths = torch.bincount(tokens.episodes, minlength=len(scores))
        penalty = overlong_penalty(lengths, max_length=self.max_new_tokens, buffer=self.config.overlong_buffer)
        scores += penalty
        tokens.rewards[tokens.ends] += penalty[tokens.episodes[tokens.ends]]
        return {"overlong_penalty": penalty.mean().item(), "overlong_fraction": (penalty < 0).float().mean().item()}

    def penalize(self, tokens: StepTokens, num_episodes: int) -> dict[str, float]:
        """Subtract the KL penalty from the rewards, adapt its coefficient for the next step, and return metrics."""
        kl, coef = self.config.kl, self.kl_coef
        assert kl is not None
        penalty = kl_penalty(tokens.proximal, tokens.reference, kl.estimator)
        tokens.rewards = tokens.rewards - coef * penalty
        mean = mean_kl(penalty, tokens.episodes)
        if kl.target is not None:
            self.kl_coef = adapted_coef(coef, mean, num_episodes, target=kl.target, horizon=kl.horizon)
        return {"reward_kl": mean, "reward_kl_coef": coef}

    def advantages(
        self, tokens: StepTokens, scores: Tensor, baselines: Tensor | None, group_ids: list[str], turns: Turns | None
    ) -> None:
        """Fill in the advantages of ``tokens``, and the returns if the estimator computes them. ``scores [E]`` are
        rewards of episodes, ``baselines [E]`` those of greedy answers, ``group_ids [E]`` their groups."""
        config, early = self.config, self.needs_proximal_early
        available: dict[str, Any] = {
            "values": tokens.values if config.critic is not None else None,
            "baselines": baselines,
            "proximal_logprobs": tokens.proximal if early else None,
            "sum_squared_probs": tokens.sum_squared_probs if early and config.proximal == "trainer" else None,
            "turns": turns,
        }
        estimate = self._estimate(
            EstimatorInputs(
                scores=scores,
                group_ids=group_ids,
                episodes=tokens.episodes,
                token_rewards=tokens.rewards,
                importance_weights=tokens.correction if early else None,
                **{name: available[name] for name in available if name in self.needs},
            )
        )
        self._check("advantage", estimate, tokens.episodes)
        tokens.advantages = normalize_advantages(
            estimate.advantages, tokens.episodes, group_ids, mean=config.advantage_mean, std=config.advantage_std
        )
        if config.kl is not None and self.kl_place == "advantage":
            penalty = kl_penalty(tokens.proximal, tokens.reference, config.kl.estimator)
            tokens.advantages = tokens.advantages - config.kl.coef * penalty
        if estimate.returns is not None:
            tokens.returns = estimate.returns

    def policy_loss(self, inputs: PolicyInputs) -> LossTerms:
        terms: LossTerms = self._loss(inputs)
        self._check("loss", terms, inputs.episodes)
        limit = self.config.correction.max_episode_kl
        if limit is None:
            return terms
        drifted = corrections.drifted_episodes(
            inputs.policy, inputs.behaviour, inputs.advantages, inputs.episodes, max_kl=limit
        )
        statistics = terms.statistics | {"drifted_fraction": drifted.to(terms.losses.dtype)}
        return LossTerms(torch.where(drifted, 0.0, terms.losses), statistics, terms.chosen)

    def correction(self, proximal: Tensor, behaviour: Tensor, episodes: Tensor) -> Tensor:
        """Return ``[T]``, the factor of each token's loss that corrects for off-policy sampling."""
        config, level = self.config.correction, self.config.correction.level
        if level == "none":
            weights = torch.ones_like(proximal)
        elif config.outside == "mask":
            weights = corrections.icepop_weights(proximal, behaviour, lower=config.min_weight, upper=config.max_weight)
        else:
            weights = corrections.importance_weights(
                proximal, behaviour, episodes, level=level, max_weight=config.max_weight, normalize=config.normalize
            )
            if self.config.loss == "gmpo":
                weights = episode_mean(weights.log(), episodes).exp()  # one for each episode, like the ratio
        if config.reject is not None:
            bounds = config.reject_bounds or ""
            weights *= corrections.rejection_mask(proximal, behaviour, episodes, option=config.reject, bounds=bounds)
        return weights

    def _check(self, key: str, returned: Estimate | LossTerms, episodes: Tensor) -> None:
        """Raise a ConfigError unless the function of config ``key`` returned the right type, one float per token."""
        kind, hint = _RETURNS[key]
        where = f"trainer.{key} {getattr(self.config, key)!r} returns"
        names = [field.name for field in fields(kind)]
        if not isinstance(returned, kind):
            raise ConfigError(f"{where} a {type(returned).__name__}: return {kind.__name__}({', '.join(names)})")
        columns = {name: getattr(returned, name) for name in names}
        statistics = columns.pop("statistics", {})
        for name, values in {**columns, **statistics}.items():
            if values is None:
                continue
            wanted = "bools" if name == "chosen" else "numbers" if name in statistics else "floats"
            given, asked = f"as {type(values).__name__}", f"a tensor of {wanted}"
            if isinstance(values, Tensor):
                fits = {"bools": values.dtype == torch.bool, "numbers": True, "floats": values.is_floating_point()}
                if values.shape == episodes.shape and fits[wanted]:
                    continue
                given, asked = f"of shape {list(values.shape)} and {values.dtype}", wanted
            raise ConfigError(
                f"{where} {name} {given}: give {asked} of shape {list(episodes.shape)}, one for each token; {hint}"
            )

    def _dry_run(self) -> LossTerms:
        """Return the losses of two toy answers, so that bad options fail before the model loads."""
        config, episodes = self.config, torch.tensor([0, 0, 0, 1, 1])
        logprobs, scores = torch.arange(-5.0, 0.0), torch.arange(2.0)
        tokens = StepTokens.zeros(episodes)
        tokens.proximal.copy_(logprobs)
        tokens.sum_squared_probs.fill_(0.5)
        tokens.correction.fill_(1.0)
        tokens.returns.fill_(torch.nan)
        tokens.rewards[tokens.ends] = scores
        if config.overlong_buffer and self.max_new_tokens is None:
            raise ConfigError("trainer.overlong_buffer needs the length limit: give the trainer a max_new_tokens")
        self.shape_rewards(scores, tokens)
        try:
            self.correction(logprobs, logprobs, episodes)
        except ConfigError as error:
            raise ConfigError(f"trainer.correction.reject: {error}") from error
        with self._naming("advantage"):
            self._find_needs(tokens, scores)
        with self._naming("loss"):
            terms = self.policy_loss(
                PolicyInputs(
                    policy=logprobs.clone().requires_grad_(),
                    proximal=logprobs,
                    behaviour=logprobs,
                    advantages=tokens.advantages,
                    episodes=episodes,
                )
            )
        if not terms.losses.requires_grad:
            raise ConfigError(
                f"trainer.loss {config.loss!r} returns losses without a gradient: compute them from inputs.policy, not "
                "detached"
            )
        for key, values in (("advantage", tokens.advantages), ("loss", terms.losses)):
            if not bool(values.isfinite().all()):
                name, options = getattr(config, key), getattr(config, f"{key}_kwargs")
                raise ConfigError(
                    f"trainer.{key} {name!r} with its options {options} gives {values.tolist()}: these must be finite; "
                    "choose other options, or fix the function"
                )
        if config.critic is not None:
            self._check_critic(tokens.returns)
        return terms

    def _find_needs(self, tokens: StepTokens, scores: Tensor) -> None:
        """Fill in ``needs``, and advantages for two toy answers of two turns and of one."""
        turns = Turns(
            of_token=torch.tensor([0, 0, 1, 2, 2]),
            rewards=torch.arange(3.0),
            episodes=torch.tensor([0, 0, 1]),
            index=torch.tensor([0, 1, 0]),
            parents=torch.tensor([-1, 0, -1]),
        )
        while True:
            try:
                self.advantages(tokens, scores, scores, ["", ""], turns)
                break
            except MissingInput as missing:
                if missing.name in self.needs:
                    raise
                self.needs |= {missing.name}
        if self.config.overlong_buffer and "turns" in self.needs:
            raise ConfigError(
                f"trainer.overlong_buffer lowers the reward of a whole episode, and {self.config.advantage!r} compares "
                "the rewards of turns: remove one of them"
            )

    def _check_critic(self, returns: Tensor) -> None:
        name = self.config.advantage
        if bool(returns.isnan().any()):
            raise ConfigError(
                f"trainer.critic has nothing to learn from {name!r}, which gives no returns: choose gae, make your own "
                "estimator return Estimate(advantages, returns), or remove the critic"
            )
        if "values" not in self.needs:
            raise ConfigError(
                f"trainer.critic is unused: {name!r} does not ask for its values. Choose gae, call "
                "inputs.needed('values') in your own estimator, or remove the critic"
            )

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            name, options = getattr(self.config, key), getattr(self.config, f"{key}_kwargs")
            raise ConfigError(
                f"trainer.{key} {name!r} does not work with its options {options}: {type(error).__name__}: {error}"
            ) from error


def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Return the penalty ``[E]`` on ``lengths [E]`` of answers: 0 up to the buffer, then linear to -1 at the limit.
    With ``max_length=10, buffer=4`` lengths ``[6, 8, 10, 12]`` give ``[0, -0.5, -1, -1]``. Source: arXiv:2503.14476."""
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong buffer is {buffer}: choose 1 to {max_length} tokens, the max_length")
    return ((max_length - buffer - lengths).float() / buffer).clamp(-1.0, 0.0)


_RETURNS: dict[str, tuple[type[Estimate | LossTerms], str]] = {
    "advantage": (Estimate, "inputs.per_token(values) expands one value per episode"),
    "loss": (LossTerms, "the trainer averages them, and inputs.episodes is the episode of each token"),
}
"""Expected return type and a hint, per config key."""


def chosen_function(
    table: Mapping[str, Callable[..., Any]], name: str, options: Mapping[str, Any], *, where: str
) -> Callable[..., Any]:
    """Return the function ``name`` of the table or at that dotted path, with its keyword arguments ``options`` filled
    in. The config keys ``where`` and ``{where}_kwargs`` named them, for errors."""
    function = table.get(name) or _own_function(table, name, where)
    parameters = inspect.signature(function, eval_str=name in table).parameters
    known = {p.name: p.annotation for p in parameters.values() if p.kind is Parameter.KEYWORD_ONLY}
    for option in options:
        if option in known or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
            continue
        if option in parameters:
            raise ConfigError(
                f"{where}_kwargs: argument {option!r} of {name!r} must be keyword-only: write a * before it"
            )
        raise ConfigError(f"{where}_kwargs: {name!r} has no argument {option!r}; it has {', '.join(known) or 'none'}")
    if name in table:
        options = {key: checked(value, known[key], f"{where}_kwargs.{key}") for key, value in options.items()}
    return partial(function, **options)


def _own_function(table: Mapping[str, Any], name: str, where: str) -> Callable[..., Any]:
    if "." in name or ":" in name:
        function: Callable[..., Any] = load_object(name, where=where)
        if not callable(function):
            raise ConfigError(f"{where} is {name!r}, which is {function!r}: it must be a function")
        return function
    raise ConfigError(
        f"{where} is {name!r}: there is no such function{did_you_mean(name, table, ':')} choose one of "
        f"{', '.join(sorted(table))}, or give the dotted path of your own"
    )
