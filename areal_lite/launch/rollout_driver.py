"""Drives rollouts on the first rank: data source and engine in, batches with rewards out."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from areal_lite.api.config import RunConfig
from areal_lite.api.engine_api import Row
from areal_lite.api.episode import EpisodeResult
from areal_lite.data.batch.cached_batch import BatchCache
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.rollout_dump import dump_rollouts
from areal_lite.data.batch.training_batch import training_rows
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.packer.rollout_batch import result_samples, training_batch
from areal_lite.data.rows.collate import object_array
from areal_lite.data.source.curriculum_data_source import CurriculumDataSource
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.launch.evaluation import Evaluation, evaluate
from areal_lite.launch.resuming import Start
from areal_lite.launch.run_data import (
    TrainingData,
    tokenizer_path,
    training_data,
    workflow_kwargs,
    workflow_rows,
)
from areal_lite.trainer.policy_model import resolve_device
from areal_lite.trainer.reward_model import RewardModel, load_reward_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutInputs:
    """What a run generates from, loaded and checked before anything starts."""

    data: TrainingData
    """Training rows."""
    held_out: Sequence[Row] = ()
    """Rows to evaluate on."""
    reward_model: RewardModel | None = None
    """Scores whole sequences in place of the workflow's rewards."""
    baselines: bool = False
    """Whether the estimator needs the reward of a greedy answer per row."""
    cache: BatchCache | None = None
    """Where batches are kept."""


def load_rollout_inputs(config: RunConfig, start: Start, *, baselines: bool) -> RolloutInputs:
    """Return the run's inputs, with the data source where ``start`` has it.

    Raises:
        ConfigError: If rows, tokenizer, packer, reward model or cache cannot be used.
        CheckpointError: If the checkpoint has no state of the data source.
    """
    data = training_data(config)
    if start.checkpoint is not None:
        data.source.load(start.step, start.checkpoint)
    return RolloutInputs(
        data=data,
        held_out=workflow_rows(config, config.eval_dataset, is_train=False) if config.eval_dataset else [],
        cache=_batch_cache(config, baselines=baselines),
        reward_model=_reward_model(config),
        baselines=baselines,
    )


