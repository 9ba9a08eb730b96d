"""Supervised updates: items with a known loss in, one optimizer update and its metrics out.

Guarantees that loss and gradients do not depend on the cut into micro-batches and over ranks, and that evaluation does
not change the model. A subclass defines the sequences of an item and their loss; :class:`StepCut` packs."""

import dataclasses
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar
import numpy as np
import torch
from torch import Tensor
from areal_lite.api.image_span import Images, common_prefix
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.supervised_config import SFTTrainerConfig, SupervisedTrainerConfig
from areal_lite.models.policy_model import load_policy, resolve_device
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.microbatches import num_inputs, read_ids
from areal_lite.trainer.forward.packed_model import PackedModel, PackedSequences
from areal_lite.trainer.learner import Learner, OnSkip
from areal_lite.trainer.machine_metrics import peak_flops
from areal_lite.trainer.objectives.aggregation import LossTerms, aggregate, token_weights
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut
from areal_lite.trainer.seeding import seed_process

Item = dict[str, Any]
C = TypeVar("C", bound=SupervisedTrainerConfig)
EVALUATED_AT_ONCE = 512  # items that an evaluation holds in memory
WORTH_SHARING = 0.25
"""Compute a batch's common prefix (such as a system prompt) once if it has at least this share of the mean length;
for a shorter one the mask costs more than it saves."""


@dataclasses.dataclass(slots=True)
class SupervisedStep:
    """The sequences of one update, or of one evaluation."""

    sequences: list[TokenSequence]
    of_token: Tensor  # ``[T]`` int64, the sequence of each trained token
    weights: Tensor  # weight of the loss of each token, or of each pair
    totals: Tensor  # weighted sum of each of the trainer's ``statistics``


class SupervisedTrainer(ABC, Generic[C]):
    """Owns the model being trained. ``on_skip`` gets step, loss, gradient norm and rows of skipped updates."""

    statistics: ClassVar[tuple[str, ...]] = ()  # metrics beside the loss
    together: ClassVar[bool] = False  # True keeps the sequences of one group in one micro-batch

    def __init__(
        self, config: C, *, model_path: str, seed: int, total_steps: int, on_skip: OnSkip | None = None
    ) -> None:
        self.config = config
        seed_process(seed, num_threads=config.num_threads, deterministic=config.deterministic)
        self.device = resolve_device(config.device)
        self.scorer = self._load(model_path)
        self.model: Any = self.scorer.model
        self.total_tokens = 0  # tokens of all updates so far, prompts included
        self.learner = Learner(
            self.scorer,
            config,
            with_warmup(config, total_steps),
            total_steps=total_steps,
            max_inference_tokens=config.max_inference_length_per_device,
            on_skip=on_skip,
        )
        self.learners = {"policy": self.learner}

    def counters(self) -> dict[str, Any]:
        return {"total_tokens": self.total_tokens}

    def load_counters(self, counters: dict[str, Any]) -> None:
        self.total_tokens = counters.get("total_tokens", 0)

    def train_step(self, items: Sequence[Item]) -> dict[str, float]:
        began = time.perf_counter()
        rate = self.learner.learning_rate
        step = self._lay_out(items)
        update = self.learner.update(lambda most: self._cut(step, most), lambda part: self._loss(step, part))
        self.learner.check(update, rows=sorted({int(item["row"]) for item in items}))
        self.learner.steps_done += 1
        tokens = sum(map(len, step.sequences))
        self.total_tokens += tokens
        seconds = time.perf_counter() - began
        return {
            "loss": update.loss,
            **self._averages(step),
            "grad_norm": update.grad_norm,
            "skipped_updates": float(not update.applied),
            "learning_rate": rate,
            "tokens": float(tokens),
            "total_tokens": float(self.total_tokens),
            "trained_tokens": float(len(step.of_token)),
            "truncated_sequences": float(sum(int(item.get("truncated", 0)) for item in items)),
            "tokens_per_second": tokens / seconds,
            "mfu": self.learner.take_flops() / seconds / peak_flops(self.device, self.learner.dtype),
        }

    @torch.no_grad()
    def evaluate(self, items: Iterable[Item]) -> dict[str, float]:
        """Return loss and statistics over all of ``items``, as if they were one update, without training."""
        sums: Counter[str] = Counter()
        whole = 0
        remaining = iter(items)
        while chunk := list(itertools.islice(remaining, EVALUATED_AT_ONCE)):
            step = self._lay_out(chunk)
            averages = {"loss": self._total_loss(step), **self._averages(step)}
            counted = self._num_averaged(step)
            sums.update({name: counted * average for name, average in averages.items()})
            whole += counted
        return {name: total / whole for name, total in sums.items()}

    def _total_loss(self, step: SupervisedStep) -> float:
        losses = lambda most: torch.stack([self._loss(step, part) for part in self._cut(step, most)])  # noqa: E731
        return self.learner.ranks.sum_(self.learner.within_memory(losses, inference=True).sum()).item()

    def _num_averaged(self, step: SupervisedStep) -> int:
        return len(step.weights)

    def _load(self, model_path: str) -> PackedModel:
        """Return the model to train: by default a language model that returns log-probs."""
        model = load_policy(
            model_path,
            device=self.device,
            gradient_checkpointing=self.config.gradient_checkpointing,
            lora=self.config.lora,
            vision=self.config.vision,
        )
        return TokenScorer(model, temperature=1.0)

    @abstractmethod
    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        """Return the sequences of the items, each with a trained token."""

    @abstractmethod
    def _weights(self, of_token: Tensor) -> Tensor:
        """Return the weight of each token's or pair's loss, given each token's sequence ``[T]``."""

    def _scores(self, packed: PackedSequences) -> Tensor:
        """Return a number ``[N]`` for each trained token, with gradient: by default its log-prob."""
        logprobs: Tensor = self.scorer(packed).logprobs
        return logprobs

    @abstractmethod
    def _terms(self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch) -> tuple[LossTerms, Tensor]:
        """Return the losses of a micro-batch, and the weight of each."""

    def _lay_out(self, items: Sequence[Item]) -> SupervisedStep:
        sequences = self._sequences(items)
        counts = torch.tensor([sequence.num_trained_tokens for sequence in sequences])
        of_token = torch.repeat_interleave(torch.arange(len(sequences)), counts).to(self.device)
        totals = torch.zeros(len(self.statistics), device=self.device)
        return SupervisedStep(sequences, of_token, self._weights(of_token), totals)

    def _cut(self, step: SupervisedStep, max_tokens: int) -> Iterator[Microbatch]:
        step.totals.zero_()  # a cut that ran out of memory starts again
        cut = StepCut(
            step.sequences,
            self.scorer,
            ranks=self.learner.ranks,
            device=self.device,
            units=[s.group_id for s in step.sequences] if self.together else None,
            whole=self.together,
        )
        yield from cut(range(len(step.sequences)), max_tokens)

    def _loss(self, step: SupervisedStep, microbatch: Microbatch) -> Tensor:
        # An evaluation is not part of a step, so its operations are not counted.
        with self.learner.computing(microbatch.packed) if torch.is_grad_enabled() else self.learner.autocast():
            scores = self._scores(microbatch.packed)
        if not microbatch.counts:
            return scores.sum() * 0.0
        terms, weights = self._terms(scores, step, microbatch)
        for index, name in enumerate(self.statistics):
            step.totals[index] += aggregate(terms.statistics[name], weights)
        return aggregate(terms.losses, weights)

    def _averages(self, step: SupervisedStep) -> dict[str, float]:
        totals = self.learner.ranks.sum_(step.totals)
        return dict(zip(self.statistics, totals.tolist(), strict=True))


