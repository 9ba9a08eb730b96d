"""One training step: rewards to advantages, log-probs, loss, a new policy.

Guarantees that loss and gradients do not depend on how the step is cut into micro-batches, that the
same seed and batch give bit-equal weights on one machine, and that a non-finite update is never
applied. Knows nothing of episodes, servers or files: a batch comes in, metrics go out.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.api.config import TrainerConfig
from areal_lite.data.data_proto import DataProto
from areal_lite.data.training_batch import check_training_batch, training_rows
from areal_lite.data.training_sample import TrainingSample
from areal_lite.errors import TrainingError
from areal_lite.trainer.advantages import group_advantages
from areal_lite.trainer.logprobs import TokenScorer
from areal_lite.trainer.losses import decoupled_ppo_loss, entropy_bonus, kl_k3, kl_penalty, ppo_statistics
from areal_lite.trainer.optimizer import learning_rate, make_optimizer
from areal_lite.trainer.policy_model import load_policy, resolve_device
from areal_lite.trainer.seeding import seed_process
from areal_lite.trainer.step_tokens import Microbatch, Minibatch, StepTokens, cut_step

MAX_SKIPPED_UPDATES = 3
"""Non-finite updates in a row that stop the run."""


class PolicyTrainer:
    """Owns the policy being trained, its optimizer, and the frozen reference where there is a KL penalty.

    Args:
        config: The ``trainer:`` section of the run.
        model_path: Folder of a Hugging Face causal LM, or a hub name.
        seed: Seeds python, numpy and torch, and the order of minibatches.
        temperature: What the inference engine divides logits by; log-probs here are of the same.

    Raises:
        ConfigError: If the model cannot be loaded, the device is not there, or the temperature is not above 0.
    """

    def __init__(
        self, config: TrainerConfig, *, model_path: str, seed: int, temperature: float = 1.0
    ) -> None:
        seed_process(seed, num_threads=config.num_threads)
        self.config = config
        self.seed = seed
        self.device = resolve_device(config.device)
        self.model: Any = load_policy(
            model_path, device=self.device, gradient_checkpointing=config.gradient_checkpointing
        )
        self.optimizer = make_optimizer(self.model, config)
        self.steps_done = 0
        self.skipped_in_a_row = 0
        self._policy = TokenScorer(self.model, temperature=temperature)
        self._reference: TokenScorer | None = None
        if config.kl_coef > 0:
            frozen = copy.deepcopy(self.model).requires_grad_(False)
            self._reference = TokenScorer(frozen, temperature=temperature)
        self._ratio_bounds = {
            "clip_eps": config.clip_eps,
            "clip_eps_high": config.clip_eps if config.clip_eps_high is None else config.clip_eps_high,
            "max_behaviour_weight": config.max_behaviour_weight,
        }

    def train_step(self, batch: DataProto, *, version: int) -> dict[str, float]:
        """Train on one batch of groups and return its metrics.

        Rows without a gradient (advantage 0 and neither KL nor entropy term, or no trained token)
        are left out of the forward pass but stay in every denominator; ``computed_tokens`` against
        ``trained_tokens`` says how much, and the token statistics are over the computed ones.

        Args:
            batch: Whole groups, in any order, with the keys of :mod:`areal_lite.data.training_batch`.
            version: The trainer's policy version, for staleness.

        Raises:
            ValueError: If the batch breaks a rule of a training batch.
            TrainingError: If nothing in the batch is trained, rows have more inputs than tokens, or the third
                update in a row is not finite.
        """
        clock = _PhaseClock(self.device)
        with clock("prepare"):
            check_training_batch(batch)
            samples = training_rows(batch)
            advantages = group_advantages(
                [sample.reward for sample in samples],
                [sample.group_id for sample in samples],
                divide_by_std=self.config.advantage_std,
            )
            tokens, minibatches = self._prepare(samples, advantages)
        with clock("proximal"):
            self._score_frozen(tokens, minibatches)
        rate = learning_rate(self.config, self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        updates = [
            self._update(tokens, minibatch, is_first=number == 0, clock=clock)
            for number, minibatch in enumerate(minibatches)
        ]
        self.steps_done += 1
        return {
            **_batch_metrics(samples, advantages, version),
            **{name: float(np.mean([update[name] for update in updates])) for name in ("loss", "grad_norm")},
            "skipped_updates": float(sum(update["skipped"] for update in updates)),
            "learning_rate": rate,
            **self._token_metrics(tokens),
            **clock.metrics(num_tokens=sum(len(sample.input_ids) for sample in samples)),
        }

    def _prepare(
        self, samples: Sequence[TrainingSample], advantages: np.ndarray[Any, Any]
    ) -> tuple[StepTokens, list[Minibatch]]:
        config = self.config
        seeing = sum(bool(sample.multi_modal_inputs) for sample in samples)
        if seeing:
            raise TrainingError(
                f"step {self.steps_done}: {seeing} of {len(samples)} rows have multi_modal_inputs, but this trainer's "
                "forward pass reads tokens alone, so their log-probs would be wrong: train on rows of text"
            )
        regularised = config.kl_coef > 0 or config.entropy_coef != 0
        minibatches = cut_step(
            samples,
            [
                sample.num_trained_tokens > 0 and (regularised or advantage != 0)
                for sample, advantage in zip(samples, advantages, strict=True)
            ],
            num_minibatches=config.minibatches_per_step,
            max_tokens=config.max_tokens_per_microbatch,
            balance_length=self._policy.balance_length,
            share_prefixes=self._policy.shares_prefixes,
            rng=np.random.default_rng([self.seed, self.steps_done]),
            device=self.device,
        )
        if not minibatches:
            raise TrainingError(
                f"step {self.steps_done}: none of the {len(samples)} samples has a trained token: "
                "loss_mask must be True where the policy sampled"
            )
        return StepTokens.of(samples, advantages, device=self.device), minibatches

    @torch.no_grad()
    def _score_frozen(self, tokens: StepTokens, minibatches: Sequence[Minibatch]) -> None:
        """Fill proximal and reference log-probs.

        The first minibatch needs no proximal pass: its own forward runs on the step's first weights.
        """
        for number, minibatch in enumerate(minibatches):
            for microbatch in minibatch.microbatches:
                if number > 0:
                    tokens.proximal[microbatch.tokens] = self._score(self._policy, microbatch)[0]
                if self._reference is not None:
                    tokens.reference[microbatch.tokens] = self._score(self._reference, microbatch)[0]

    def _score(self, scorer: TokenScorer, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            return scorer(microbatch.packed, entropy_grad=self.config.entropy_coef != 0)

    def _update(
        self, tokens: StepTokens, minibatch: Minibatch, *, is_first: bool, clock: _PhaseClock
    ) -> dict[str, float]:
        """Accumulate the minibatch's gradient and apply it unless it is not finite."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for microbatch in minibatch.microbatches:
            with clock("forward"):
                logprobs, entropy = self._score(self._policy, microbatch)
                here = microbatch.tokens
                tokens.policy[here], tokens.entropy[here] = logprobs.detach(), entropy.detach()
                tokens.computed[here] = True
                if is_first:
                    tokens.proximal[here] = logprobs.detach()
                loss = self._loss(tokens, here, logprobs, entropy, minibatch.num_loss_tokens)
            with clock("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        with clock("optimizer"):
            return self._apply(total.item())

    def _loss(
        self, tokens: StepTokens, here: Tensor, logprobs: Tensor, entropy: Tensor, num_loss_tokens: int
    ) -> Tensor:
        everywhere = torch.ones_like(here, dtype=torch.bool)  # only trained tokens were computed
        loss = decoupled_ppo_loss(
            logprobs,
            tokens.proximal[here],
            tokens.behaviour_or_proximal()[here],
            tokens.advantages[here],
            everywhere,
            num_loss_tokens=num_loss_tokens,
            **self._ratio_bounds,
        )
        if self.config.kl_coef > 0:
            penalty = kl_penalty(
                logprobs, tokens.reference[here], everywhere, num_loss_tokens=num_loss_tokens
            )
            loss = loss + self.config.kl_coef * penalty
        if self.config.entropy_coef != 0:
            bonus = entropy_bonus(entropy, everywhere, num_loss_tokens=num_loss_tokens)
            loss = loss - self.config.entropy_coef * bonus
        return loss

    def _apply(self, loss: float) -> dict[str, float]:
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if all(parameter.grad is None for parameter in parameters):  # every advantage was 0
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm).item()
        if math.isfinite(loss) and math.isfinite(norm):
            self.optimizer.step()
            self.skipped_in_a_row = 0
            return {"loss": loss, "grad_norm": norm, "skipped": 0.0}
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise TrainingError(
                f"step {self.steps_done}: loss {loss} and gradient norm {norm}, the {self.skipped_in_a_row}rd update "
                "in a row that is not finite; none of them was applied. Lower trainer.learning_rate or "
                "trainer.max_grad_norm, or look at the batch's rewards and log-probs"
            )
        return {"loss": loss, "grad_norm": norm, "skipped": 1.0}

    def _token_metrics(self, tokens: StepTokens) -> dict[str, float]:
        chosen = tokens.computed
        count = int(chosen.sum())
        metrics = {
            "trained_tokens": float(len(chosen)),
            "computed_tokens": float(count),
            "entropy": tokens.entropy[chosen].sum().item() / max(1, count),
            **ppo_statistics(
                tokens.policy,
                tokens.proximal,
                tokens.behaviour_or_proximal(),
                tokens.advantages,
                chosen,
                **self._ratio_bounds,
            ),
        }
        if self._reference is not None:
            metrics["kl"] = kl_k3(tokens.policy, tokens.reference)[chosen].sum().item() / max(1, count)
        return metrics


class _PhaseClock:
    """Seconds by phase of one step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = time.perf_counter()
        self._seconds = dict.fromkeys(("prepare", "proximal", "forward", "backward", "optimizer"), 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._seconds[phase] += time.perf_counter() - began

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        total = time.perf_counter() - self._began
        phases = {f"seconds_{phase}": seconds for phase, seconds in self._seconds.items()}
        return {**phases, "seconds_step": total, "tokens_per_second": num_tokens / total}


def _batch_metrics(
    samples: Sequence[TrainingSample], advantages: np.ndarray[Any, Any], version: int
) -> dict[str, float]:
    rewards = np.array([sample.reward for sample in samples])
    ages = [age for sample in samples if (age := sample.staleness(version)) is not None] or [0]
    return {
        "samples": float(len(samples)),
        "groups": float(len({sample.group_id for sample in samples})),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "advantage_std": float(advantages.std()),
        "advantage_max": float(np.abs(advantages).max()),
        "advantage_zero_fraction": float((advantages == 0).mean()),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": float(max(ages)),
    }
