"""An engine whose agents run inline, in threads or in processes, and what tests wait for."""

from __future__ import annotations
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.agents.scripted_engine import tokenizer
from tests.fork_server import IN_A_FORK
from tests.stub_server import StubServer, StubThread

Start = Callable[..., RemoteInfEngine]


@pytest.fixture(scope="module", autouse=True)
def forks() -> None:
    """Wait for the server of forks here, since it may take longer than a loop of episodes may be blocked."""
    subprocess.run([sys.executable, "-c", IN_A_FORK], check=True)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def start(tokenizer_path: str, tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        stub = stack.enter_context(StubThread(StubServer()))

        def make(isolation: str = "inline", processes: int | None = None, **kwargs: Any) -> RemoteInfEngine:
            config = InferenceEngineConfig(
                backend="sglang",
                addresses=[stub.address],
                tokenizer_path=tokenizer_path,
                fileroot=str(tmp_path),
                agents={"isolation": isolation, "processes": processes},  # type: ignore[arg-type]
                **kwargs,
            )
            return stack.enter_context(RemoteInfEngine(config))

        yield make


def gone(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
