"""Programs that should begin in a fork do, which no other test would notice, and others begin as always."""

from __future__ import annotations
import os
import subprocess
import sys
from pathlib import Path
import pytest
from tests.fork_server import IN_A_FORK, ROOT

LOOK = "import sys; print(__name__, sys.argv[1:], 'torch' in sys.modules)\n"
THREADS = "import sys; print('torch' in sys.modules, sys.modules['torch'].get_num_threads())"


def variables(threads: str = "1") -> dict[str, str]:
    """Return the environment of this moment, which tests before may have changed."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize(("first_line", "forked"), [(IN_A_FORK, True), ("", False)])
def test_a_program_begins_in_a_fork_if_its_first_line_says_so(first_line: str, forked: bool, tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(first_line + LOOK)
    for program in (["-c", first_line + LOOK], [str(script)]):
        command = [sys.executable, *program, "a", "b"]
        done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=True)
        assert done.stdout == f"__main__ ['a', 'b'] {forked}\n"


def test_a_fork_has_the_threads_of_its_command() -> None:
    for threads in ("1", "3"):
        command = [sys.executable, "-c", IN_A_FORK + THREADS]
        done = subprocess.run(command, env=variables(threads), capture_output=True, text=True, check=True)
        assert done.stdout == f"True {threads}\n"


def test_the_ranks_of_torchrun_begin_in_forks(tmp_path: Path) -> None:
    script = tmp_path / "look.py"
    script.write_text(IN_A_FORK + LOOK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True)
    assert done.stdout == "__main__ [] True\n", done.stderr
