"""The three runs: training, rollouts alone, evaluation alone. Reads as the loop it is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_lite.api.config import RunConfig
from areal_lite.api.engine_api import Row
from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.data.generated_rows import check_held_out
from areal_lite.data.rollout_batch import training_batch
from areal_lite.data.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.launch.engine_stack import check_startable, generating_engine, thread_budget
from areal_lite.launch.run_data import tokenizer_path, training_data, workflow_rows
from areal_lite.launch.run_directory import run_directory, run_directory_path
from areal_lite.launch.workflow_choice import workflow_kwargs
from areal_lite.trainer.tracking import start_tracking

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""

OnStep = Callable[[int, dict[str, float]], None]
"""Called with the step (0 before training) and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Rewards on the held-out rows under one policy version."""

    reward: float
    """Mean over all episodes that gave one."""
    episodes: int
    failed: int
    """Episodes' groups without a reward."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    """What a training run came to."""

    run_dir: Path
    steps: int
    seconds: float
    before: Evaluation | None
    after: Evaluation | None
    model_dir: Path | None


def run_training(config: RunConfig, *, on_step: OnStep | None = None) -> TrainingSummary:
    """Train as ``config`` says and return what came of it; ``on_step`` sees every record of metrics.jsonl.

    Raises:
        ConfigError: Before anything expensive starts, for whatever in the config cannot work.
        ArealLiteError: With its exit code, for whatever goes wrong later.
    """
    _check_trainable(config)
    kwargs = workflow_kwargs(config, is_eval=False)
    data = training_data(config)
    held_out = workflow_rows(config, config.eval_dataset, is_train=False) if config.eval_dataset else []
    checkpoint, first_step = _checkpoint_to_resume(config)
    with (
        run_directory(config, fresh=checkpoint is None) as run_dir,
        start_tracking(config, run_dir, last_step=first_step) as tracking,
        generating_engine(config, run_dir) as engine,
    ):
        from transformers.utils.logging import disable_progress_bar

        from areal_lite.trainer.checkpoint import load_checkpoint, save_checkpoint
        from areal_lite.trainer.metrics import MetricsWriter
        from areal_lite.trainer.weights import publish_weights, save_model

        disable_progress_bar()  # type: ignore[no-untyped-call]
        started = time.monotonic()
        trainer = _make_trainer(config)
        served_dtype = _torch_dtype(config.server.dtype)
        total_steps = config.trainer.total_steps

        def publish(step: int) -> None:
            folder = publish_weights(trainer.model, run_dir / "weights", step, dtype=served_dtype)
            engine.update_weights_from_disk(str(folder.resolve()), step)

        if checkpoint is not None:
            load_checkpoint(trainer, checkpoint)
            data.source.load(first_step, checkpoint)
            publish(first_step)
        with MetricsWriter(run_dir, last_step=first_step, tracking=tracking) as writer:

            def record(step: int, metrics: dict[str, float]) -> None:
                writer.write(step, metrics)
                if on_step is not None:
                    on_step(step, metrics)

            def evaluate(step: int) -> Evaluation | None:
                if not held_out:
                    return None
                evaluation = _evaluate(engine, config, held_out)
                record(step, _evaluation_metrics(evaluation))
                return evaluation

            before = after = evaluate(0) if checkpoint is None else None
            for step in range(first_step + 1, total_steps + 1):
                last = step == total_steps
                clock = time.monotonic()
                results = engine.prepare_batch(data.source, config.workflow, kwargs, config.should_accept_fn)
                waited_s = time.monotonic() - clock
                if last:
                    engine.close_source(data.source)
                batch = training_batch(data.packer, results)
                learned = trainer.train_step(batch, version=engine.get_version())
                data.source.mark_trained(result.samples for result in results)
                published = time.monotonic()
                publish(step)
                metrics = {
                    **{f"train/{name}": value for name, value in learned.items()},
                    "timing/rollout_wait_s": waited_s,
                    "timing/weight_update_s": time.monotonic() - published,
                    "timing/step_s": time.monotonic() - clock,
                    **{f"episodes/{status}": float(count) for status, count in engine.export_stats().items()},
                    "data/epoch": float(data.source.epoch_id),
                    "data/owed_groups": float(data.source.num_owed),
                    "data/buffered_groups": float(data.source.get_buffer_length()),
                    "data/dropped_groups": float(data.source.dropped.total()),
                }
                record(step, metrics)
                if not last and hasattr(data.dataset, "on_batch_end"):
                    data.dataset.on_batch_end(batch)
                if _is_due(step, config.checkpoint.every_steps, total_steps):
                    save_checkpoint(
                        trainer,
                        run_dir / CHECKPOINTS,
                        step,
                        write_rest=partial(data.source.save, step),
                        keep=config.checkpoint.keep,
                    )
                if last or _is_due(step, config.evaluation.every_steps, total_steps):
                    after = evaluate(step)
            model_dir = None
            if config.save_model:
                tokenizer = load_tokenizer(tokenizer_path(config))
                model_dir = save_model(trainer.model, tokenizer, run_dir / "model", dtype=served_dtype)
        return TrainingSummary(
            run_dir=run_dir,
            steps=total_steps - first_step,
            seconds=time.monotonic() - started,
            before=before,
            after=after,
            model_dir=model_dir,
        )


