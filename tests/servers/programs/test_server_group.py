"""Servers that a run starts: their command lines, their deaths, and what is left of them.

Real processes; packages named sglang and vllm stand in for the real ones, in front of the stub server.
"""

from __future__ import annotations
import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
import psutil
import pytest
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.config.server_config import ServerConfig
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.errors import ConfigError, ServerError
from areal_lite.processes.place import HERE
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs import server_group
from areal_lite.servers.programs.server_group import ServerGroup, check_servers, make_servers
from areal_lite.servers.programs.server_process import ServerProcess
from areal_lite.servers.programs.server_program import ServedModel, gpu_groups, visible_gpus
from tests.fork_server import IN_A_FORK

FAKES = str(Path(__file__).parent / "fake_packages")
ENV = {"PYTHONPATH": FAKES}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake servers need none; tests that name some make them up."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")


class CountingGroup(ServerGroup):
    """Counts the ends of servers, once they are launched again, and the restarts that succeeded."""

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        super().__init__(servers)
        self.downs, self.ups = threading.Semaphore(0), threading.Semaphore(0)

    def _mark_down(self, server: ServerProcess, cause: str, *, restart: bool) -> bool:
        restarted = super()._mark_down(server, cause, restart=restart)
        self.downs.release()
        return restarted

    def _mark_up(self, server: ServerProcess, former: str) -> None:
        super()._mark_up(server, former)
        self.ups.release()

    def until_up(self) -> None:
        """Return once a server that ended is up again; each time is counted once."""
        assert self.ups.acquire(timeout=60)


def servers(tmp_path: Path, *, adapters: AdapterShape | None = None, **settings: Any) -> CountingGroup:
    config = ServerConfig(**{"backend": "sglang", "env": ENV, **settings})
    check_servers(config)
    model = ServedModel(model_path="a/model", seed=5, adapters=adapters)
    return CountingGroup(make_servers(config, model, tmp_path / "servers"))


@contextmanager
def attached_engine(group: ServerGroup, backend: Any = "sglang", **settings: Any) -> Iterator[RemoteInfEngine]:
    config = InferenceEngineConfig(backend=backend, addresses=group.addresses, request_retries=2, **settings)
    with RemoteInfEngine(config) as engine:
        group.attach(engine)
        try:
            yield engine
        finally:
            group.attach(None)


def generate(engine: RemoteInfEngine) -> ModelResponse:
    request = ModelRequest(input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=4))
    return asyncio.run(engine.agenerate(request))


def started_with(log: Path) -> dict[str, Any]:
    """Return what the newest start wrote to the log: arguments and environment."""
    lines = [line for line in log.read_text().splitlines() if line.startswith('{"arguments"')]
    started: dict[str, Any] = json.loads(lines[-1])
    return started


def kill(group: ServerGroup, number: int = 0) -> None:
    """End a server at once; return when it has ended, so that its listener takes no more connections."""
    pid = group._servers[number].pid
    assert pid is not None
    ended = os.pidfd_open(pid)
    signal.pidfd_send_signal(ended, signal.SIGKILL)
    select.select([ended], [], [])
    os.close(ended)


def test_work_is_done_while_servers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (server,) = made = servers(tmp_path)._servers
    waited, pids = server.wait_until_ready, list[int]()

    def work() -> None:
        assert server.pid is not None
        pids.append(server.pid)
        if len(pids) == 2:
            raise KeyboardInterrupt

    def wait() -> None:
        assert len(pids) == 1
        waited()

    monkeypatch.setattr(server, "wait_until_ready", wait)
    with ServerGroup(made, meanwhile=work):
        assert psutil.pid_exists(pids[0])
    with pytest.raises(KeyboardInterrupt), ServerGroup(made, meanwhile=work):
        pass
    assert not any(map(psutil.pid_exists, pids))


