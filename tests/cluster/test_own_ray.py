"""A Ray that a run starts for itself: all of it ends with the run. `make test-ray` tries a cluster of several nodes."""

from __future__ import annotations
import subprocess
from pathlib import Path
import psutil
from tests.e2e.run_commands import command, until_step, variables


def test_nothing_is_left_when_the_run_is_killed(run_yaml: Path) -> None:
    words = command(run_yaml, "launch=ray", "rollout.workers=2", "trainer.total_steps=100000")
    with subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        until_step(process, 1)
        family = psutil.Process(process.pid).children(recursive=True)
        assert {"raylet", "gcs_server"} <= {each.name() for each in family}
        assert len(family) > 6
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
