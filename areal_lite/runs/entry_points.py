"""Entry point of a training run, and what is checked before one; ``rl_run`` has the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.rules import check_rollouts, check_training
from areal_lite.config.run_config import RunConfig
from areal_lite.data.rows.load_rows import is_environment
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.processes.quick_import import quick_import
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.run_data import WorkflowChoice
from areal_lite.servers.programs.server_group import check_servers
from areal_lite.trainer.metrics import OnStep

if TYPE_CHECKING:
    from areal_lite.runs.training_run import Summary

_ENVIRONMENT_SIZE = 500  # default number of rows of an environment


def run_training(
    config: RunConfig, *, on_step: OnStep | None = None, workflow: WorkflowChoice | None = None
) -> Summary[Evaluation]:
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

    with join_ranks(resolve_device(config.trainer.device), sp_size=config.trainer.sp_size):
        return run_rl(config, on_step, workflow=workflow)


def check_startable(config: RunConfig, workflow: WorkflowChoice | None = None) -> None:
    """Check before anything starts that the model and the workflow exist and that there are servers or can be."""
    check_model_path(config.model_path)
    check_rollouts(config)
    with quick_import():  # the workflow's module may import torch
        (workflow or WorkflowChoice.of(config)).check(config)
    if not config.rollout.addresses:
        check_servers(config.server)


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
    from areal_lite.models.policy_model import check_heads, check_scorable, resolve_device
    from areal_lite.trainer.estimators import COMPARES_GROUP

    resolve_device(config.trainer.device)
    critic, rollout = config.trainer.critic, config.rollout
    check_scorable(config.model_path)
    check_heads(config.model_path, config.trainer.sp_size)
    check_image_model(config.model_path, trains_vision=config.trainer.vision == "train")
    critic_path = None if critic is None else critic.model_path
    for key, path in (("reward_model", config.reward_model), ("trainer.critic.model_path", critic_path)):
        if path is not None:
            check_model_path(path, key=key, has_tokenizer=False)
            check_scorable(path, key=key)
    if critic_path is not None:
        check_heads(critic_path, config.trainer.sp_size)
    if rollout.group_size < 2 and config.trainer.advantage in COMPARES_GROUP:
        raise ConfigError(
            f"rollout.group_size is {rollout.group_size}: a group of one has no baseline, so every advantage of "
            f"{config.trainer.advantage} would be 0. Use 2 or more"
        )


def check_held_out(train: DatasetConfig, held_out: DatasetConfig) -> None:
    """Check that held-out rows of an environment are not training rows too: row i comes from ``seed + i``."""
    if train.path != held_out.path or not is_environment(train.path):
        return
    first, second = map(_row_seeds, (train, held_out))
    if max(first.start, second.start) < min(first.stop, second.stop):
        raise ConfigError(
            f"eval_dataset {held_out.path} uses seeds {second.start} to {second.stop - 1}, which overlap with the "
            f"training rows' {first.start} to {first.stop - 1}: set its seed to {first.stop} or more"
        )


def _row_seeds(config: DatasetConfig) -> range:
    seed = int(config.kwargs.get("seed", 0))
    size = int(config.kwargs.get("size", _ENVIRONMENT_SIZE))
    if config.max_samples is not None and not config.shuffle:
        size = min(size, config.max_samples)
    return range(seed, seed + size)
