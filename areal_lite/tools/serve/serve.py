"""``areal-lite serve``: the servers of a run, without the run."""

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
import yaml
from areal_lite.agents.outside_agent import KEY
from areal_lite.config.run_config import ClusterConfig, ExperimentConfig, RayConfig, RunConfig
from areal_lite.config.server_config import ServerConfig
from areal_lite.embedded.model_arguments import add_model_arguments
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_model_path
from areal_lite.processes.place import Places, here
from areal_lite.servers.programs.embedded_server import checked_settings
from areal_lite.servers.programs.server_group import ServerGroup, check_servers, make_servers
from areal_lite.servers.programs.server_program import ServedModel
from areal_lite.tools.run.config import SPINS, load_run
from areal_lite.tools.run.train import train

_OF_SERVERS = ("deterministic", "log_dir", "launch", "ray_address", "gpus_per_node", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, ServerConfig)
    add = parser.add_argument
    text = "MODEL is the YAML of a training run, whose episodes programs outside take as sessions (docs/agents.md)"
    add("--train", action="store_true", help=text)
    add("--log-dir", type=Path, metavar="DIR", help="Folder of the servers' logs; default a new one")
    add("--launch", choices=("local", "ray"), default="local", help="Start them here, or on the nodes of a Ray cluster")
    text = "Head of the cluster; default RAY_ADDRESS, else a Ray of this machine"
    add("--ray-address", metavar="HOST:PORT", help=text)
    add("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs of a node for --launch ray; default CPUs alone")


def run(options: argparse.Namespace) -> int:
    """Start the servers, print what a run needs to use them, and keep them running until a signal."""
    settings = {name: value for name, value in vars(options).items() if name in ServerConfig.__dataclass_fields__}
    if options.train:
        return train_outside(options, settings)
    for name in settings.keys() & {"args", "env"}:
        try:
            settings[name] = yaml.safe_load(settings[name])
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name} {settings[name]!r} is not YAML: write {{name: value}}") from error
    config = checked_settings(ServerConfig, settings)
    on_ray = options.launch == "ray"
    if options.deterministic and config.backend not in (None, "embedded"):
        raise ConfigError(f"--deterministic is of the embedded server: give {config.backend} its own flag by --args")
    if not on_ray and (options.ray_address or options.gpus_per_node):
        raise ConfigError("--ray-address and --gpus-per-node need --launch ray")
    check_servers(config, on_nodes=on_ray)
    check_model_path(options.model_path)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="areal-lite-servers-"))
    if config.replicas == 1:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    print(f"logs: {log_dir}", flush=True)
    model = ServedModel(
        model_path=options.model_path,
        seed=options.seed,
        deterministic=options.deterministic,
        weight_version=options.weight_version,
    )
    with ExitStack() as stack:
        places = stack.enter_context(_nodes(options, config, log_dir)) if on_ray else here
        servers = make_servers(config, model, log_dir, program="areal_lite.tools.serve.openai_server", places=places)
        group = stack.enter_context(ServerGroup(servers))
        addresses = ", ".join(address.removeprefix("http://") for address in group.addresses)
        front = f" rollout.router={group.router.removeprefix('http://')}" if group.router else ""
        backend = config.backend or "embedded"
        print(f"ready: rollout.backend={backend} 'rollout.addresses=[{addresses}]'{front}", flush=True)
        group.wait_for_failure()


def train_outside(options: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Train on the sessions of programs outside."""
    if settings:
        raise ConfigError(f"--{next(iter(settings))} goes into the section server of {options.model_path} with --train")
    if given := [name for name in _OF_SERVERS if getattr(options, name) not in (None, False, 0, "local")]:
        raise ConfigError(
            f"--{given[0].replace('_', '-')} is not used with --train: write it into {options.model_path}"
        )
    if not os.environ.get(KEY):
        raise ConfigError(f"{KEY} is not set: programs take sessions with the key that this variable has")
    options.config, options.overrides = options.model_path, ["workflow=areal_lite.agents.outside_agent.OutsideAgent"]
    config = load_run(options, RunConfig)
    if config.rollout.workers > 1 or config.rollout.agents.isolation != "inline":
        raise ConfigError("sessions need rollout.workers: 1 and rollout.agents.isolation: inline")
    train(config)
    return 0


@contextmanager
def _nodes(options: argparse.Namespace, config: ServerConfig, log_dir: Path) -> Iterator[Places]:
    from areal_lite.cluster.ray_session import check_ray

    run = ExperimentConfig(
        experiment_name="serve",
        model_path=options.model_path,
        launch="ray",
        cluster=ClusterConfig(n_gpus_per_node=options.gpus_per_node),
        ray=RayConfig(address=options.ray_address),
    )
    check_ray(run.ray)
    from areal_lite.cluster.ray_places import ray_places, server_bundles

    with ray_places(run, log_dir, server_bundles(config, run.cluster)) as places:
        yield places.__getitem__
