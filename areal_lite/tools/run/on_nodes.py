"""Commands on the nodes of a Ray cluster: the trainer ranks of a run, and the runs of a sweep.

Each is the command that the user gave, with torchrun's variables for a rank. Guarantees that ranks start together, and
again together from the newest checkpoint when one of them has ended, and that a stop reaches all of them.
"""

import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from areal_lite.cluster.ray_places import Bundle, RayPlace, RayPlaces, bundles_of, rank_bundles, ray_places
from areal_lite.cluster.ray_session import LOOPBACK, check_ray
from areal_lite.config.run_config import ClusterConfig, RayConfig
from areal_lite.errors import CheckpointError, ConfigError, ServerError, TrainingError
from areal_lite.processes.place import Program, how_ended
from areal_lite.runs.stopping import Stopped, finishing

logger = logging.getLogger(__name__)
_LASTING = ConfigError.exit_code, CheckpointError.exit_code  # of ends that would come again
_ROOT = str(Path(__file__).parents[3])
_ALONE = ["launch=local"] + [
    f"{section}.{name}={'null' if value is None else value}"
    for section, defaults in (("cluster", ClusterConfig()), ("ray", RayConfig()))
    for name, value in vars(defaults).items()
]
"""Overrides of a run that starts nothing on nodes."""


def train_on_ranks(config: Any, words: Sequence[str]) -> None:
    """Have ``cluster.n_ranks`` ranks make the run of ``config``, whose command is ``words``; raises TrainingError. The
    first rank prints where this process does, and has servers and rollout workers placed itself."""
    check_ray(config.ray)
    with ray_places(config, config.run_dir / "logs", rank_bundles(config), bundles_of(config)) as places:
        _check_shared(config.run_dir, places)
        places["rank-0"].log_path = None
        failures, most = 0, config.ray.max_failures
        while (end := _run_ranks(places, words, config.cluster.n_gpus_per_node)) is not None:
            if end[1] in _LASTING or failures == most:
                raise _failed(f"{end[0]}; all ranks have started {failures + 1} times", end[1])
            failures += 1
            logger.warning("%s: all ranks start again, time %d of %d", end[0], failures, most)


def _run_ranks(places: RayPlaces, words: Sequence[str], gpus: int) -> tuple[str, int] | None:
    """Start the ranks and wait until all have ended; return how the first one that failed did, and its code."""
    with _programs() as (programs, ended):
        try:
            for place in places.values():
                place.ready_actor()
            hosts, first = [place.host for place in places.values()], places["rank-0"]
            port = first.listen_at("", 0)[1]
            variables = {"MASTER_ADDR": LOOPBACK if {*hosts} == {LOOPBACK} else first.address, "MASTER_PORT": port}
            variables["WORLD_SIZE"] = len(hosts)
            command = [*words, f"ray.address={places.address}"]
            for number, (role, place) in enumerate(places.items()):
                local = 0 if gpus else hosts[:number].count(place.host)  # a rank sees its own GPU alone
                own = {"RANK": number, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": hosts.count(place.host)}
                programs[role] = _start(place, command, variables | own, partial(ended.put, role))
        except OSError as error:
            return str(error), TrainingError.exit_code
        for _ in places:
            role = ended.get()
            if code := programs[role].wait():
                return f"{role}{places[role].where} {how_ended(code)}", code
    return None


def run_side_by_side(configs: Sequence[Any], commands: Sequence[list[str]], on_done: Callable[[Any], object]) -> None:
    """Make the runs of ``configs`` by their commands, on each of ``cluster.n_nodes`` nodes one at a time; call
    ``on_done`` after each. Raises TrainingError for the first that fails; the others stop."""
    config, todo = configs[0], list(zip(configs, commands, strict=True))
    check_ray(config.ray)
    cpus = max(1, config.trainer.num_threads) + sum(bundle.cpus for bundle in bundles_of(config))
    count = min(config.cluster.n_nodes, len(todo))
    bundles = [Bundle(f"run-{number}", cpus, config.cluster.n_gpus_per_node) for number in range(count)]
    with ray_places(config, config.run_dir / "logs", bundles) as places, _programs() as (programs, ended):
        _check_shared(config.run_dir, places)
        runs: dict[str, Any] = {}
        idle = list(places)
        while todo or runs:
            while todo and idle:
                place = places[role := idle.pop()]
                runs[role], words = todo.pop(0)
                place.log_path = log_path = runs[role].run_dir / "logs/run.log"
                log_path.parent.mkdir(parents=True, exist_ok=True)
                logger.info("starting %s%s", runs[role].run_dir, place.where)
                try:
                    programs[role] = _start(place, [*words, *_ALONE], {}, partial(ended.put, role))
                except OSError as error:
                    raise ServerError(str(error)) from None
            role = ended.get()
            if code := programs.pop(role).wait():
                raise _failed(f"the run of {runs[role].run_dir}{places[role].where} {how_ended(code)}", code)
            on_done(runs.pop(role))
            idle.append(role)


def _failed(message: str, code: int) -> TrainingError:
    error = TrainingError(message)
    error.exit_code = code if code > 0 else TrainingError.exit_code
    return error


@contextmanager
def _programs() -> Iterator[tuple[dict[str, Program], "queue.SimpleQueue[str]"]]:
    """Yield programs by role, to be filled, and a queue of those that ended; all have ended when the context has. A
    stop reaches them as SIGTERM, and they are waited for; after an error they are killed."""
    programs: dict[str, Program] = {}
    try:
        yield programs, queue.SimpleQueue()
    except Stopped:
        with finishing(lambda: ["the programs on the nodes"]):
            for program in programs.values():
                program.terminate()
            for program in programs.values():
                program.wait()
        raise
    finally:
        for program in programs.values():
            program.kill()
        for program in programs.values():
            program.wait()


def _start(place: RayPlace, words: Sequence[str], variables: Mapping[str, Any], on_end: Any) -> Program:
    path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in variables.items()}}
    return place.start_logged([sys.executable, "-m", "areal_lite", *words], environment, on_end)


def _check_shared(run_dir: Path, places: RayPlaces) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    if blind := places.blind(run_dir):
        raise ConfigError(
            f"node {blind[0]} does not see {run_dir}, where checkpoints are: set fileroot to a folder that all share"
        )