def test_sglang_gets_the_flags_that_the_engine_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # torchrun's, for the trainer
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    args = {"tp": 2, "mem_fraction_static": 0.8, "enable_metrics": True, "no_shuffle": False, "json": {"a": [1]}}
    with servers(tmp_path, args=args, dtype="float32", context_length=64, num_threads=3, env=ENV | {"A": "b"}) as group:
        started = started_with(tmp_path / "servers/sglang-0.log")
        (address,) = group.addresses
    arguments, environment = started["arguments"], started["environment"]
    pairs = dict(zip(arguments, arguments[1:], strict=False))
    port = int(address.removeprefix("http://127.0.0.1:"))
    assert 20000 <= port < 32000
    expected = {
        "--model-path": "a/model", "--port": str(port), "--host": "127.0.0.1",
        "--dtype": "float32", "--context-length": "64", "--random-seed": "5", "--weight-version": "0",
        "--tp": "2", "--mem-fraction-static": "0.8", "--json": '{"a": [1]}',
    }  # fmt: skip
    assert {name: pairs[name] for name in expected} == expected
    assert {"--incremental-streaming-output", "--enable-metrics"} < set(arguments)
    assert not any("shuffle" in word or "device" in word for word in arguments)
    assert (environment["A"], environment["OMP_NUM_THREADS"]) == ("b", "3")
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert not {"RANK", "TORCHELASTIC_USE_AGENT_STORE", "SGLANG_RETURN_ORIGINAL_LOGPROB"} & environment.keys()


