"""A rank ends with the exit code and the output of any other process, and without the interpreter's last part."""

from __future__ import annotations
import os
import signal
import subprocess
import sys
from pathlib import Path
import psutil
import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import atexit, ctypes, io, logging.handlers, os, signal, sys, threading, time
from areal_lite.cli import main as cli
from areal_lite.errors import ConfigError
from areal_lite.runs.stopping import finishing

out, how = sys.argv[1:]
libc = ctypes.CDLL(None)
if "WORLD_SIZE" in os.environ:
    # Called when C++ state is taken apart: a rank that gets there aborts, as one of many does with gloo.
    libc.__cxa_atexit(libc.abort, None, None)
atexit.register(print, "registered")
kept = [open(f"{out}/text", "w"), io.BufferedWriter(io.FileIO(f"{out}/bytes", "wb"))]  # nobody closes them
kept[0].write("text")
kept[1].write(b"bytes")
libc.printf(b"of C\\n")
log = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{out}/log"))  # written by logging.shutdown
logging.getLogger("areal_lite").addHandler(log)


def last():
    time.sleep(0.6)
    print("thread")
    kept[0].write(" of a thread")


def command(arguments):
    logging.getLogger("areal_lite").warning("logged")
    threading.Thread(target=last).start()
    if how == "ConfigError":
        raise ConfigError("it is wrong")
    if how == "ValueError":
        raise ValueError("it broke")
    if how == "exit 3":
        raise SystemExit(3)
    if how == "exit with a text":
        raise SystemExit("a text")
    if how.startswith("SIG"):
        with finishing():
            os.kill(os.getpid(), getattr(signal, how))
    return 1 if how == "found" else 0


cli._run = command
raise SystemExit(cli.main())
"""

CODES = {
    "done": 0,
    "found": 1,
    "ConfigError": 64,
    "ValueError": 70,
    "exit 3": 3,
    "exit with a text": 1,
    "SIGINT": 130,
    "SIGTERM": 143,
}


def run(out: Path, how: str, **environment: str) -> tuple[int, str, str, dict[str, str]]:
    out.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(out), how],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        | {"PYTHONPATH": str(ROOT)}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr, {file.name: file.read_text() for file in out.iterdir()}


@pytest.mark.parametrize("how", CODES)
def test_a_rank_ends_like_any_process_but_takes_nothing_apart(tmp_path: Path, how: str) -> None:
    alone = run(tmp_path / "alone", how)
    rank = run(tmp_path / "rank", how, WORLD_SIZE="2", RANK="0")
    assert rank[0] == CODES[how], rank
    assert rank[1].splitlines().count("registered") == rank[1].splitlines().count("of C") == 1
    assert rank[3] == {"text": "text of a thread", "bytes": "bytes", "log": "logged\n"}
    assert (alone[0], sorted(alone[1].splitlines()), alone[3]) == (rank[0], sorted(rank[1].splitlines()), rank[3])
    assert alone[2] == rank[2]


RANK = """
import threading
from areal_lite.cli import main as cli


def command(arguments):
    print("running", flush=True)
    threading.Event().wait(60)


cli._run = command
cli.main()
"""


def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    launcher = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid); input()"
    rank = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "RANK": "0", "TORCHELASTIC_RUN_ID": "one"}
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", launcher, RANK],
        env=os.environ | rank,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        assert process.stdout.readline() == "running\n"
        process.kill()
        child.wait(30)


def test_the_program_would_abort_at_the_interpreters_own_end(tmp_path: Path) -> None:
    """What the tests above rest on."""
    program = PROGRAM.replace("cli.main()", "cli.run_command([])")
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "done"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == -signal.SIGABRT
