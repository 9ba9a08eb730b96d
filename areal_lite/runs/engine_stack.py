"""The inference engine of a run, with the servers behind it if no running ones are named, and its metrics."""

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from areal_lite.config.run_config import RunConfig
from areal_lite.processes.place import Places, here
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.server_group import ServerGroup, make_servers
from areal_lite.servers.programs.server_program import ServedModel

logger = logging.getLogger(__name__)
OLDER = "older"
"""Folder of a run for the older version of its policy."""


def server_threads(config: RunConfig) -> int:
    """Return the CPU threads of an embedded server: the config's, else its share of the cores. Servers get all of them,
    too, if they take turns with trainers, as on-policy, and half beside them: what one of the two leaves idle, the
    other takes (docs/asynchronous.md)."""
    cores = len(os.sched_getaffinity(0))
    together = config.rollout.max_head_offpolicyness > 0 and not config.rollout.addresses
    return config.server.num_threads or max(1, (cores // 2 if together else cores) // config.server.replicas)


@contextmanager
def generating_engine(
    config: RunConfig, run_dir: Path, meanwhile: Callable[[], object] = lambda: None
) -> Iterator[RemoteInfEngine]:
    """Yield an engine with running servers; both stop when the context ends. ``meanwhile`` is called while servers
    start, if it starts any. Failed episodes are logged by cause when the context ends, also after an error."""
    rollout, group, nodes, older = config.rollout, None, None, None
    with ExitStack() as stack:
        if config.older_policy is not None:
            own = replace(rollout, addresses=config.older_policy.addresses, router=None, workers=1, dump_to_file=False)
            own = replace(own, weight_update="disk")
            alone = replace(config, rollout=own, server=replace(config.server, replicas=1, port=0), older_policy=None)
            older = stack.enter_context(generating_engine(alone, run_dir / OLDER))
        places: Places = here
        if config.launch == "ray":
            on_ray = importlib.import_module("areal_lite.cluster.ray_places")
            nodes = stack.enter_context(on_ray.ray_places(config, run_dir / "logs", on_ray.bundles_of(config)))
            places = nodes.__getitem__
            if rollout.weight_update == "auto" and not rollout.addresses:
                rollout = replace(rollout, weight_update=nodes.weight_update(run_dir))
        if not rollout.addresses:
            group = stack.enter_context(_servers(config, run_dir / "logs", places, meanwhile))
            # A restart of all of them takes as long as their start.
            patience = max(rollout.faults.outage_patience_s, config.server.start_timeout_s)
            rollout = replace(
                rollout,
                addresses=group.addresses,
                backend=config.server.backend or "embedded",
                router=group.router,
                faults=replace(rollout.faults, outage_patience_s=patience),
            )
        engine = stack.enter_context(RemoteInfEngine(rollout, model_path=config.model_path, places=places))
        if older is not None and config.older_policy is not None:
            engine.older = older
            if (limit := config.older_policy.max_concurrent_requests) is not None:
                engine.older_share = asyncio.Semaphore(limit)
        if nodes is not None:
            engine.place_metrics = nodes.metrics
        if config.trainer.advantage == "turn_returns":  # the one estimator with a discount per turn
            engine.turn_discount = config.trainer.advantage_kwargs.get("gamma", 1.0)
        if group is not None:
            group.attach(engine)
            stack.callback(group.attach, None)
        try:
            yield engine
        finally:
            if table := engine.failures.table():
                logger.warning("%s", table)


def engine_metrics(engine: RemoteInfEngine) -> dict[str, float]:
    """Return the engine's totals: groups by status, failures, pacing, servers."""
    return {
        **{f"episodes/{status}": float(count) for status, count in engine.export_stats().items()},
        **{f"rollout/{name}": value for name, value in engine.rollout_metrics().items()},
        **{f"servers/{name}": value for name, value in engine.server_metrics().items()},
        **engine.place_metrics(),
    }


def with_scalars(metrics: Mapping[str, float], scalars: Mapping[str, float]) -> dict[str, float]:
    """Return the run's metrics with the numbers that episodes recorded; a name of the run's own stays the run's."""
    if taken := sorted(metrics.keys() & scalars.keys()):
        logger.warning("episodes recorded %s, which are metrics of the run: use other names", ", ".join(taken))
    return {**scalars, **metrics}


def _servers(config: RunConfig, log_dir: Path, places: Places, meanwhile: Callable[[], object]) -> ServerGroup:
    # A run that trains has resolved both dtypes; without a trainer, auto is left to the server, which knows its device.
    dtype = config.trainer.dtype if config.server.dtype == "auto" else config.server.dtype
    settings = replace(config.server, dtype=dtype)
    adapters = None
    if settings.backend in (None, "embedded"):
        settings = replace(settings, num_threads=server_threads(config))
    elif config.rollout.weight_update == "adapter" and config.trainer.lora is not None:
        from areal_lite.models.lora import planned_shape

        adapters = planned_shape(config.model_path, config.trainer.lora)
    model = ServedModel(
        model_path=config.model_path, seed=config.seed, deterministic=config.trainer.deterministic, adapters=adapters
    )
    return ServerGroup(make_servers(settings, model, log_dir, places=places), meanwhile)
