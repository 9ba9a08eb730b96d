"""``areal-lite``: signals, logging and exit codes. :mod:`areal_lite.cli.commands` names the commands.

Exit codes: 0 done, 1 ``verify`` or ``env-check`` found something, 2 it could not read or run a part, 64 bad
arguments or config, 70 internal error, 73 run folder busy, 74 disk error, 75 try again later, 78 no usable checkpoint,
130 and 143 stopped by SIGINT and SIGTERM.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from areal_lite.cli.commands import parse
from areal_lite.cli.rank_end import end_with, follow_launcher
from areal_lite.cli.stop_signals import DEBUG, stop_on_signals
from areal_lite.errors import ArealLiteError
from areal_lite.files.safe_text import SafeFormatter, printable, without_secrets
from areal_lite.processes.quick_import import is_first_rank, is_rank
from areal_lite.runs.stopping import stopping_signal

_PRINTS = {"completion", "config", "doctor", "env-check", "inspect", "rescore", "verify", "view"}
"""Commands that lose nothing if the reader of their output leaves early."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without ``argv``, as a rank's program, end the process with it."""
    if argv is None and is_rank():
        follow_launcher()
        end_with(lambda: run_command(sys.argv[1:]))
    return run_command(sys.argv[1:] if argv is None else argv)


def run_command(argv: Sequence[str]) -> int:
    arguments = list(argv) or ["--help"]
    # Threads that busy-wait take CPU time from the other processes on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    sys.path.insert(0, str(Path.cwd()))
    # What areal_lite logs is shown on stderr, with the time, unless handlers are configured; INFO of the first rank.
    logging.getLogger("areal_lite").setLevel(logging.INFO if is_first_rank() else logging.WARNING)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)
        logging.lastResort.setFormatter(SafeFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    stop_on_signals()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except ArealLiteError as error:
        _report(error)
        code = error.exit_code
    except (Exception, KeyboardInterrupt, BaseExceptionGroup) as error:
        code = ArealLiteError.exit_code
        only_prints = not _PRINTS.isdisjoint(arguments[:1]) or not {"-h", "--help"}.isdisjoint(arguments)
        if isinstance(error, BrokenPipeError) and only_prints:  # the reader, for example `head`, has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        elif not stopping_signal():
            _print_error(traceback.format_exc())
    return 128 + number if (number := stopping_signal()) else code


def _run(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.verbose:
        os.environ[DEBUG] = "1"
    if getattr(options, "dry_run", False):
        from areal_lite.tools.doctor.doctor import dry_run

        return dry_run(options)
    code: int = options.run(options)
    return code


def _report(error: ArealLiteError) -> None:
    if os.environ.get(DEBUG) == "1":
        _print_error("".join(traceback.format_exception(error)))
    for line in "\n".join([str(error), *getattr(error, "__notes__", ())]).splitlines():
        _print_error(f"error: {line}\n")


def _print_error(text: str) -> None:
    """Print a text that may quote a model, a server or a folder's files."""
    sys.stderr.write(printable(without_secrets(text)))
