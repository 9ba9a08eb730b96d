"""Start the inference engine of a run and, if no running servers are named, the servers behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.config.rules import check_rollouts
from areal_lite.config.run_config import RunConfig
from areal_lite.files.model_path import check_model_path
from areal_lite.models.adapter_shape import AdapterShape
from areal_lite.processes.quick_import import quick_import
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.run_data import WorkflowChoice
from areal_lite.servers.programs.server_group import ServerGroup, check_servers, make_servers
from areal_lite.servers.programs.server_program import ServedModel

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ThreadBudget:
    """CPU threads of the embedded server and of each trainer process."""

    server: int
    trainer: int


def thread_budget(config: RunConfig) -> ThreadBudget:
    """Return the CPU threads of server and trainers; ``num_threads`` above 0 in the config is kept.

    In an on-policy run server and trainer take turns, so each gets all cores; otherwise they share them. A trainer
    without an embedded server gets all cores. Under torchrun the trainers of a machine divide theirs.
    """
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    together = config.rollout.max_head_offpolicyness > 0 and not config.rollout.addresses
    server = config.server.num_threads or (max(1, cores // 2) if together else cores)
    trainer = config.trainer.num_threads or max(1, (cores - server if together else cores) // trainers)
    return ThreadBudget(server=server, trainer=trainer)


def check_startable(config: RunConfig, workflow: WorkflowChoice | None = None) -> None:
    """Check before anything starts that the model and the workflow exist and that there are servers or can be."""
    check_model_path(config.model_path)
    check_rollouts(config)
    with quick_import():  # the workflow's module may import torch
        (workflow or WorkflowChoice.of(config)).check(config)
    if not config.rollout.addresses:
        check_servers(config.server)


def trainer_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype of the trainer's forward passes."""
    from areal_lite.models.policy_model import resolve_device, resolve_dtype

    return resolve_dtype(config.trainer.dtype, resolve_device(config.trainer.device))


def served_dtype(config: RunConfig) -> torch.dtype:
    """Return the dtype in which models are published, served and saved."""
    from areal_lite.models.policy_model import resolve_device, resolve_dtype

    if config.server.dtype == "auto":
        return trainer_dtype(config)
    return resolve_dtype(config.server.dtype, resolve_device("auto"))


@contextmanager
def generating_engine(config: RunConfig, run_dir: Path) -> Iterator[RemoteInfEngine]:
    """Yield an engine with running servers; both stop when the context ends."""
    if config.rollout.addresses:
        with _reporting(RemoteInfEngine(config.rollout, model_path=config.model_path)) as engine:
            yield engine
        return
    dtype: Any = str(served_dtype(config)).removeprefix("torch.")
    settings = replace(config.server, dtype=dtype)
    if settings.backend in (None, "embedded"):
        threads = settings.num_threads or max(1, thread_budget(config).server // settings.replicas)
        settings = replace(settings, num_threads=threads)
    model = ServedModel(
        model_path=config.model_path,
        seed=config.seed,
        deterministic=config.trainer.deterministic,
        adapters=_adapters(config),
    )
    with ServerGroup(make_servers(settings, model, run_dir / "servers")) as group:
        patience = max(config.rollout.faults.outage_patience_s, settings.start_timeout_s)  # for all of them to restart
        rollout = replace(
            config.rollout,
            addresses=group.addresses,
            backend=settings.backend or "embedded",
            router=group.router,
            faults=replace(config.rollout.faults, outage_patience_s=patience),
        )
        with _reporting(RemoteInfEngine(rollout, model_path=config.model_path)) as engine:
            group.attach(engine)
            try:
                yield engine
            finally:
                group.attach(None)


def _adapters(config: RunConfig) -> AdapterShape | None:
    lora = config.trainer.lora
    if config.rollout.weight_update != "adapter" or lora is None or config.server.backend in (None, "embedded"):
        return None
    from areal_lite.models.lora import planned_shape

    return planned_shape(config.model_path, lora)


@contextmanager
def _reporting(engine: RemoteInfEngine) -> Iterator[RemoteInfEngine]:
    """Run the engine, and log its failed episodes by cause when it ends, also after an error."""
    with engine:
        try:
            yield engine
        finally:
            if table := engine.failures.table():
                logger.warning("%s", table)
