"""Start the inference engine of a run and, if no servers are named, an embedded server behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from areal_lite.api.config import RunConfig
from areal_lite.embedded.process import EmbeddedServer
from areal_lite.embedded.settings import check_model_path
from areal_lite.errors import ArealLiteError, ConfigError, ServerError
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.launch.run_data import check_workflow_choice

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


def check_startable(config: RunConfig) -> None:
    """Check before anything starts that the model and the workflow exist and the backend has servers."""
    check_model_path(config.model_path)
    check_workflow_choice(config)
    if config.rollout.backend != "embedded" and not config.rollout.addresses:
        raise ConfigError(
            f"rollout.backend is {config.rollout.backend} and rollout.addresses is empty: name the running servers "
            "(rollout.addresses=[127.0.0.1:30000]), or set rollout.backend=embedded"
        )


@contextmanager
def generating_engine(config: RunConfig, run_dir: Path) -> Iterator[RemoteInfEngine]:
    """Yield an engine with running servers; both stop when the context ends."""
    if config.rollout.addresses:
        with _reporting(RemoteInfEngine(config.rollout)) as engine:
            yield engine
        return
    settings = asdict(config.server) | {"num_threads": thread_budget(config).server}
    server = EmbeddedServer(
        model_path=config.model_path,
        seed=config.seed,
        deterministic=config.trainer.deterministic,
        log_path=run_dir / "server.log",
        **settings,
    )
    with server:
        try:
            with _reporting(RemoteInfEngine(replace(config.rollout, addresses=[server.address]))) as engine:
                yield engine
        except ArealLiteError as error:
            if server.poll() is None:
                raise
            raise ServerError(
                f"the embedded server ended with code {server.poll()}; the end of {run_dir / 'server.log'}:\n"
                f"{server.log_tail()}"
            ) from error


@contextmanager
def _reporting(engine: RemoteInfEngine) -> Iterator[RemoteInfEngine]:
    """Run the engine, and log its failed episodes by cause when it ends, also after an error."""
    with engine:
        try:
            yield engine
        finally:
            if table := engine.failures.table():
                logger.warning("%s", table)
