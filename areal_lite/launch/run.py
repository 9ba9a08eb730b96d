"""The three runs: training, rollouts alone, evaluation alone; the training loop itself is in ``fit``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.api.config import RunConfig
from areal_lite.api.episode import EpisodeResult
from areal_lite.api.generation import GenerationHyperparameters
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.rows.load_rows import check_held_out
from areal_lite.embedded.settings import check_model_path
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.launch.engine_stack import check_startable, generating_engine, thread_budget
from areal_lite.launch.evaluation import Evaluation, evaluate
from areal_lite.launch.resuming import CHECKPOINTS, checkpoint_to_resume, is_evaluated, way_back
from areal_lite.launch.run_data import tokenizer_path, training_data, workflow_rows
from areal_lite.launch.run_directory import run_directory, run_directory_path
from areal_lite.launch.skipped_updates import note_skipped
from areal_lite.launch.stopping import Stopped, finishing
from areal_lite.launch.workflow_choice import workflow_kwargs

if TYPE_CHECKING:
    from areal_lite.trainer.policy_trainer import PolicyTrainer
    from areal_lite.trainer.ranks import Ranks

logger = logging.getLogger(__name__)

OnStep = Callable[[int, dict[str, float]], None]
"""Called with the step (0 before training) and its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    """What a training run came to."""

    run_dir: Path
    steps: int
    seconds: float
    before: Evaluation | None
    """None where step 0 was not evaluated: a resumed run has no before."""
    after: Evaluation | None
    model_dir: Path | None


def run_training(config: RunConfig, *, on_step: OnStep | None = None) -> TrainingSummary:
    """Train as ``config`` says and return what came of it; ``on_step`` sees every record of metrics.jsonl.

    Under torchrun all ranks call it; the first one generates, writes and has the metrics.

    Raises:
        ConfigError: Before anything expensive starts, for whatever in the config cannot work.
        ArealLiteError: With its exit code, for whatever goes wrong later.
        Stopped: On SIGINT or SIGTERM, with a checkpoint of the last whole step where the run makes any.
    """
    _check_trainable(config)
    from areal_lite.trainer.policy_model import resolve_device
    from areal_lite.trainer.ranks import join_ranks

    with join_ranks(resolve_device(config.trainer.device)) as ranks:
        return _train(config, ranks, on_step)


def _train(config: RunConfig, ranks: Ranks, on_step: OnStep | None) -> TrainingSummary:
    from transformers.utils.logging import disable_progress_bar

    from areal_lite.launch.fit import Fit
    from areal_lite.launch.generating_side import GeneratingSide, batch_cache
    from areal_lite.launch.profiling import StepProfiler
    from areal_lite.trainer.algorithm import Algorithm
    from areal_lite.trainer.checkpoint import load_checkpoint
    from areal_lite.trainer.checkpoint_writer import CheckpointWriter
    from areal_lite.trainer.metrics import MetricsWriter
    from areal_lite.trainer.tracking import start_tracking
    from areal_lite.trainer.weights import save_model

    algorithm = Algorithm(config.trainer, max_new_tokens=config.rollout.gconfig.max_new_tokens)
    baselines = "baselines" in algorithm.needs
    leads = ranks.rank == 0
    data = training_data(config) if leads else None
    held_out = (
        workflow_rows(config, config.eval_dataset, is_train=False) if leads and config.eval_dataset else []
    )
    checkpoint, first_step = checkpoint_to_resume(config, config.trainer.total_steps)
    if data is not None and checkpoint is not None:
        data.source.load(first_step, checkpoint)
    cache, reward_model = (
        (batch_cache(config, baselines=baselines), _reward_model(config)) if leads else (None, None)
    )
    with ExitStack() as stack:
        run_dir, lead, writer = run_directory_path(config), None, None
        if data is not None:
            stack.enter_context(run_directory(config, fresh=checkpoint is None))
            tracking = stack.enter_context(start_tracking(config, run_dir, last_step=first_step))
            engine = stack.enter_context(generating_engine(config, run_dir))
            writer = stack.enter_context(MetricsWriter(run_dir, last_step=first_step, tracking=tracking))
            lead = GeneratingSide(
                config,
                run_dir,
                engine=engine,
                data=data,
                held_out=held_out,
                reward_model=reward_model,
                baselines=baselines,
                cache=cache,
            )
        disable_progress_bar()  # type: ignore[no-untyped-call]
        started = time.monotonic()

        def record(step: int, metrics: dict[str, float]) -> None:
            if writer is not None:
                writer.write(step, metrics)
            if on_step is not None:
                on_step(step, metrics)

        run = Fit(
            config=config,
            run_dir=run_dir,
            trainer=_make_trainer(config, run_dir, leads=leads),
            lead=lead,
            record=record,
            checkpoints=stack.enter_context(
                CheckpointWriter(run_dir / CHECKPOINTS, keep=config.checkpoint.keep)
            ),
            profiler=stack.enter_context(StepProfiler(config.profile_steps, run_dir / "profile")),
        )
        if checkpoint is not None:
            load_checkpoint(run.trainer, checkpoint)
            run.go_on_from(first_step)
        began_with_one = first_step == 0 and config.evaluation.at_start
        evaluates = config.evaluation.every_steps or config.trainer.total_steps
        model_dir = None
        try:
            with finishing():
                if checkpoint is not None and run.is_due(evaluates) and not is_evaluated(run_dir, first_step):
                    run.validate()
                run.fit()
                if config.save_model:
                    tokenizer = load_tokenizer(tokenizer_path(config))
                    dtype = run.served_dtype
                    model_dir = save_model(run.trainer.model, tokenizer, run_dir / "model", dtype=dtype)
        except Stopped:
            run.save_stopped()
            raise
        except TrainingError as error:
            run.checkpoints.wait()
            error.add_note(way_back(run_dir))
            raise
    return TrainingSummary(
        run_dir=run_dir,
        steps=config.trainer.total_steps - first_step,
        seconds=time.monotonic() - started,
        before=run.evaluations[0] if run.evaluations and began_with_one else None,
        after=run.evaluations[-1] if run.evaluations else None,
        model_dir=model_dir,
    )