class RolloutDriver:
    """Makes the batches of a run and keeps its data source informed.

    Args:
        config: The run.
        run_dir: Its folder.
        engine: Ready to generate.
        inputs: What it generates from.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, *, engine: RemoteInfEngine, inputs: RolloutInputs
    ) -> None:
        self.engine = engine
        self.data = inputs.data
        self._config = config
        self._run_dir = run_dir
        self._held_out = inputs.held_out
        self._reward_model = inputs.reward_model
        self._baselines = inputs.baselines
        self._cache = inputs.cache
        self._results: list[EpisodeResult] = []

    def batch(self, step: int) -> DataProto:
        """Return the batch of a step: whole groups with rewards, and baselines if the estimator needs them.

        With ``rollout_cache`` it is read from there, and generated only if it is missing.
        """
        self._results = []
        if self._cache is None:
            return self._generate(step)
        batch = self._cache.batch(step, lambda: self._generate(step))
        if not self._results:  # draw the cached batch's rows, so that later steps get other rows
            self.data.source.mark_trained(
                self.data.source.get_samples(self._config.rollout.consumer_batch_size)
            )
        return batch

    def mark_trained(self, step: int, batch: DataProto) -> None:
        """Tell the data source, curriculum and dataset that a step's batch was trained; dump its scores.

        The curriculum and the dataset also get the dataset row of each sequence, as ``rows``, unless the batch was
        cached.
        """
        self.data.source.mark_trained(result.samples for result in self._results)
        if self._results:
            rows = object_array(sample.row for result in self._results for sample in result_samples(result))
            batch = DataProto(batch.batch, {**batch.non_tensor_batch, "rows": rows}, batch.meta_info)
        if isinstance(self.data.source, CurriculumDataSource):
            self.data.source.update(batch)
        if self._config.dump_scores and self._results:
            self._dump(step, batch)
        if step < self._config.trainer.total_steps and hasattr(self.data.dataset, "on_batch_end"):
            self.data.dataset.on_batch_end(batch)

    def evaluate(self) -> Evaluation | None:
        """Run the held-out rows and return their rewards; None if there are none."""
        return evaluate(self.engine, self._config, self._held_out) if self._held_out else None

    def metrics(self) -> dict[str, float]:
        """Return how many episodes ended in each status so far, and the position in the data."""
        source = self.data.source
        return {
            **{f"episodes/{status}": float(count) for status, count in self.engine.export_stats().items()},
            "data/epoch": float(source.epoch_id),
            "data/owed_groups": float(source.num_owed),
            "data/buffered_groups": float(source.get_buffer_length()),
            "data/dropped_groups": float(source.dropped.total()),
        }

    def _generate(self, step: int) -> DataProto:
        config = self._config
        kwargs = workflow_kwargs(config, is_eval=False)
        results = self.engine.prepare_batch(
            self.data.source, config.workflow, kwargs, config.should_accept_fn
        )
        if step == config.trainer.total_steps:
            self.engine.close_source(self.data.source)
        self._results = results
        batch = training_batch(self.data.packer, results)
        self._apply_reward_model(batch)
        if self._baselines:
            batch.batch["baselines"] = self._greedy_rewards(results, batch)
        return batch

    def _apply_reward_model(self, batch: DataProto) -> None:
        """Replace the workflow's rewards by the reward model's, if there is one."""
        if self._reward_model is not None:
            rewards = self._reward_model.score(
                training_rows(batch), max_tokens=self._config.trainer.max_tokens_per_microbatch
            )
            batch.batch["rewards"] = rewards.cpu()

    def _greedy_rewards(self, results: Sequence[EpisodeResult], batch: DataProto) -> torch.Tensor:
        """Return ``[B]`` the reward of one greedy episode per row, or the group's mean if that episode failed."""
        gconfig = self._config.rollout.gconfig.new(greedy=True)
        rollout = dataclasses.replace(self._config.rollout, gconfig=gconfig)
        kwargs = workflow_kwargs(dataclasses.replace(self._config, rollout=rollout), is_eval=False)
        rows = [dict(result.data) for result in results]
        greedy = self.engine.rollout_batch(rows, self._config.workflow, kwargs, group_size=1, is_eval=True)
        rewards = _group_means(batch)
        answered = {a.group_id: r.group_id for r, a in zip(results, greedy, strict=True) if a.rewards}
        if len(answered) < len(results):
            logger.warning(
                "%d of %d greedy episodes failed: their baseline is the mean reward of the group",
                len(results) - len(answered),
                len(results),
            )
        if answered:
            answers = training_batch(self.data.packer, [a for a in greedy if a.rewards])
            self._apply_reward_model(answers)
            rewards |= {answered[name]: reward for name, reward in _group_means(answers).items()}
        return torch.tensor([rewards[name] for name in batch.non_tensor_batch["group_ids"]])

    def _dump(self, step: int, batch: DataProto) -> None:
        tokenizer = load_tokenizer(tokenizer_path(self._config))
        judged = [(result, sample) for result in self._results for sample in result_samples(result)]
        starts = [sample.spans[0].start if sample.spans else len(sample.tokens) for _, sample in judged]
        dump_rollouts(
            self._run_dir / "scores",
            step,
            inputs=[tokenizer.decode(s.tokens[:start]) for (_, s), start in zip(judged, starts, strict=True)],
            outputs=[
                tokenizer.decode(s.tokens[start:]) for (_, s), start in zip(judged, starts, strict=True)
            ],
            gts=[result.samples[0].label for result, _ in judged],
            scores=batch.batch["rewards"].tolist(),
            extra={"task_id": [str(result.task_id) for result, _ in judged]},
        )


def _group_means(batch: DataProto) -> dict[str, float]:
    """Return the mean reward of each group."""
    rewards: dict[str, list[float]] = {}
    for name, reward in zip(
        batch.non_tensor_batch["group_ids"], batch.batch["rewards"].tolist(), strict=True
    ):
        rewards.setdefault(name, []).append(reward)
    return {name: float(np.mean(values)) for name, values in rewards.items()}


def _reward_model(config: RunConfig) -> RewardModel | None:
    if config.reward_model is None:
        return None
    return RewardModel(load_reward_model(config.reward_model, device=resolve_device(config.trainer.device)))


def _batch_cache(config: RunConfig, *, baselines: bool) -> BatchCache | None:
    if config.rollout_cache is None:
        return None
    sections = {
        "rollout.gconfig": dataclasses.asdict(config.rollout.gconfig),
        "train_dataset": dataclasses.asdict(config.train_dataset),
        "workflow_kwargs": config.workflow_kwargs,
    }
    names = ("model_path", "seed", "workflow", "reward_model", "should_accept_fn", "data_packer")
    return BatchCache(
        config.rollout_cache,
        {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
        | {name: getattr(config, name) for name in names}
        | {f"rollout.{name}": getattr(config.rollout, name) for name in ("group_size", "consumer_batch_size")}
        | {"greedy baselines": baselines},
    )
