"""Entry points of the runs that only generate: episodes on the training rows, or on the held-out rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.config.rules import check_rows_end, held_out_rows
from areal_lite.config.run_config import RunConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.engine_stack import engine_metrics, generating_engine, with_scalars
from areal_lite.runs.entry_points import check_startable
from areal_lite.runs.evaluation import Evaluation, evaluate, no_success
from areal_lite.runs.folder.run_directory import run_directory
from areal_lite.runs.run_data import WorkflowChoice, workflow_rows
from areal_lite.trainer.metrics import MetricsWriter, OnStep

logger = logging.getLogger(__name__)


def run_rollout(config: RunConfig, *, on_step: OnStep | None = None) -> list[Group]:
    """Run the workflow once on every training row, without training, and return the results. With
    ``rollout.dump_to_file`` the episodes are dumped under ``rollout/``. rollout_metrics.jsonl gets one record, which
    ``on_step`` sees. Raises EpisodeError if every group failed."""
    check_startable(config)
    check_rows_end(config)
    choice = WorkflowChoice.of(config)
    kwargs = choice.kwargs(config, config.rollout.gconfig)
    rows = workflow_rows(config, config.train_dataset, is_train=True)
    with _engine_alone(config, "rollout", on_step) as (engine, metrics):
        logger.info("running %d rows x %d episodes", len(rows), config.rollout.group_size)
        groups = engine.rollout_batch(rows, choice.workflow, kwargs, config.should_accept_fn)
        if rewards := [reward for group in groups for reward in group.rewards]:
            metrics["rollout/reward"] = sum(rewards) / len(rewards)
    if groups and all(group.status is EpisodeStatus.FAILED for group in groups):
        raise no_success(groups)
    return groups


def run_evaluation(config: RunConfig, *, on_step: OnStep | None = None) -> Evaluation:
    """Run the workflow on the held-out rows and return the rewards.

    eval_metrics.jsonl gets one record, which ``on_step`` sees.

    Raises:
        ConfigError: If there is no ``eval_dataset``.
        EpisodeError: If no episode gave a reward.
    """
    section = held_out_rows(config)
    check_startable(config)
    rows = workflow_rows(config, section, is_train=False)
    with _engine_alone(config, "eval", on_step) as (engine, metrics):
        result = evaluate(engine, config, rows, WorkflowChoice.of(config))
        metrics |= result.metrics()
        return result


@contextmanager
def _engine_alone(
    config: RunConfig, name: str, on_step: OnStep | None
) -> Iterator[tuple[RemoteInfEngine, dict[str, float]]]:
    """Yield an engine without a trainer, and a dict for metrics beside those of the engine. They are one record in
    ``NAME_metrics.jsonl`` when the context ends, also after an error. The file is not metrics.jsonl, because the folder
    may hold a training run."""
    metrics: dict[str, float] = {}
    with run_directory(config, fresh=False, trains=False) as run_dir, generating_engine(config, run_dir) as engine:
        began = time.monotonic()
        try:
            yield engine, metrics
        finally:
            metrics = {f"{name}/seconds": time.monotonic() - began} | engine_metrics(engine) | metrics
            record = with_scalars(metrics, engine.take_scalars() | engine.take_scalars(is_eval=True))
            MetricsWriter(run_dir, name=f"{name}_metrics.jsonl", on_step=on_step).write(0, record)
