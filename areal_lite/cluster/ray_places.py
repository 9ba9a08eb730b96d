"""The places of programs on the nodes of a Ray cluster: one bundle of a placement group and one actor for each program.

Guarantees that nothing starts before all that is wanted is reserved, that a wait for it ends in one sentence with what
is wanted and what is there, and that the nodes have the code, packages and model of this machine.
"""

import asyncio
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple
from areal_lite.cluster.node_actor import NodeActor, node_facts
from areal_lite.cluster.ray_session import LOOPBACK, ray_session
from areal_lite.cluster.remote_program import RemoteProgram, start_over_tcp
from areal_lite.config.run_config import ClusterConfig, ExperimentConfig, RunConfig
from areal_lite.config.server_config import ServerConfig, gpus_on_node
from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes.child_process import main_command
from areal_lite.processes.place import OnEnd, Program

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # seconds between two looks at the nodes


class Bundle(NamedTuple):
    """What one program reserves on its node."""

    role: str
    cpus: int
    gpus: int

    @property
    def resources(self) -> dict[str, int]:
        return {name: count for name, count in (("CPU", self.cpus), ("GPU", self.gpus)) if count}


def bundles_of(config: ExperimentConfig) -> list[Bundle]:
    """Return the bundles of the servers and rollout workers that a run starts."""
    if not isinstance(config, RunConfig):
        return []
    workers = config.rollout.workers if config.rollout.workers > 1 else 0
    servers = [] if config.rollout.addresses else server_bundles(config.server, config.cluster)
    return servers + [Bundle(f"worker-{number}", 1, 0) for number in range(workers)]


def rank_bundles(config: Any) -> list[Bundle]:
    threads = max(1, config.trainer.num_threads)
    gpus = 0 if config.trainer.device == "cpu" else min(1, config.cluster.n_gpus_per_node)
    return [Bundle(f"rank-{number}", threads, gpus) for number in range(config.cluster.n_ranks)]


def server_bundles(config: ServerConfig, cluster: ClusterConfig) -> list[Bundle]:
    gpus = gpus_on_node(config, cluster.n_gpus_per_node)
    return [Bundle(f"server-{number}", max(1, config.num_threads), gpus) for number in range(config.replicas)]


class RayPlace:
    """The bundle of one program and the actor that starts it there."""

    def __init__(self, bundle: Bundle, make_actor: Any, config: ExperimentConfig, log_path: Path) -> None:
        self.host = LOOPBACK
        """Where other programs of the run reach this one; the loopback address on the run's own machine."""
        self.log_path: Path | None = log_path
        """None for a program that prints where this process does."""
        self._bundle = bundle
        self._make_actor = make_actor
        self._model_path = config.model_path
        self._timeout_s = config.ray.start_timeout_s
        self._request_actor()

    def _request_actor(self) -> None:
        self._actor = self._make_actor()
        self._facts = self._actor.facts.remote(self._model_path)

    @property
    def node(self) -> str:
        return f" on node {self.host}"

    @property
    def where(self) -> str:
        return self.node + (f", log {self.log_path}" if self.log_path else "")

    def _ask(self, answer: Any) -> Any:
        """Return what the actor answers; raises OSError if it is lost or does not start."""
        import ray

        try:
            return ray.get(answer, timeout=self._timeout_s)
        except ray.exceptions.RayError as error:
            self._actor = None
            why = str(error).strip().rpartition("\n")[2]
            raise OSError(f"no process of {self._bundle.role} answers on a node: {why}") from None

    def facts(self) -> dict[str, str]:
        """Wait for the actor, and return what it finds; raises OSError."""
        import ray

        address, facts = self._ask(self._facts)
        self.address, self._own_address = str(address), ray.util.get_node_ip_address()
        self.host = LOOPBACK if address == self._own_address else address
        return dict(facts)

    def ready_actor(self) -> Any:
        """Return an actor that has run nothing yet; raises OSError if none starts."""
        if self._actor is None:
            self._request_actor()
        self.facts()
        return self._actor

    def listen_at(self, host: str, port: int) -> tuple[str, int]:
        return self.host, int(self._ask(self.ready_actor().free_port.remote(self.host)))

    def clock_s(self) -> float:
        """Return how far the clock of the node is ahead."""
        began = time.time()
        return float(self._ask(self.ready_actor().clock.remote())) - (began + time.time()) / 2

    def sees(self, path: str) -> bool:
        return bool(self._ask(self.ready_actor().sees.remote(path)))

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], output: IO[bytes], on_end: OnEnd = bool
    ) -> Program:
        actor, self._actor = self.ready_actor(), None
        name = f"{self._bundle.role} on node {self.host} (log {output.name})"
        return RemoteProgram(actor, name, command, environment, output.fileno(), on_end)

    def start_logged(self, command: Sequence[str], environment: Mapping[str, str], on_end: OnEnd = bool) -> Program:
        if self.log_path is None:
            return self.start(command, environment, sys.stdout.buffer, on_end)
        with self.log_path.open("ab") as log:
            return self.start(command, environment, log, on_end)

    async def start_connected(self, module: str, on_end: OnEnd) -> tuple[Program, socket.socket]:
        await asyncio.to_thread(self.ready_actor)  # which says where it is
        host = LOOPBACK if self.host == LOOPBACK else self._own_address
        return await start_over_tcp(partial(self.start_logged, main_command(module)), host, self._timeout_s, on_end)


