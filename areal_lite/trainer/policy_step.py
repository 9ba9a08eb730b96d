"""What the stages of one step of reinforcement learning hand on, and what they came to as metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import check_training_batch, training_rows
from areal_lite.data.batch.training_sample import TrainingSample
from areal_lite.errors import TrainingError
from areal_lite.trainer.broadcast import gather_json
from areal_lite.trainer.data_metrics import batch_metrics
from areal_lite.trainer.objectives.mismatch import mismatch_statistics
from areal_lite.trainer.phase_clock import PhaseClock
from areal_lite.trainer.ranks import Ranks
from areal_lite.trainer.step_tokens import StepTokens


@dataclass(slots=True)
class Step:
    """A batch on its way through the stages."""

    samples: list[TrainingSample]
    version: int
    tokens: StepTokens
    scores: Tensor
    """``[N]`` reward of each sample."""
    baselines: Tensor | None
    """``[N]`` reward of the greedy answer to its prompt."""
    clock: PhaseClock
    minibatches: list[list[int]] = field(default_factory=list)
    """Samples of each update."""
    metrics: dict[str, float] = field(default_factory=dict)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """``[T]`` what the losses tell of each token, NaN where nothing."""
    choice: Tensor | None = None
    """``[T]`` bool, what a loss that chooses chose among the tokens of the minibatch being trained."""

    @classmethod
    def of(cls, batch: DataProto, *, version: int, device: torch.device) -> Step:
        """Return the step of a batch with the keys of :mod:`areal_lite.data.batch.training_batch`.

        Raises:
            ValueError: If the batch breaks one of their rules.
            TrainingError: If a number in it is not finite; a log-prob may be NaN.
        """
        clock = PhaseClock(device)
        task_ids = list(batch.non_tensor_batch.get("task_ids", range(len(batch))))
        mend = "let an episode fail where its reward or a log-prob of the engine is no number"
        for key in ("rewards", "baselines", "logprobs"):
            if key in batch.batch:
                column = batch.batch[key]
                broken = column.isinf() if key == "logprobs" else ~column.isfinite()
                _refuse(key, broken.nonzero()[:, 0], task_ids, version, mend)
        check_training_batch(batch)
        samples = training_rows(batch)
        return cls(
            samples=samples,
            version=version,
            tokens=StepTokens.of(samples, device=device),
            scores=torch.tensor([sample.reward for sample in samples], device=device),
            baselines=batch.batch["baselines"].to(device) if "baselines" in batch.batch else None,
            clock=clock,
        )

    @property
    def group_ids(self) -> list[str]:
        """The group of each sample."""
        return [sample.group_id for sample in self.samples]

    @property
    def everyone(self) -> range:
        """All samples."""
        return range(len(self.samples))

    def check_finite(self, *names: str) -> None:
        """Check what the models gave for the tokens under these ``names``, as far as it is known.

        Raises:
            TrainingError: Naming the tasks whose numbers are not finite.
        """
        task_ids = [sample.task_id for sample in self.samples]
        mend = "the model has diverged on them: go on from an earlier checkpoint with a lower learning rate"
        for name in names:
            broken = ~getattr(self.tokens, name).isfinite()
            _refuse(name, self.tokens.episodes[broken], task_ids, self.version, mend)

    def tell(self, here: Tensor, statistics: Mapping[str, Tensor]) -> None:
        """Keep what a loss told of the tokens ``here``."""
        for name, values in statistics.items():
            whole = self.statistics.setdefault(name, torch.full_like(self.tokens.proximal, math.nan))
            whole[here] = values.detach().float()

    def all_metrics(
        self,
        *,
        ranks: Ranks,
        has_critic: bool,
        penalized: bool,
        compares_engine: bool,
        max_new_tokens: int | None,
    ) -> dict[str, float]:
        """Return data, loss, token and timing metrics of the whole step."""
        tokens = self.tokens
        earned = torch.zeros_like(self.scores).index_add_(0, tokens.episodes, tokens.rewards)
        has_tokens = torch.bincount(tokens.episodes, minlength=len(earned)) > 0
        earned = torch.where(has_tokens, earned, self.scores)
        return {
            **batch_metrics(
                self.samples,
                tokens.advantages.cpu().numpy(),
                version=self.version,
                penalised_rewards=earned.cpu().numpy() if penalized else None,
                returns=tokens.returns.cpu().numpy() if has_critic else None,
                values=tokens.values.cpu().numpy() if has_critic else None,
                max_new_tokens=max_new_tokens,
            ),
            **self.metrics,
            **self._token_metrics(ranks),
            **(self._engine_metrics(ranks) if compares_engine else {}),
            **self.clock.metrics(num_tokens=sum(len(sample.input_ids) for sample in self.samples)),
        }

    def _token_metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return means over the tokens of all ranks that a loss told something of."""
        tokens, own = self.tokens, self.tokens.computed
        # A rank that computed nothing has no statistics of its own.
        names = dict.fromkeys(name for names in gather_json(list(self.statistics)) for name in names)
        nothing = torch.full_like(tokens.proximal, math.nan)
        metrics = {}
        for name in names:
            values = self.statistics.get(name, nothing)
            told = ~values.isnan()
            sums = ranks.sum_(torch.stack([values[told].sum(), told.sum().to(values.dtype)]))
            metrics[name] = (sums[0] / sums[1].clamp(min=1)).item()
        rejected = ranks.sum_((own & (tokens.correction == 0)).float().sum())
        return {
            **metrics,
            "trained_tokens": float(len(own)),
            "computed_tokens": ranks.sum_(own.float().sum()).item(),
            "rejected_tokens": rejected.item(),
        }

    def _engine_metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return how far engine and trainer disagree, and how far the policy has moved on."""
        tokens, own = self.tokens, self.tokens.computed
        proximal = ranks.sum_(torch.where(own, tokens.proximal, 0.0))
        recorded = (ranks.sum_(own.float()) > 0) & ~tokens.behaviour.isnan()
        return mismatch_statistics(
            proximal[recorded],
            tokens.behaviour[recorded],
            tokens.versions[recorded],
            tokens.episodes[recorded],
            self.version,
        )


def _refuse(name: str, rows: Tensor, task_ids: Sequence[object], version: int, mend: str) -> None:
    """Raise the error of ``name`` not being finite in ``rows``, which may be none, or hold one several times."""
    tasks = [str(task_ids[row]) for row in sorted(set(rows.tolist()))]
    if tasks:
        more = f" and {len(tasks) - 8} more" if len(tasks) > 8 else ""
        raise TrainingError(
            f"step {version}: {name} of task {', '.join(tasks[:8])}{more} must be finite and are not: {mend}"
        )
