"""Entry points of runs that train by reinforcement learning and of runs that only generate, on the training rows or the
held-out rows; and what is checked before one. ``rl_run`` has the loop of training."""

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.config.dataset_config import MIXTURE, DatasetConfig
from areal_lite.config.rules import check_rollouts, check_rows_end, check_training, held_out_rows
from areal_lite.config.run_config import RunConfig
from areal_lite.data.rows.load_rows import is_environment
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.processes.quick_import import quick_import
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.engine_stack import engine_metrics, generating_engine, with_scalars
from areal_lite.runs.evaluation import Evaluation, evaluate, no_success
from areal_lite.runs.folder.run_directory import run_directory
from areal_lite.runs.run_data import WorkflowChoice, workflow_rows
from areal_lite.servers.programs.server_group import check_servers
from areal_lite.trainer.metrics import MetricsWriter, OnStep

if TYPE_CHECKING:
    from areal_lite.runs.training_run import Summary

logger = logging.getLogger(__name__)
_ENVIRONMENT_SIZE = 500  # default number of rows of an environment


def run_training(
    config: RunConfig, *, on_step: OnStep | None = None, workflow: WorkflowChoice | None = None
) -> "Summary[Evaluation]":
    """Train a policy by reinforcement learning; ``on_step`` sees every record of metrics.jsonl.

    Under torchrun all ranks call it; the first one generates, writes and has the metrics. ``workflow`` replaces that
    of the config, which the files of the run name.

    Raises:
        ConfigError: Before anything expensive starts, for anything in the config that cannot work.
        Stopped: On SIGINT or SIGTERM, with a checkpoint of the last whole step if the run makes any.
    """
    check_trainable(config, workflow)
    from areal_lite.models.parallel.ranks import join_ranks
    from areal_lite.models.policy_model import resolve_device
    from areal_lite.runs.rl_run import run_rl

    trainer = config.trainer
    with join_ranks(resolve_device(trainer.device), sp_size=trainer.sp_size, tp_size=trainer.tp_size):
        return run_rl(config, on_step, workflow=workflow)


def check_startable(config: RunConfig, workflow: WorkflowChoice | None = None) -> None:
    """Check before anything starts that the model and the workflow exist and that there are servers or can be."""
    check_model_path(config.model_path)
    check_rollouts(config)
    with quick_import():  # the workflow's module may import torch
        (workflow or WorkflowChoice.of(config)).check(config)
    if not config.rollout.addresses:
        check_servers(config.server, on_nodes=config.launch == "ray")
    if config.launch == "ray":
        importlib.import_module("areal_lite.cluster.ray_session").check_ray(config.ray)


def check_trainable(config: RunConfig, workflow: WorkflowChoice | None = None) -> None:
    check_startable(config, workflow)
    with quick_import():
        from areal_lite.models.policy_model import resolve_device

    if not config.rollout.addresses and config.server.backend in (None, "embedded"):
        resolve_device(config.server.device, key="server.device")
    check_learnable(config)
    if config.eval_dataset is not None:
        check_held_out(config.train_dataset, config.eval_dataset)


def check_learnable(config: RunConfig) -> None:
    """Check what a run needs to train beside a sound ``model_path``, servers and rows; raises ConfigError."""
    check_training(config)
    from areal_lite.models.policy_model import check_mesh, check_scorable, resolve_device
    from areal_lite.trainer.estimators import COMPARES_GROUP

    resolve_device(config.trainer.device)
    critic, rollout = config.trainer.critic, config.rollout
    check_scorable(config.model_path)
    check_mesh(config.model_path, config.trainer)
    check_image_model(config.model_path, trains_vision=config.trainer.vision == "train")
    critic_path = None if critic is None else critic.model_path
    for key, path in (("reward_model", config.reward_model), ("trainer.critic.model_path", critic_path)):
        if path is not None:
            check_model_path(path, key=key, has_tokenizer=False)
            check_scorable(path, key=key)
    if critic_path is not None:
        check_mesh(critic_path, config.trainer)
    if rollout.group_size < 2 and config.trainer.advantage in COMPARES_GROUP:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}: a group of one has no baseline, so every advantage of "
            f"{config.trainer.advantage} would be 0. Use 2 or more"
        )


def check_held_out(train: DatasetConfig, held_out: DatasetConfig) -> None:
    """Check that held-out rows of an environment are not training rows too: row i comes from ``seed + i``."""
    if train.path == held_out.path == MIXTURE:
        of_train = {part["name"]: _part_rows(part) for part in train.kwargs["parts"]}
        for part in held_out.kwargs["parts"]:
            check_held_out(of_train.get(part["name"], held_out), _part_rows(part))
    if train.path != held_out.path or not is_environment(train.path):
        return
    first, second = map(_row_seeds, (train, held_out))
    if max(first.start, second.start) < min(first.stop, second.stop):
        raise ConfigError(
            f"eval_dataset {held_out.path} uses seeds {second.start} to {second.stop - 1}, which overlap with the "
            f"training rows' {first.start} to {first.stop - 1}: set its seed to {first.stop} or more"
        )


def _part_rows(part: dict[str, Any]) -> DatasetConfig:
    return DatasetConfig(path=f"env:{part['env']}", kwargs=part["kwargs"])


def _row_seeds(config: DatasetConfig) -> range:
    seed = int(config.kwargs.get("seed", 0))
    size = int(config.kwargs.get("size", _ENVIRONMENT_SIZE))
    if config.max_samples is not None and not config.shuffle:
        size = min(size, config.max_samples)
    return range(seed, seed + size)


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
    """Run the workflow on the held-out rows and return the rewards. eval_metrics.jsonl gets one record, which
    ``on_step`` sees. Raises ConfigError without an ``eval_dataset``, EpisodeError if no episode gave a reward."""
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
    """Yield an engine without a trainer, and a dict for more metrics. When the context ends, also by an error, all are
    one record in ``NAME_metrics.jsonl``; not in metrics.jsonl, because the folder may hold a training run."""
    metrics: dict[str, float] = {}
    with run_directory(config, fresh=False, trains=False) as run_dir, generating_engine(config, run_dir) as engine:
        began = time.monotonic()
        try:
            yield engine, metrics
        finally:
            metrics = {f"{name}/seconds": time.monotonic() - began} | engine_metrics(engine) | metrics
            record = with_scalars(metrics, engine.take_scalars() | engine.take_scalars(is_eval=True))
            MetricsWriter(run_dir, name=f"{name}_metrics.jsonl", on_step=on_step).write(0, record)
