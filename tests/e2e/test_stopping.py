"""The command `areal-lite train` when it is interrupted, or loses its server or one of its ranks."""

from __future__ import annotations
import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
import aiohttp
import psutil
import pytest
from aiohttp import web
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from tests.e2e.run_commands import until_step
from tests.fork_server import children as children_of
from tests.stub_server import StubThread

_JSON = {"Content-Type": "application/json"}
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(run_yaml: Path, *overrides: str, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            *launcher,
            "-m",
            "areal_lite",
            "train",
            str(run_yaml),
            "trainer.total_steps=100000",
            *overrides,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_in_time_without_partial_files(
    run_yaml: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    process = start(run_yaml)
    until_step(process, 2)
    children = children_of(process.pid, recursive=True)
    assert children
    sent = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - sent < 12
    assert process.returncode == code, errors
    assert not psutil.wait_procs(children, timeout=5)[1]
    run_dir = tmp_path / "runs" / "e2e" / "t"
    files = [run_dir / "metrics.jsonl", *run_dir.glob("*rollout/*/*.jsonl")]
    for file in files:
        text = file.read_text()
        assert text.endswith("\n")
        for line in text.split("\n")[:-1]:
            json.loads(line)
    for folder in (run_dir / "weights").glob("v*"):
        assert (folder / "manifest.json").exists()


def rank_process(launcher: subprocess.Popen[str], rank: str) -> psutil.Process:
    """Return the rank's process: the launcher starts them in order."""
    return sorted(children_of(launcher.pid), key=lambda one: one.pid)[int(rank)]


@pytest.mark.parametrize("asked", [pytest.param("everyone", marks=pytest.mark.slow), "rank 1"])
def test_ranks_stop_after_the_same_step_whichever_gets_the_signal(run_yaml: Path, tmp_path: Path, asked: str) -> None:
    """F35: a scheduler asks ranks and launcher, which passes it on to the ranks; by hand one may be asked alone."""
    saved = ["checkpoint.every_steps=100000", "eval_dataset=null", "save_model=false"]
    process = start(run_yaml, *saved, launcher=TWO_RANKS)
    until_step(process, 2)
    children = children_of(process.pid, recursive=True)
    assert len(children) == 4  # two ranks, a server, the writer of dumps
    ranks = [rank_process(process, rank) for rank in ("0", "1")]
    for one in [*ranks, process] if asked == "everyone" else ranks[1:]:
        one.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode
    assert errors.count("Traceback (most") == 1, errors  # the launcher's own
    assert not psutil.wait_procs(children, timeout=5)[1]

    run_dir = tmp_path / "runs" / "e2e" / "t"
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert checkpoint.name == f"step_{steps[-1]:08d}"
    config = load_config(run_yaml, [*saved, f"trainer.total_steps={steps[-1] + 1}"])
    assert run_training(config).steps == 1


def test_a_killed_rank_ends_the_run_and_leaves_no_server(run_yaml: Path) -> None:
    """F69."""
    process = start(run_yaml, launcher=TWO_RANKS)
    until_step(process, 1)
    children = children_of(process.pid, recursive=True)
    rank_process(process, "0").kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode
    assert "Signal 9 (SIGKILL)" in errors  # rank 1, which lost its peer, may have ended first
    assert not psutil.wait_procs(children, timeout=10)[1]


def test_a_port_in_use_is_an_error_before_the_model_loads(run_yaml: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start(run_yaml, f"server.port={port}")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 64
    assert str(port) in errors


class HangingProxy:
    """Passes requests on to a server, until :attr:`hangs`: then ``path`` never answers."""

    def __init__(self, address: str, path: str) -> None:
        self._address = address
        self._path = path
        self.hangs = False
        self.hung = threading.Event()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    async def _pass_on(self, request: web.Request) -> web.Response:
        if self.hangs and request.path == self._path:
            self.hung.set()
            await asyncio.Event().wait()
        url = f"{self._address}{request.path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url, data=await request.read(), headers=_JSON) as reply,
        ):
            return web.Response(status=reply.status, body=await reply.read())


@pytest.mark.parametrize(
    ("way", "path"), [("disk", "/update_weights_from_disk"), ("broadcast", "/update_weights_from_distributed")]
)
def test_a_signal_during_a_hung_weight_update_stops_the_run_in_time(
    run_yaml: Path, tiny_model: Path, way: str, path: str
) -> None:
    with EmbeddedServer(model_path=str(tiny_model), dtype="float32", num_threads=1, device="cpu") as server:
        proxy = HangingProxy(server.address, path)
        with StubThread(proxy) as listener:  # type: ignore[arg-type]
            changes = [f"rollout.addresses=[{listener.address}]", f"rollout.weight_update={way}"]
            process = start(run_yaml, *changes, "checkpoint.every_steps=100000")
            until_step(process, 2)
            proxy.hangs = True
            assert proxy.hung.wait(30)
            sent = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
            took = time.monotonic() - sent
            assert "still running" not in errors, errors
            assert process.returncode == 130, errors
            assert took < 12
    run_dir = run_yaml.parent / "runs" / "e2e" / "t"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{steps[-1]:08d}"
