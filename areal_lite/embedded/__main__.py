"""``python -m areal_lite.embedded MODEL``: serve a model until a signal, as :class:`EmbeddedServer` starts it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from typing import Any

from areal_lite.config.help import describe_fields
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.serve import Extend, serve, write_ready_line
from areal_lite.errors import ArealLiteError
from areal_lite.servers.programs.embedded_settings import server_config


def argument_parser(settings: type[Any], *, prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of a model and what it serves; each field of the config class ``settings`` is an option."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "model_path",
        metavar="MODEL",
        help="folder with config.json, tokenizer and safetensors weights, or a name on the Hugging Face Hub",
    )
    for field in describe_fields(settings):
        details = f"{field.type}; default {field.default}"
        parser.add_argument(
            f"--{field.key.replace('_', '-')}",
            metavar="VALUE",
            default=argparse.SUPPRESS,
            help=f"{field.meaning} ({details})".replace("%", "%%"),
        )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="Seed for requests without a seed of their own, in order of arrival (default 0)",
    )
    parser.add_argument("--weight-version", default="0", metavar="NAME", help="Name of the first weights; default 0")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="Make the bits of each answer depend on its request, the weights and num_threads only: requests run one "
        "by one and share no KV cache. Several times slower with many requests at once",
    )
    return parser


def _child_parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        EmbeddedServerConfig,
        prog="python -m areal_lite.embedded",
        description="Serve a Hugging Face model in SGLang's HTTP dialect, without SGLang.",
    )
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)  # where to report the address
    return parser


def main(argv: Sequence[str] | None = None, *, extend: Extend | None = None) -> int:
    """Serve, with the routes that ``extend`` adds; return the exit code."""
    arguments = vars(_child_parser().parse_args(argv))
    ready_fd = arguments.pop("ready_fd")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce(host: str, port: int) -> None:
        print(f"embedded server ready at http://{host}:{port} (model {arguments['model_path']})", flush=True)
        if ready_fd is not None:
            write_ready_line(ready_fd, host, port)

    try:
        config, served = split_arguments(arguments)
        serve(config, **served, on_ready=announce, extend=extend)
    except ArealLiteError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def split_arguments(arguments: dict[str, Any]) -> tuple[EmbeddedServerConfig, dict[str, Any]]:
    """Split parsed arguments into the server's settings and what it serves (model, seed, ...)."""
    names = EmbeddedServerConfig.__dataclass_fields__
    config = server_config(**{name: value for name, value in arguments.items() if name in names})
    return config, {name: value for name, value in arguments.items() if name not in names}


if __name__ == "__main__":
    sys.exit(main())
