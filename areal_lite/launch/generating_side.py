"""Where a training run's batches come from: data source, engine, rewards; and where its new weights go."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from functools import cached_property
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
from areal_lite.data.chat.tokenizer import load_tokenizer, tokenizer_files
from areal_lite.data.packer.rollout_batch import result_samples, training_batch
from areal_lite.data.rows.collate import object_array
from areal_lite.data.source.curriculum_data_source import CurriculumDataSource
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.launch.evaluation import Evaluation, evaluate
from areal_lite.launch.run_data import TrainingData, tokenizer_path
from areal_lite.launch.workflow_choice import workflow_kwargs
from areal_lite.trainer.reward_model import RewardModel

logger = logging.getLogger(__name__)


class GeneratingSide:
    """What the leading rank has besides its trainer.

    Args:
        config: The run.
        run_dir: Its folder.
        engine: Ready to generate.
        data: Training rows.
        held_out: Rows to evaluate on; none skips it.
        reward_model: Judges whole sequences in place of the workflow's rewards.
        baselines: Whether batches have the rewards of greedy answers.
        cache: Where batches are kept.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        engine: RemoteInfEngine,
        data: TrainingData,
        held_out: Sequence[Row],
        reward_model: RewardModel | None = None,
        baselines: bool = False,
        cache: BatchCache | None = None,
    ) -> None:
        self.engine = engine
        self.data = data
        self._config = config
        self._run_dir = run_dir
        self._held_out = held_out
        self._reward_model = reward_model
        self._baselines = baselines
        self._cache = cache
        self._results: list[EpisodeResult] = []

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """What makes a model's folder whole for servers."""
        return tokenizer_files(tokenizer_path(self._config))

    def batch(self, step: int) -> DataProto:
        """Return the batch of a step: whole groups with rewards, and baselines where the estimator needs them.

        With ``rollout_cache`` it comes from there, and is generated only where it is missing.
        """
        self._results = []
        if self._cache is None:
            return self._generate(step)
        batch = self._cache.batch(step, lambda: self._generate(step))
        if not self._results:  # rows of steps that are not cached are others
            self.data.source.mark_trained(
                self.data.source.get_samples(self._config.rollout.consumer_batch_size)
            )
        return batch

    def trained(self, step: int, batch: DataProto) -> None:
        """Take note that a step's batch was trained: its groups are owed no longer, data and dumps hear of it.

        What the data hear of has in ``rows`` the dataset row of each sequence, unless it came from a cache.
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
        """Return how the held-out rows go, None where there are none."""
        return evaluate(self.engine, self._config, self._held_out) if self._held_out else None

    def metrics(self) -> dict[str, float]:
        """Return how episodes ended so far, and where the data stands."""
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
        self._judge(batch)
        if self._baselines:
            batch.batch["baselines"] = self._greedy_rewards(results, batch)
        return batch

    def _judge(self, batch: DataProto) -> None:
        """Put the reward model's rewards in place of the workflow's, where there is one."""
        if self._reward_model is not None:
            rewards = self._reward_model.score(
                training_rows(batch), max_tokens=self._config.trainer.max_tokens_per_microbatch
            )
            batch.batch["rewards"] = rewards.cpu()

    def _greedy_rewards(self, results: Sequence[EpisodeResult], batch: DataProto) -> torch.Tensor:
        """Return for each row ``[B]`` the reward of one greedy episode, the mean of its group where that failed."""
        gconfig = self._config.rollout.gconfig.new(greedy=True)
        rollout = dataclasses.replace(self._config.rollout, gconfig=gconfig)
        kwargs = workflow_kwargs(dataclasses.replace(self._config, rollout=rollout), is_eval=False)
        rows = [dict(result.data) for result in results]
        greedy = self.engine.rollout_batch(rows, self._config.workflow, kwargs, group_size=1, is_eval=True)
        rewards = _group_means(batch)
        answered = {a.group_id: r.group_id for r, a in zip(results, greedy, strict=True) if a.rewards}
        if len(answered) < len(results):
            logger.warning(
                "%d of %d greedy episodes failed: the mean of their groups is their baseline",
                len(results) - len(answered),
                len(results),
            )
        if answered:
            answers = training_batch(self.data.packer, [a for a in greedy if a.rewards])
            self._judge(answers)
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


def batch_cache(config: RunConfig, *, baselines: bool) -> BatchCache | None:
    """Return the run's cache of batches, if it has one.

    Raises:
        ConfigError: If the batches in it are of another config.
    """
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