def run_rollout(config: RunConfig) -> list[EpisodeResult]:
    """Run the workflow once on every training row, without training, and return the results.

    Episodes are dumped under ``rollout/`` where ``rollout.dump_to_file`` says so.
    """
    check_startable(config)
    kwargs = workflow_kwargs(config, is_eval=False)
    rows = workflow_rows(config, config.train_dataset, is_train=True)
    with (
        run_directory(config, fresh=False, trains=False) as run_dir,
        generating_engine(config, run_dir) as engine,
    ):
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
    with (
        run_directory(config, fresh=False, trains=False) as run_dir,
        generating_engine(config, run_dir) as engine,
    ):
        return evaluate(engine, config, rows)


def _check_trainable(config: RunConfig) -> None:
    from areal_lite.trainer.estimators.estimator import COMPARES_GROUP
    from areal_lite.trainer.policy_model import resolve_device

    check_startable(config)
    resolve_device(config.trainer.device)
    if not config.rollout.addresses:
        resolve_device(config.server.device, key="server.device")
    critic = config.trainer.critic
    if config.reward_model is not None:
        check_model_path(config.reward_model, key="reward_model", has_tokenizer=False)
    if critic is not None and critic.model_path is not None:
        check_model_path(critic.model_path, key="trainer.critic.model_path", has_tokenizer=False)
    rollout = config.rollout
    if rollout.group_size < 2 and config.trainer.advantage in COMPARES_GROUP:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}: a group of one has no baseline, so every advantage of "
            f"{config.trainer.advantage} would be 0. Use 2 or more"
        )
    minibatches = config.trainer.minibatches_per_step
    if minibatches > rollout.consumer_batch_size:
        raise ConfigError(
            f"trainer.minibatches_per_step is {minibatches} and rollout.consumer_batch_size "
            f"{rollout.consumer_batch_size}: a minibatch has whole groups, so some would be empty. Use fewer "
            "minibatches, or more groups"
        )
    if rollout.gconfig.effective_temperature == 0:
        raise ConfigError(
            "rollout.gconfig is greedy: all episodes of a group would be equal and every advantage 0. Set greedy: "
            "false and a temperature above 0"
        )
    changed = [
        name
        for name in ("top_p", "top_k", "min_new_tokens", "frequency_penalty")
        if getattr(rollout.gconfig, name) != getattr(GenerationHyperparameters, name)
    ]
    if changed:
        logger.warning(
            "rollout.gconfig changes %s: tokens are then sampled from another distribution than log-probs are of, and "
            "neither corrections nor metrics see it; best leave them while training",
            ", ".join(changed),
        )
    if config.eval_dataset is not None:
        check_held_out(config.train_dataset, config.eval_dataset)


def _make_trainer(config: RunConfig, run_dir: Path, *, leads: bool) -> PolicyTrainer:
    from areal_lite.trainer.policy_trainer import PolicyTrainer

    gconfig = config.rollout.gconfig
    return PolicyTrainer(
        replace(config.trainer, num_threads=thread_budget(config).trainer),
        model_path=config.model_path,
        seed=config.seed,
        temperature=gconfig.effective_temperature,
        max_new_tokens=gconfig.max_new_tokens,
        on_skip=note_skipped(run_dir) if leads else None,
    )


def _reward_model(config: RunConfig) -> Any:
    if config.reward_model is None:
        return None
    from areal_lite.trainer.policy_model import resolve_device
    from areal_lite.trainer.reward_model import RewardModel, load_reward_model

    return RewardModel(load_reward_model(config.reward_model, device=resolve_device(config.trainer.device)))
