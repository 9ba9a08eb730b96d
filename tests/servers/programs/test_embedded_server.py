"""The child process starts, reports its address, ends with its parent, and its failures become errors there."""

from __future__ import annotations
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import fields
from pathlib import Path
import psutil
import pytest
from areal_lite.config.keys import describe_fields
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.__main__ import _child_parser, main, split_arguments
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.programs.embedded_server import EmbeddedServer, cpu_threads
from areal_lite.servers.programs.server_program import ServedModel

FAST = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(address + path) as answer:
        return bytes(answer.read())


def test_the_server_serves_logs_and_stops(tiny: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    server = EmbeddedServer(model_path=str(tiny), log_path=log, weight_version="3", max_running_requests=2, **FAST)
    with server:
        assert server.wait(0) is None
        info = json.loads(get(server.address, "/model_info"))
        assert (info["weight_version"], info["max_running_requests"], info["num_threads"]) == ("3", 2, 1)
        assert f"embedded server ready at {server.address} (model {tiny})" in log.read_text()
        pid = server.pid
        assert pid is not None
        assert os.getpgid(pid) == pid  # a group of its own
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*port 0"):
            EmbeddedServer(model_path=str(tiny), port=port)
    assert server.wait(0) == 0  # SIGTERM was enough
    with pytest.raises(ServerError, match="not running"):
        _ = server.address


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_setting_reaches_the_child_process(tiny: Path, deterministic: bool) -> None:
    server = EmbeddedServer(
        model_path=str(tiny),
        deterministic=deterministic,
        seed=3,
        weight_version="7",
        context_length=64,
        max_prefill_tokens=9,
        max_total_tokens=99,
        max_running_requests=5,
        **FAST,
    )
    arguments = vars(_child_parser().parse_args(server._command()[3:]))
    assert arguments.pop("ready_fd") is None
    config, served = split_arguments(arguments)
    assert config == EmbeddedServerConfig(**{f.name: getattr(server.config, f.name) for f in fields(config)})
    assert config != EmbeddedServerConfig()
    assert served == ServedModel(model_path=str(tiny), seed=3, weight_version="7", deterministic=deterministic)


def test_serve_help_has_a_text_for_every_setting_of_the_yaml_section() -> None:
    text = " ".join(_child_parser().format_help().split())
    for field in describe_fields(EmbeddedServerConfig):
        assert f"--{field.key.replace('_', '-')} VALUE {field.meaning} ({field.type}; default {field.default})" in text


def test_serve_reports_a_bad_setting(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tiny), "--port=70000", "--num-threads=-1"]) == ConfigError.exit_code
    errors = capsys.readouterr().err
    assert "port is '70000': it must be less than or equal to 65535. Port to listen on" in errors
    assert "num_threads is '-1'" in errors


def test_the_exit_of_a_killed_server_is_detected(tiny: Path) -> None:
    with EmbeddedServer(model_path=str(tiny), **FAST) as server:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait(20) == server.wait(0) == -signal.SIGKILL


def test_the_server_exits_if_its_parent_is_killed(tiny: Path) -> None:
    script = (
        "import sys, threading, time; from areal_lite.servers.programs.embedded_server import EmbeddedServer\n"
        f"server = EmbeddedServer(model_path={str(tiny)!r}, num_threads=1)\n"
        "starter = threading.Thread(target=server.start); starter.start(); starter.join()\n"  # that thread has ended
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(server.pid, flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        child.wait(20)


def test_bad_settings_fail_before_the_start(tiny: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    for content, message in (
        (None, "has no config.json"),
        ("config.json", "no \\*.safetensors"),
        ("model.safetensors", "no tokenizer"),
    ):
        if content is not None:
            (half / content).touch()
        with pytest.raises(ConfigError, match=message):
            EmbeddedServer(model_path=str(half))
    with pytest.raises(ConfigError, match="does not exist.*directory with config.json"):
        EmbeddedServer(model_path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="is a file"):
        EmbeddedServer(model_path=str(half / "config.json"))
    with pytest.raises(ConfigError, match="no setting 'contextlength'; it has host, port"):
        EmbeddedServer(model_path=str(tiny), contextlength=64)
    for broken in (
        {"dtype": "int8"},
        {"device": "tpu"},
        {"port": 70000},
        {"num_threads": -1},
        {"context_length": 1},
    ):
        with pytest.raises(ConfigError, match=next(iter(broken))):
            EmbeddedServer(model_path=str(tiny), **broken)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        with pytest.raises(ConfigError, match="cannot listen"):
            EmbeddedServer(model_path=str(tiny), port=held.getsockname()[1])


def test_errors_of_the_child_process_are_raised_in_the_parent(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="context_length is 999.*256 at most"):
        EmbeddedServer(model_path=str(tiny), context_length=999, **FAST).start()
    with pytest.raises(
        ConfigError, match=r"memory ran out for the KV .*: lower server.max_running_requests from 2000000"
    ):
        EmbeddedServer(model_path=str(tiny), max_running_requests=2_000_000_000, **FAST).start()
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "config.json").write_text("{}")
    server = EmbeddedServer(model_path=str(broken), **FAST)
    with pytest.raises(ServerError, match="ended with code 1 before it was ready. The end of its log:\n(.|\n)*Error"):
        server.start()
    assert server.wait(0) == 1


def test_an_unreachable_hub_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ConfigError,
        match="'areal-lite/no-such-model' is neither a directory nor in the cache of .* does not give it",
    ):
        EmbeddedServer(model_path="areal-lite/no-such-model", **FAST).start()


def test_threads_are_half_of_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: set(range(8))}.__getitem__)
    assert cpu_threads(EmbeddedServerConfig()) == 4
    assert cpu_threads(EmbeddedServerConfig(num_threads=3)) == 3
