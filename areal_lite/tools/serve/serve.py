"""``areal-lite serve``: the servers of a run, without the run."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NoReturn

import yaml

from areal_lite.config.server_config import ServerConfig
from areal_lite.embedded.model_arguments import add_model_arguments
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_model_path
from areal_lite.servers.programs.embedded_server import checked_settings
from areal_lite.servers.programs.server_group import ServerGroup, check_servers, make_servers
from areal_lite.servers.programs.server_program import ServedModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serve a Hugging Face model for runs that name the servers in rollout.addresses."
    add_model_arguments(parser, ServerConfig)
    parser.add_argument("--log-dir", type=Path, metavar="DIR", help="Folder of the servers' logs; default a new one")


def run(options: argparse.Namespace) -> NoReturn:
    """Start the servers, print what a run needs to use them, and keep them running until a signal."""
    settings = {name: value for name, value in vars(options).items() if name in ServerConfig.__dataclass_fields__}
    for name in settings.keys() & {"args", "env"}:
        try:
            settings[name] = yaml.safe_load(settings[name])
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name} {settings[name]!r} is not YAML: write {{name: value}}") from error
    config = checked_settings(ServerConfig, settings)
    check_servers(config)
    check_model_path(options.model_path)
    log_dir = options.log_dir or Path(tempfile.mkdtemp(prefix="areal-lite-servers-"))
    print(f"logs: {log_dir}", flush=True)
    servers = make_servers(
        config,
        ServedModel(
            model_path=options.model_path,
            seed=options.seed,
            deterministic=options.deterministic,
            weight_version=options.weight_version,
        ),
        log_dir,
        program="areal_lite.tools.serve.openai_server",
    )
    with ServerGroup(servers) as group:
        addresses = ", ".join(address.removeprefix("http://") for address in group.addresses)
        front = f" rollout.router={group.router.removeprefix('http://')}" if group.router else ""
        backend = config.backend or "embedded"
        print(f"ready: rollout.backend={backend} 'rollout.addresses=[{addresses}]'{front}", flush=True)
        group.wait_for_failure()
