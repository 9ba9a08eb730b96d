"""``python -m areal_lite.embedded MODEL``: serve a model until a signal, as :class:`EmbeddedServer` starts it."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.model_arguments import add_model_arguments
from areal_lite.embedded.startup import Extend, serve
from areal_lite.errors import ArealLiteError
from areal_lite.servers.programs.embedded_server import checked_settings
from areal_lite.servers.programs.server_program import ServedModel


def _child_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areal_lite.embedded",
        description="Serve a Hugging Face model in SGLang's HTTP dialect, without SGLang.",
    )
    add_model_arguments(parser, EmbeddedServerConfig)
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)  # where to report the port
    return parser


def main(argv: Sequence[str] | None = None, *, extend: "Extend | None" = None) -> int:
    """Serve, with the routes that ``extend`` adds; return the exit code."""
    arguments = vars(_child_parser().parse_args(argv))
    ready_fd = arguments.pop("ready_fd")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    def announce(host: str, port: int) -> None:
        print(f"embedded server ready at http://{host}:{port} (model {arguments['model_path']})", flush=True)
        if ready_fd is not None:
            with os.fdopen(ready_fd, "w") as pipe:
                pipe.write(f"{port}\n")

    try:
        serve(*split_arguments(arguments), on_ready=announce, extend=extend)
    except ArealLiteError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def split_arguments(arguments: dict[str, Any]) -> tuple[EmbeddedServerConfig, ServedModel]:
    names = EmbeddedServerConfig.__dataclass_fields__
    config = checked_settings(EmbeddedServerConfig, {name: value for name, value in arguments.items() if name in names})
    return config, ServedModel(**{name: value for name, value in arguments.items() if name not in names})


if __name__ == "__main__":
    sys.exit(main())