def _checkpoint_to_resume(config: RunConfig) -> tuple[Path | None, int]:
    """Return the checkpoint the run goes on from, None for a fresh start, and the step it stands at.

    Raises:
        CheckpointError: If it is missing or broken.
        ConfigError: If there is nothing left to train.
    """
    from areal_lite.trainer.checkpoint import checkpoint_step, find_checkpoint

    checkpoint = find_checkpoint(run_directory_path(config) / CHECKPOINTS, config.checkpoint.resume)
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    if step >= config.trainer.total_steps:
        raise ConfigError(
            f"{checkpoint} has trained {step} steps and trainer.total_steps is {config.trainer.total_steps}: raise it "
            "to go on, or choose another trial_name"
        )
    return checkpoint, step


def _is_due(step: int, every_steps: int | None, total_steps: int) -> bool:
    return every_steps is not None and (step == total_steps or step % every_steps == 0)


def run_rollout(config: RunConfig) -> list[EpisodeResult]:
    """Run the workflow once on every training row, without training, and return the results.

    Episodes are dumped under ``rollout/`` where ``rollout.dump_to_file`` says so.
    """
    check_startable(config)
    kwargs = workflow_kwargs(config, is_eval=False)
    rows = workflow_rows(config, config.train_dataset, is_train=True)
    with run_directory(config, fresh=False) as run_dir, generating_engine(config, run_dir) as engine:
        return engine.rollout_batch(rows, config.workflow, kwargs, config.should_accept_fn)


def run_evaluation(config: RunConfig) -> Evaluation:
    """Run the workflow on the held-out rows and return the rewards.

    Raises:
        ConfigError: If there is no ``eval_dataset``.
        EpisodeError: If no episode gave a reward.
    """
    if config.eval_dataset is None:
        raise ConfigError(
            "eval_dataset is missing: give the rows to evaluate on, for example eval_dataset.path=rows.jsonl"
        )
    check_startable(config)
    rows = workflow_rows(config, config.eval_dataset, is_train=False)
    with run_directory(config, fresh=False) as run_dir, generating_engine(config, run_dir) as engine:
        return _evaluate(engine, config, rows)


def _check_trainable(config: RunConfig) -> None:
    check_startable(config)
    rollout = config.rollout
    if rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}: a group of one has no baseline, so every advantage would be "
            "0. Use 2 or more"
        )
    if rollout.gconfig.effective_temperature == 0:
        raise ConfigError(
            "rollout.gconfig is greedy: all episodes of a group would be equal and every advantage 0. Set greedy: "
            "false and a temperature above 0"
        )
    if config.train_dataset.sampler is not None:
        raise ConfigError(
            "train_dataset.sampler orders the items of a ResumableLoader, and this command draws groups of rows: "
            "remove it, and choose groups with buffer_filter or should_accept_fn"
        )
    if config.eval_dataset is not None:
        check_held_out(config.train_dataset, config.eval_dataset)


def _make_trainer(config: RunConfig) -> Any:
    from dataclasses import replace

    from areal_lite.trainer.policy_trainer import PolicyTrainer

    trainer_config = replace(config.trainer, num_threads=thread_budget(config).trainer)
    return PolicyTrainer(
        trainer_config,
        model_path=config.model_path,
        seed=config.seed,
        temperature=config.rollout.gconfig.effective_temperature,
    )


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _evaluate(engine: RemoteInfEngine, config: RunConfig, rows: Sequence[Row]) -> Evaluation:
    clock = time.monotonic()
    results = engine.rollout_batch(
        rows,
        config.workflow,
        workflow_kwargs(config, is_eval=True),
        group_size=config.evaluation.group_size,
        is_eval=True,
    )
    rewards = [reward for result in results for reward in result.rewards]
    failed = [result for result in results if result.status is not EpisodeStatus.ACCEPTED]
    if not rewards:
        causes = Counter((r.error or "").strip().rsplit("\n", 1)[-1][:300] for r in failed)
        raise EpisodeError(
            f"none of {len(results)} evaluation episodes gave a reward: "
            + "; ".join(f"{count} x {cause}" for cause, count in causes.most_common(3))
        )
    return Evaluation(
        reward=sum(rewards) / len(rewards),
        episodes=len(rewards),
        failed=len(failed),
        seconds=time.monotonic() - clock,
    )


def _evaluation_metrics(evaluation: Evaluation) -> dict[str, float]:
    return {
        "eval/reward": evaluation.reward,
        "eval/episodes": float(evaluation.episodes),
        "eval/failed": float(evaluation.failed),
        "eval/seconds": evaluation.seconds,
    }
