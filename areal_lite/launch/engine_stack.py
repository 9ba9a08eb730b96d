"""Brings up what generates: the embedded server where one is asked for, and the engine in front of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from areal_lite.api.config import RunConfig
from areal_lite.embedded.process import EmbeddedServer
from areal_lite.embedded.settings import check_model_path
from areal_lite.errors import ArealLiteError, ConfigError, ServerError
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.launch.run_data import check_workflow_choice


@dataclass(frozen=True)
class ThreadBudget:
    """CPU threads of the two processes that compute."""

    server: int
    trainer: int


def thread_budget(config: RunConfig) -> ThreadBudget:
    """Return the threads of server and trainer; both named numbers and 0 (choose) are honoured.

    On-policy the two take turns, so each gets all cores; otherwise they run at once and share them.
    A trainer on servers of others has all cores. Under torchrun the trainers of a machine divide theirs.
    """
    trainers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    together = config.rollout.max_head_offpolicyness > 0 and not config.rollout.addresses
    server = config.server.num_threads or (max(1, cores // 2) if together else cores)
    trainer = config.trainer.num_threads or max(1, (cores - server if together else cores) // trainers)
    return ThreadBudget(server=server, trainer=trainer)


def check_startable(config: RunConfig) -> None:
    """Refuse a model or workflow that is not there, or a backend without servers, before anything starts."""
    check_model_path(config.model_path)
    check_workflow_choice(config)
    if config.rollout.backend != "embedded" and not config.rollout.addresses:
        raise ConfigError(
            f"rollout.backend is {config.rollout.backend} and rollout.addresses is empty: name the running servers "
            "(rollout.addresses=[127.0.0.1:30000]), or set rollout.backend=embedded"
        )


@contextmanager
def generating_engine(config: RunConfig, run_dir: Path) -> Iterator[RemoteInfEngine]:
    """Yield an engine with servers behind it; both end with the context.

    Raises:
        ServerError: If the embedded server dies, at the start or in the middle.
    """
    if config.rollout.addresses:
        with RemoteInfEngine(config.rollout) as engine:
            yield engine
        return
    server = EmbeddedServer(
        model_path=config.model_path,
        host=config.server.host,
        port=config.server.port,
        dtype=config.server.dtype,
        device=config.server.device,
        num_threads=thread_budget(config).server,
        max_running_requests=config.server.max_running_requests,
        context_length=config.server.context_length,
        seed=config.seed,
        deterministic=config.trainer.deterministic,
        log_path=run_dir / "server.log",
    )
    with server:
        try:
            with RemoteInfEngine(replace(config.rollout, addresses=[server.address])) as engine:
                yield engine
        except ArealLiteError as error:
            if server.poll() is None:
                raise
            raise ServerError(
                f"the embedded server ended with code {server.poll()}; the end of {run_dir / 'server.log'}:\n"
                f"{server.log_tail()}"
            ) from error