class RayPlaces(dict[str, RayPlace]):
    """The places of a run by role, and the ``address`` of their cluster."""

    address: str

    def weight_update(self, run_dir: Path) -> Literal["auto", "disk", "broadcast"]:
        """Return how new weights reach the nodes: auto if all are this machine, disk if all have the run's folder."""
        import ray

        if len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) == 1:
            return "auto"
        return "broadcast" if self.blind(run_dir, "server") else "disk"

    def metrics(self) -> dict[str, float]:
        import ray

        return {"cluster/nodes": float(sum(node["Alive"] for node in ray.nodes()))}

    def blind(self, folder: Path, role: str = "") -> list[str]:
        """Return the nodes that do not see ``folder``, of the places whose role begins with ``role``."""
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as probe:
            path, places = str(Path(probe.name).resolve()), [self[each] for each in self if each.startswith(role)]
            return [place.host for place in places if place.host != LOOPBACK and not place.sees(path)]


@contextmanager
def ray_places(
    config: ExperimentConfig, log_dir: Path, bundles: Sequence[Bundle], later: Sequence[Bundle] = ()
) -> Iterator[RayPlaces]:
    """Yield the places of programs of ``config``, with their logs in ``log_dir``; raises ConfigError or ServerError.
    ``later`` is what these programs themselves will reserve."""
    log_dir.mkdir(parents=True, exist_ok=True)
    with ray_session(config.ray, num_cpus=sum(bundle.cpus for bundle in (*bundles, *later))):
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        is_copied = "working_dir" in config.ray.runtime_env
        group = _reserve(config, bundles, later)
        try:
            places = RayPlaces()
            places.address = ray.get_runtime_context().gcs_address
            for index, bundle in enumerate(bundles):
                actor = ray.remote(NodeActor).options(
                    num_cpus=bundle.cpus,
                    num_gpus=bundle.gpus,
                    max_restarts=0,
                    max_concurrency=4,  # a program, and calls that end it
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
                )
                make_actor = partial(actor.remote, str(Path.cwd()), is_copied=is_copied)
                places[bundle.role] = RayPlace(bundle, make_actor, config, log_dir / f"{bundle.role}.log")
            try:
                facts = {f"{place.host} ({role})": place.facts() for role, place in places.items()}
            except OSError as error:
                raise ConfigError(f"{error}. Is areal_lite installed on every node, at the same path?") from None
            here = node_facts(config.model_path)
            check_facts({name: value for name, value in here.items() if name != "folder" or not is_copied}, facts)
            logger.info("placed %s", ", ".join(f"{role} on {place.host}" for role, place in places.items()))
            yield places
        finally:
            ray.util.remove_placement_group(group)  # which ends its actors, and they their programs


def check_facts(here: Mapping[str, str], nodes: Mapping[str, Mapping[str, str]]) -> None:
    """Check that each node, by its name, has what this machine has; raises ConfigError with both sides."""
    for node, facts in nodes.items():
        for name, value in here.items():
            if (other := facts.get(name)) != value:
                raise ConfigError(
                    f"node {node} has {name} {other}, and this machine {value}: every node needs the same code, "
                    "packages and model at the same paths"
                )


def _reserve(config: ExperimentConfig, bundles: Sequence[Bundle], later: Sequence[Bundle]) -> Any:
    """Return a placement group that is ready; raises ConfigError with what is wanted and what is there."""
    import ray
    from ray.util.placement_group import placement_group

    deadline = time.monotonic() + config.ray.start_timeout_s
    strategy = "PACK" if bundles[0].role.startswith("rank") else "SPREAD"  # ranks talk most with one another
    group = placement_group([bundle.resources for bundle in bundles], strategy=strategy)
    while True:
        is_reserved = group.wait(LOOK_S)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_nodes = len(nodes) >= config.cluster.n_nodes
        never = has_nodes and not can_fit([bundle.resources for bundle in (*bundles, *later)], nodes)
        if is_reserved and has_nodes and not never:
            return group
        if is_reserved:
            time.sleep(LOOK_S)  # for nodes to join
        if never or time.monotonic() > deadline:
            free = ray.available_resources()
            ray.util.remove_placement_group(group)
            wanted = ", ".join(f"{_size(bundle.resources)} for {bundle.role}" for bundle in (*bundles, *later))
            raise (ConfigError if never else ServerError)(
                f"cluster.n_nodes is {config.cluster.n_nodes}, and the run wants {wanted}; the cluster has "
                f"{len(nodes)} nodes with {', '.join(map(_size, nodes))}, of which {_size(free)} are free: start more "
                "nodes, or lower cluster.n_nodes, cluster.n_ranks, server.replicas or rollout.workers"
            )


def can_fit(bundles: Sequence[Mapping[str, float]], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return False if the nodes, with all that they have, are certainly too small for the bundles."""
    sums = {name: sum(bundle.get(name, 0) for bundle in bundles) for bundle in bundles for name in bundle}
    return all(sums[name] <= sum(node.get(name, 0) for node in nodes) for name in sums) and all(
        any(all(node.get(name, 0) >= count for name, count in bundle.items()) for node in nodes) for bundle in bundles
    )


def _size(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