def test_vllm_gets_its_flags_the_extension_and_the_version(tmp_path: Path) -> None:
    with (
        servers(tmp_path, backend="vllm", args={"enable_prefix_caching": False}) as group,
        attached_engine(group, "vllm") as engine,
    ):
        started = started_with(tmp_path / "servers/vllm-0.log")
        assert "version 0" in (tmp_path / "servers/vllm-0.log").read_text().splitlines()
        assert set(generate(engine).output_versions) == {0}
        kill(group)
        assert set(generate(engine).output_versions) == {0}
    arguments = started["arguments"]
    pairs = dict(zip(arguments, arguments[1:], strict=False))
    expected = {
        "--model": "a/model", "--seed": "5", "--dtype": "auto",
        "--logprobs-mode": "processed_logprobs", "--worker-extension-cls": "areal_lite_vllm.WorkerExtension",
    }  # fmt: skip
    assert {name: pairs[name] for name in expected} == expected
    assert {"--enable-scale-out", "--no-enable-prefix-caching"} < set(arguments)
    assert "--max-model-len" not in arguments
    assert started["has_extension"]
    assert started["environment"]["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    ("backend", "settings", "flags"),
    [
        ("sglang", {}, "--enable-lora --max-lora-rank 12 --lora-target-modules o_proj q_proj"),
        ("sglang", {"device": "cpu"}, "--lora-target-modules o_proj q_proj --lora-backend torch_native"),
        ("vllm", {}, "--enable-lora --max-lora-rank 16 --max-loras 4 --max-cpu-loras 16"),
        ("vllm", {"args": {"max_loras": 2}}, "--enable-lora --max-lora-rank 16 --max-loras 2"),
    ],
)
def test_servers_are_started_for_the_adapters_of_the_run(
    tmp_path: Path, backend: str, settings: dict[str, Any], flags: str
) -> None:
    shape = AdapterShape(12, ("o_proj", "q_proj"))
    with servers(tmp_path, backend=backend, adapters=shape, **settings):
        started = started_with(tmp_path / f"servers/{backend}-0.log")
    assert flags in " ".join(started["arguments"])
    allowed = started["environment"].get("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    assert allowed == ("1" if backend == "vllm" else None)


def test_a_started_router_gets_the_servers_and_comes_back_after_its_death(tmp_path: Path) -> None:
    with servers(tmp_path, replicas=2, router=True) as group, attached_engine(group, router=group.router) as engine:
        assert [generate(engine).output_len for _ in range(4)] == [4] * 4
        assert engine.server_metrics()["router/requests"] == 4
        kill(group, 2)
        assert generate(engine).output_len == 4
        group.until_up()
        assert generate(engine).output_len == 4
    (started,) = [line for line in (tmp_path / "servers/router.log").read_text().splitlines() if '"arguments"' in line][
        :1
    ]
    assert {"--policy=manual", "--disable-retries"} < set(json.loads(started)["arguments"])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"args": {"dtype": "half"}}, "server.args sets 'dtype', which comes from server.dtype: set server.dtype"),
        ({"args": {"model_path": "m"}}, "sets 'model_path', which comes from model_path"),
        ({"args": {"--context-length": 9}}, "which comes from server.context_length"),
        ({"args": {"weight_version": "3"}}, "sets 'weight_version', whose value the engine needs to be its own"),
        ({"args": {"incremental_streaming_output": False}}, "sets 'incremental_streaming_output', whose value"),
        ({"args": {"api_key": "k"}}, "sets 'api_key', whose value"),
        ({"backend": "vllm", "args": {"logprobs_mode": "raw_logprobs"}}, "sets 'logprobs_mode', whose value"),
        ({"backend": "vllm", "args": {"no_enable_scale_out": True}}, "sets 'no_enable_scale_out', whose value"),
        ({"env": {**ENV, "CUDA_VISIBLE_DEVICES": "1"}}, "server.env sets CUDA_VISIBLE_DEVICES"),
        ({"max_running_requests": 3}, "server.max_running_requests is a setting of the embedded server"),
        ({"env": {}}, f"sglang, which is not installed for {sys.executable}: run `{sys.executable} -m pip install"),
        ({"python": "no/python"}, "server.python is 'no/python', which cannot be run .No such file"),
        ({"backend": "embedded", "args": {"tp": 2}}, "server.args is for sglang and vllm"),
        ({"backend": "vllm", "router": True}, "server.router is an sglang-router, and server.backend is vllm"),
        ({"backend": "embedded", "router": True}, "server.router is an sglang-router, and server.backend is embedded"),
    ],
)
def test_settings_that_contradict_the_engine_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        servers(tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(tmp_path: Path) -> None:
    group = servers(tmp_path, args={"fault": "exits"}, replicas=2)
    with pytest.raises(ServerError) as failed, group:
        pass
    message = str(failed.value)
    assert message.startswith("server sglang-0 ended with code 1 before it was ready. The end of ")
    heading, *lines = message.splitlines()
    assert heading.endswith("servers/sglang-0.log:")
    assert lines == [f"line {number}" for number in range(20, 50)]
    assert [server.wait(0) is not None for server in group._servers] == [True, True]


def test_a_server_that_never_answers_is_an_error_at_the_time_limit(tmp_path: Path) -> None:
    group = servers(tmp_path, args={"fault": "never ready"}, start_timeout_s=3)
    with pytest.raises(ServerError, match="server sglang-0 was not ready after 3 s.*raise start_timeout_s"), group:
        pass
    assert group._servers[0].wait(0) is not None


def test_a_killed_server_comes_back_with_the_newest_weights_and_answers_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with servers(tmp_path) as group, attached_engine(group) as engine:
        addresses = group.addresses
        assert set(generate(engine).output_versions) == {0}
        engine.update_weights_from_disk("weights/v00000003", 3)
        kill(group)
        assert set(generate(engine).output_versions) == {3}
        assert group.addresses == addresses
        group.until_up()
        kill(group)
        engine.update_weights_from_disk("weights/v00000004", 4)
        assert engine.get_version() == 4
        assert set(generate(engine).output_versions) == {4}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    down, up = [text for text in warnings if "sglang-0" in text][:2]
    assert "was killed by signal 9, which the kernel sends when memory runs out" in down
    assert down.endswith("Restarting it")
    assert up == f"server sglang-0 is up again at {addresses[0]}"


def test_a_server_on_a_node_is_named_with_its_node_and_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(HERE), "node", " on node n")
    with servers(tmp_path) as group:
        kill(group)
        group.until_up()
    name = f"server sglang-0 on node n (log {group._servers[0].log_path})"
    assert [text.startswith(name) for text in caplog.messages if "sglang-0" in text][-2:] == [True, True]


def test_the_other_servers_answer_while_one_is_restarted(tmp_path: Path) -> None:
    with servers(tmp_path, replicas=2) as group, attached_engine(group) as engine:
        for _ in range(2):
            kill(group, 0)
            assert generate(engine).output_len == 4
            group.until_up()


