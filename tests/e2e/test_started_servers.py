"""The servers that commands start: killed while a run goes on, killed too often, and started without a run."""

from __future__ import annotations
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
import psutil
import pytest
import yaml
from areal_lite.cli import main as cli
from tests.e2e.test_stopping import start, until_step
from tests.fork_server import children as children_of

FAKES = Path(__file__).parents[1] / "servers/programs/fake_packages"


def test_a_run_goes_on_when_its_server_is_killed(run_yaml: Path, tmp_path: Path) -> None:
    process = start(run_yaml, "trainer.total_steps=20", "eval_dataset=null", "rollout.request_retries=3")
    until_step(process, 2)
    (server,) = [one for one in children_of(process.pid) if "areal_lite.embedded" in one.cmdline()]
    server.kill()
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert errors.count("server embedded-0 was killed by signal 9, which the kernel sends when memory runs out") == 1
    assert errors.count("server embedded-0 is up again at") == 1
    run_dir = tmp_path / "runs/e2e/t"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps] == list(range(1, 21))
    # A restarted server has the newest weights, under their version; no episode was lost.
    assert max(record["train/engine_mismatch/log_prob_diff_max"] for record in steps) < 1e-3
    assert max(record["train/staleness_max"] for record in steps) == 0
    assert steps[-1]["episodes/failed"] == 0
    assert (run_dir / "logs/embedded-0.log").read_text().count("embedded server ready at") == 2


def test_a_server_that_dies_four_times_ends_the_run_with_75_and_its_log(
    run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["server.backend=sglang", f"server.env={{PYTHONPATH: {FAKES}}}", "server.args={fault: dies}"]
    assert cli.main(["rollout", str(run_yaml), *overrides]) == 75
    errors = capsys.readouterr().err
    assert "error: server sglang-0 was killed by signal 9, which the kernel sends when memory runs out" in errors
    assert "error: It ended 4 times within 10 minutes, so it is not restarted. " in errors
    assert "The end of " in errors  # before it, if its last start was not ready yet
    assert "logs/sglang-0.log:\nerror: {" in errors


def serve(model: Path, logs: Path, *options: str) -> subprocess.Popen[str]:
    """Start ``areal-lite serve``; stand-ins of SGLang and vLLM are installed."""
    always = ["--dtype=float32", "--num-threads=1", "--env", f"{{PYTHONPATH: {FAKES}}}", "--log-dir", str(logs)]
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_lite", "serve", str(model), *always, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"logs: {logs}\n"
    return process


@pytest.mark.parametrize(
    ("backend", "options"), [("sglang", ["--replicas=2", "--router=true"]), ("sglang", []), ("embedded", [])]
)
def test_serve_starts_servers_without_a_run(tiny_model: Path, tmp_path: Path, backend: str, options: list[str]) -> None:
    process = serve(tiny_model, tmp_path / "logs", "--backend", backend, *options)
    assert process.stdout is not None
    ready = shlex.split(process.stdout.readline())
    assert ready[:2] == ["ready:", f"rollout.backend={backend}"]
    settings = dict(setting.split("=", 1) for setting in ready[2:])
    addresses = yaml.safe_load(settings["rollout.addresses"])
    for address in addresses:
        assert urllib.request.urlopen(f"http://{address}/server_info").status == 200
        if backend == "embedded":
            body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://{address}/v1/chat/completions", body, headers)
            assert json.load(urllib.request.urlopen(request))["usage"]["completion_tokens"] <= 4
    assert len(addresses) == (2 if options else 1)
    assert bool(options) == ("rollout.router" in settings)
    if options:
        assert urllib.request.urlopen(f"http://{settings['rollout.router']}/workers").status == 200
    children = children_of(process.pid)
    assert len(children) == (3 if options else 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert not psutil.wait_procs(children, timeout=1)[1]
    assert (tmp_path / f"logs/{backend}-0.log").is_file()
    assert (tmp_path / "logs/router.log").is_file() == bool(options)


def test_ctrl_c_ends_servers_that_are_not_ready(tiny_model: Path, tmp_path: Path) -> None:
    process = serve(tiny_model, tmp_path / "logs", "--backend=sglang", "--args={fault: never ready}")
    log = tmp_path / "logs/sglang-0.log"
    until(lambda: log.exists() and log.stat().st_size > 0)
    (server,) = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=12)
    assert process.returncode == 130
    server.wait(1)


def until(happened: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)
