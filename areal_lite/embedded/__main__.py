"""``python -m areal_lite.embedded MODEL``: serve a model until a signal; ``main`` is also ``areal-lite serve``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import MISSING, fields

from areal_lite.embedded.serve import serve, write_ready_line
from areal_lite.embedded.settings import DEVICES, DTYPES, ServerSettings
from areal_lite.errors import ArealLiteError

_CHOICES = {"dtype": DTYPES, "device": DEVICES}


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser; each field of ``ServerSettings`` is an option."""
    parser = argparse.ArgumentParser(
        prog="areal-lite serve",
        description="Serve a Hugging Face model in SGLang's HTTP dialect, without SGLang.",
    )
    parser.add_argument(
        "model_path", metavar="MODEL", help="model directory, or name on the Hugging Face Hub"
    )
    for field in fields(ServerSettings):
        option = "--" + field.name.replace("_", "-")
        if field.default is MISSING:
            continue
        if isinstance(field.default, bool):
            parser.add_argument(option, action="store_true", help="default: off")
            continue
        kind = str if field.name in _CHOICES or isinstance(field.default, str) else int
        parser.add_argument(
            option,
            type=kind,
            default=field.default,
            choices=_CHOICES.get(field.name),
            help=f"default: {field.default}",
        )
    # Set by EmbeddedServer: where to say that the server is ready, and that the parent's end is ours too.
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--die-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; return the exit code."""
    arguments = vars(argument_parser().parse_args(argv))
    ready_fd, die_with_stdin = arguments.pop("ready_fd"), arguments.pop("die_with_stdin")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if die_with_stdin:
        threading.Thread(target=_exit_when_stdin_closes, name="parent watch", daemon=True).start()

    def announce(host: str, port: int) -> None:
        print(f"embedded server ready at http://{host}:{port} (model {arguments['model_path']})", flush=True)
        if ready_fd is not None:
            write_ready_line(ready_fd, host, port)

    try:
        serve(ServerSettings(**arguments), on_ready=announce)
    except ArealLiteError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def _exit_when_stdin_closes() -> None:
    """End this process with its parent, even one killed with SIGKILL: nobody else holds the pipe's other end."""
    while os.read(0, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