def with_warmup(config: SupervisedTrainerConfig, total_steps: int) -> SupervisedTrainerConfig:
    """Return ``config`` with its warm-up share as a number of steps, rounded down."""
    if config.warmup_ratio is None:
        return config
    return dataclasses.replace(config, warmup_steps=int(config.warmup_ratio * total_steps), warmup_ratio=None)


def masked_sequence(ids: Tensor, mask: Tensor, group: int, images: Images = ()) -> TokenSequence:
    loss_mask = mask.numpy().astype(np.bool_)
    return TokenSequence(input_ids=ids.numpy(), loss_mask=loss_mask, reward=0.0, group_id=str(group), images=images)


def shared_prefix(sequences: Sequence[TokenSequence]) -> int:
    """Return how many leading tokens all sequences have in common, of those that the model must read."""
    first, *others = map(read_ids, sequences)
    return min((common_prefix(first, other) for other in others), default=len(first))


class SFTTrainer(SupervisedTrainer[SFTTrainerConfig]):
    """Trains on items of an ``SFTDataset``; the loss is in nats, per token or per sequence."""

    def _sequences(self, items: Sequence[Item]) -> list[TokenSequence]:
        sequences = [masked_sequence(item["input_ids"], item["loss_mask"], 0, item.get("images", ())) for item in items]
        mean_length = sum(map(num_inputs, sequences)) / len(sequences)
        if shared_prefix(sequences) >= WORTH_SHARING * mean_length:
            return sequences
        return [dataclasses.replace(one, group_id=str(number)) for number, one in enumerate(sequences)]

    def _weights(self, of_token: Tensor) -> Tensor:
        return token_weights("token-mean" if self.config.averaging == "token" else "seq-mean-token-mean", of_token)

    def _num_averaged(self, step: SupervisedStep) -> int:
        return len(step.weights if self.config.averaging == "token" else step.sequences)

    def _terms(self, scores: Tensor, step: SupervisedStep, microbatch: Microbatch) -> tuple[LossTerms, Tensor]:
        return LossTerms(-scores, {}), step.weights[microbatch.tokens]
