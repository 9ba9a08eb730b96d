"""The updates of a step: forward passes of one learner over its sequences, then those of the critic and the policy.

Guarantees that results do not depend on how the step is cut into micro-batches and over ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
import numpy as np
import torch
from torch import Tensor
from areal_lite.config.trainer_config import AggregationMode, TrainerConfig
from areal_lite.models.kernels.score_kernels import TokenScores
from areal_lite.trainer.forward.packed_model import PackedSequences
from areal_lite.trainer.learner import Learner, Update
from areal_lite.trainer.objectives.aggregation import aggregate, token_weights
from areal_lite.trainer.objectives.kl import kl_penalty
from areal_lite.trainer.objectives.policy_loss import PolicyInputs, value_loss
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Step
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut


class LearnerUpdate(ABC):
    """Runs a learner on a step: forward passes alone, and updates with the losses of a subclass."""

    role: ClassVar[str]  # name in reports of skipped updates
    prefix: ClassVar[str] = ""  # of its metrics

    def __init__(self, learner: Learner, config: TrainerConfig, algorithm: Algorithm) -> None:
        self.learner = learner
        self.scorer: Any = learner.module
        self._config = config
        self._algorithm = algorithm

    @abstractmethod
    def losses(self, step: Step, at: Tensor, outputs: Any) -> Tensor:
        """Return the losses ``[N]`` of the tokens ``at`` from the model's outputs there; record their statistics."""

    def outputs(self, packed: PackedSequences) -> Any:
        """Return what the losses need, with gradient; a tensor, or a tuple whose first entry has a gradient."""
        return self.scorer(packed)

    @torch.no_grad()
    def fill(
        self, step: Step, phase: str, chosen: Sequence[int], score: Callable[[Microbatch], dict[str, Tensor]]
    ) -> None:
        """Write the values of ``score`` at the chosen sequences' tokens into the columns they name, on every rank."""

        def run(max_tokens: int) -> dict[str, Tensor]:
            scored: dict[str, Tensor] = {}
            for microbatch in self._cut(step)(chosen, max_tokens):
                with self.learner.computing(microbatch.packed):
                    scores = score(microbatch)
                for name, values in scores.items():
                    column = scored.setdefault(name, torch.zeros_like(step.tokens.proximal))
                    if microbatch.counts:
                        column[microbatch.tokens] = values.float()
            return scored

        at = step.tokens.chosen(chosen)
        with step.clock(phase):
            for name, values in self.learner.within_memory(run).items():
                getattr(step.tokens, name)[at] = self.learner.ranks.sum_(values)[at]

    def update_once(self, step: Step, counted: Sequence[int], computed: Sequence[int], mode: AggregationMode) -> Update:
        """Make one update: ``computed`` sequences go through the model, ``counted`` ones are averaged over."""
        at = step.tokens.chosen(counted)
        weights = torch.zeros_like(step.tokens.proximal)
        weights[at] = token_weights(mode, step.tokens.episodes[at], scale=self._config.loss_scale).float()

        def loss(microbatch: Microbatch) -> Tensor:
            with step.clock("forward"), self.learner.computing(microbatch.packed):
                outputs = self.outputs(microbatch.packed)
            if not microbatch.counts:  # a loss of 0 with a gradient, so that this rank joins the backward pass
                nothing: Tensor = (outputs[0] * 0.0).sum()
                return nothing
            return aggregate(self.losses(step, microbatch.tokens, outputs), weights[microbatch.tokens])

        cut = self._cut(step)
        update = self.learner.update(lambda max_tokens: cut(computed, max_tokens), loss, clock=step.clock)
        task_ids = list(dict.fromkeys(step.sequences[index].task_id for index in counted))
        self.learner.check(update, role=self.role, task_ids=task_ids)
        return update

    def finish(self, step: Step, updates: Sequence[Update]) -> None:
        """Count the step, and record loss and gradient norm averaged over its updates; 0 if there was none."""
        metrics = {
            "loss": float(np.mean([update.loss for update in updates])) if updates else 0.0,
            "grad_norm": float(np.mean([update.grad_norm for update in updates])) if updates else 0.0,
            "skipped_updates": float(sum(not update.applied for update in updates)),
            "learning_rate": self.learner.learning_rate,
        }
        step.metrics |= {f"{self.prefix}{name}": value for name, value in metrics.items()}
        self.learner.steps_done += 1

    def _cut(self, step: Step) -> StepCut:
        return StepCut(
            step.sequences,
            self.scorer,
            ranks=self.learner.ranks,
            device=step.scores.device,
            units=step.episodes,
            whole=self._algorithm.couples_tokens,
        )


class CriticUpdate(LearnerUpdate):
    role, prefix = "critic", "critic_"

    def score(self, step: Step) -> None:
        self.fill(step, "values", step.all_indices, lambda part: {"values": self.scorer(part.packed)})

    def update(self, step: Step) -> None:
        self.finish(step, [self.update_once(step, chosen, chosen, "token-mean") for chosen in step.minibatches])

    def losses(self, step: Step, at: Tensor, outputs: Any) -> Tensor:
        assert self._config.critic is not None
        clip = self._config.critic.clip_eps
        terms = value_loss(outputs, step.tokens.values[at], step.tokens.returns[at], clip=clip)
        step.record_statistics(at, terms.statistics)
        return terms.losses


