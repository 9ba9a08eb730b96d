"""Runs as a user starts them: commands in processes of their own."""

from __future__ import annotations
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def command(run_yaml: Path, *changes: str) -> list[str]:
    return [sys.executable, "-m", "areal_lite", "train", str(run_yaml), "trainer.deterministic=true", *changes]


def variables(**changed: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, "PYTHONPATH": str(REPOSITORY), **changed}


def until_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step:>4}  reward"):
            return
    raise AssertionError(process.stderr and process.stderr.read())