def test_the_fourth_death_ends_the_calls_that_wait_and_all_later_ones(tmp_path: Path) -> None:
    with servers(tmp_path) as group, attached_engine(group) as engine:
        for _ in range(3):
            kill(group)
            group.until_up()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                engine.wait(1, timeout=60)  # nothing was submitted
            except ServerError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        kill(group)
        waiting.join(20)
        assert not waiting.is_alive()
        (error,) = errors
        assert "server sglang-0 was killed by signal 9" in str(error)
        assert "It ended 4 times within 10 minutes" in str(error)
        assert "servers/sglang-0.log:\n" in str(error)
        for call in (lambda: generate(engine), lambda: engine.update_weights_from_disk("w", 1), group.wait_for_failure):
            with pytest.raises(ServerError, match="It ended 4 times"):
                call()


def test_deaths_far_apart_are_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_group, "RESTART_WINDOW_S", 0.0)
    with servers(tmp_path) as group:
        for _ in range(5):
            kill(group)
            group.until_up()


def test_restarts_that_fail_count_however_long_they_take(tmp_path: Path) -> None:
    with servers(tmp_path) as group, attached_engine(group) as engine:
        server: Any = group._servers[0]
        server._model = replace(server._model, model_path="broken")
        kill(group)
        with pytest.raises(ServerError, match="sglang-0 ended with code 1 before it was ready(.|\n)*It ended 4 times"):
            generate(engine)


def test_a_server_that_cannot_be_started_again_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(output: object) -> None:
        raise OSError("cannot allocate memory")

    with servers(tmp_path) as group, attached_engine(group) as engine:
        monkeypatch.setattr(group._servers[0], "_launch", no_memory)
        kill(group)
        with group._changed:
            assert group._changed.wait_for(lambda: group._failure, timeout=60)
        with pytest.raises(ServerError, match="by signal 9(.|\n)*It cannot be started again: cannot allocate memory"):
            generate(engine)


def test_a_group_can_be_stopped_while_a_server_is_restarted(tmp_path: Path) -> None:
    with servers(tmp_path, args={"fault": "slow"}) as group:
        kill(group)
        assert group.downs.acquire(timeout=20)
        began = time.monotonic()
    assert time.monotonic() - began < server_group.STOP_SECONDS + 2
    assert group._servers[0].wait(0) is not None


def child_of(log: Path) -> psutil.Process:
    (line,) = (line for line in log.read_text().splitlines() if line.startswith('{"child"'))
    return psutil.Process(json.loads(line)["child"])


def test_a_dead_servers_own_processes_are_killed(tmp_path: Path) -> None:
    with servers(tmp_path, args={"fault": "has a child"}) as group:
        left = child_of(tmp_path / "servers/sglang-0.log")
        kill(group)
        left.wait(10)


def test_nothing_is_left_when_the_run_is_killed(tmp_path: Path) -> None:
    script = (
        f"{IN_A_FORK}import sys; from pathlib import Path\n"
        "from tests.servers.programs.test_server_group import servers\n"
        f"with servers(Path({str(tmp_path)!r}), args={{'fault': 'has a child'}}) as group:\n"
        "    print(group._servers[0].pid, flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    ) as run:
        assert run.stdout is not None
        server = psutil.Process(int(run.stdout.readline()))
        child = child_of(tmp_path / "servers/sglang-0.log")
        run.kill()
        assert not psutil.wait_procs([server, child], timeout=10)[1]


def test_replicas_share_the_last_gpus_by_tensor_parallel_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert gpu_groups(ServerConfig(replicas=2, args={"tensor_parallel_size": 2})) == ["4,5", "6,7"]
    assert gpu_groups(ServerConfig()) == ["7"]
    assert gpu_groups(ServerConfig(device="cpu", replicas=2)) == [None, None]
    with pytest.raises(ConfigError, match="server.replicas is 3 with 4 GPUs each, and this machine shows 8"):
        gpu_groups(ServerConfig(replicas=3, args={"tp": 4}))
    with pytest.raises(ConfigError, match="the tensor parallel size 'two'"):
        gpu_groups(ServerConfig(args={"tp": "two"}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nprintf 'GPU 0: H100 (UUID: GPU-1)\\n  MIG 1g Device 0: (UUID: M)\\nGPU 1: H100 (UUID: GPU-2)\\n'"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ["0", "1"]