class PolicyUpdate(LearnerUpdate):
    role = "policy"

    def update(self, step: Step) -> None:
        config, tokens = self._config, step.tokens
        updates: list[Update] = []
        if config.critic is None or self.learner.steps_done >= config.critic.updates_before_policy:
            trains = self._with_gradient(step)
            computed = [[i for i in chosen if step.episodes[i] in trains] for chosen in step.minibatches]
            later = [index for chosen in computed[1:] for index in chosen]
            ahead = step.all_indices if self._algorithm.chooses else later
            if ahead and not bool(tokens.known.any()):
                self.score_proximal(step, ahead)
            if config.proximal == "trainer":
                # The first minibatch is scored by the same weights in its own pass: its ratio is exactly 1.
                tokens.known[tokens.chosen(step.minibatches[0])] = False
            for chosen, computing in zip(step.minibatches, computed, strict=True):
                if self._algorithm.chooses:
                    self._choose(step, chosen, first=not updates)
                if not any(computed):
                    self._measure(step, chosen)
                updates.append(self.update_once(step, chosen, computing, self._algorithm.aggregation))
        self.finish(step, updates)

    def outputs(self, packed: PackedSequences) -> Any:
        return self.scorer(packed, entropy_grad=self._config.entropy_coef != 0)

    def losses(self, step: Step, at: Tensor, outputs: TokenScores) -> Tensor:
        step.tokens.computed[at] = True
        step.tokens.policy[at] = outputs.logprobs.detach()
        return self._token_losses(step, at, outputs)

    def score_proximal(self, step: Step, chosen: Sequence[int]) -> None:
        """Fill in the current weights' log-probs of the chosen sequences, as those of the start of the step."""

        def score(microbatch: Microbatch) -> dict[str, Tensor]:
            scores = self.scorer(microbatch.packed)
            return self._at_start(scores) | {"sum_squared_probs": scores.sum_squared_probs}

        self.fill(step, "proximal", chosen, score)
        step.tokens.known |= step.tokens.chosen(chosen)

    def _at_start(self, scores: TokenScores) -> dict[str, Tensor]:
        """Return the columns of the step that the weights at its start give."""
        columns = {"proximal": scores.logprobs.detach()}
        truncation = self.scorer.truncation
        return columns if truncation is None or truncation.reported else columns | {"log_kept": scores.log_kept}

    def _measure(self, step: Step, chosen: Sequence[int]) -> None:
        """Record the statistics of the policy in a step that trains nothing, because no episode has a gradient."""

        def record(microbatch: Microbatch) -> dict[str, Tensor]:
            scores = self.scorer(microbatch.packed)
            if microbatch.counts:
                self._token_losses(step, microbatch.tokens, scores)
            return {}

        self.fill(step, "proximal", chosen, record)

    @torch.no_grad()
    def _choose(self, step: Step, chosen: Sequence[int], *, first: bool) -> None:
        """Let the loss choose among all tokens of a minibatch, so that the cut does not change its choice."""
        at, policy = step.tokens.chosen(chosen), step.tokens.proximal
        if not first or self._config.proximal == "behaviour":
            self.fill(step, "choice", chosen, lambda part: {"policy": self.scorer(part.packed).logprobs})
            policy = step.tokens.policy
        step.choice = None
        choice = self._algorithm.policy_loss(self._inputs(step, policy[at], at)).chosen
        assert choice is not None
        step.choice = torch.zeros_like(at).masked_scatter(at, choice)

    def _inputs(self, step: Step, policy: Tensor, at: Tensor) -> PolicyInputs:
        tokens = step.tokens
        return PolicyInputs(
            policy=policy,
            proximal=tokens.proximal[at],
            behaviour=tokens.behaviour_or_proximal()[at],
            advantages=tokens.advantages[at],
            episodes=tokens.episodes[at],
            chosen=None if step.choice is None else step.choice[at],
        )

    def _with_gradient(self, step: Step) -> set[int]:
        """Return the episodes that must be computed; all loss terms of the others are 0."""
        if self._algorithm.needs_every_episode:
            return set(step.episodes)
        return set(step.tokens.episodes[step.tokens.advantages != 0].tolist())

    def _token_losses(self, step: Step, at: Tensor, scores: TokenScores) -> Tensor:
        tokens, config = step.tokens, self._config
        if not bool(tokens.known[at].all()):
            for name, values in self._at_start(scores).items():
                getattr(tokens, name)[at] = values
        terms = self._algorithm.policy_loss(self._inputs(step, scores.logprobs, at))
        behaviour = tokens.behaviour_or_proximal()[at]
        if not self._algorithm.needs_proximal_early:
            tokens.correction[at] = self._algorithm.correction(tokens.proximal[at], behaviour, tokens.episodes[at])
        own = {"entropy": scores.entropy, "correction_weight": tokens.correction[at]}
        if self.scorer.truncation is not None:
            own["kept_mass"] = scores.log_kept.exp()
        step.record_statistics(at, terms.statistics | own)
        losses = tokens.correction[at] * terms.losses
        if config.kl is not None:
            sampled = behaviour if config.kl.unbiased else None
            penalty = kl_penalty(scores.logprobs, tokens.reference[at], config.kl.estimator, behaviour=sampled)
            step.record_statistics(at, {"kl": penalty})
            if config.kl.place == "loss":
                losses = losses + config.kl.coef * penalty
        if config.entropy_coef != 0:
            losses = losses - config.entropy_coef * scores.entropy
        return losses
