"""What needs no Ray: the choice of a cluster, what a run reserves, what nodes must have, workers over TCP."""

from __future__ import annotations
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import InferenceEngineConfig
from areal_lite.cluster import ray_session
from areal_lite.cluster.node_actor import NodeActor, node_facts
from areal_lite.cluster.ray_places import bundles_of, can_fit, check_facts, rank_bundles
from areal_lite.cluster.ray_session import check_ray, choose_address, runtime_env
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RayConfig
from areal_lite.errors import ConfigError, EpisodeError, ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.rl_run import num_devices
from tests.cluster.tcp_place import TcpPlace
from tests.rollout.scripted import until
from tests.rollout.worker_episodes import Scripted
from tests.rollout.workers.test_worker_pool import alive, record_of, scalar
from tests.stub_server import StubThread

RAY_YAML = Path(__file__).parents[2] / "configs/ray.yaml"


@pytest.mark.parametrize(
    ("configured", "environment", "address", "why"),
    [
        ("10.0.0.2:6379", "10.0.0.3:6379", "10.0.0.2:6379", "which ray.address names"),
        (None, "head:6379", "head:6379", "which RAY_ADDRESS names"),
        ("[fd00::2]:6379", None, "[fd00::2]:6379", "which ray.address names"),
        ("local", "10.0.0.3:6379", "local", "as ray.address says"),
        (None, "local", "local", "as RAY_ADDRESS says"),
        (None, None, "local", "neither ray.address nor RAY_ADDRESS names a cluster"),
        (None, "", "local", "neither ray.address nor RAY_ADDRESS names a cluster"),
    ],
)
def test_the_cluster_is_the_one_that_somebody_named(
    configured: str | None, environment: str | None, address: str, why: str
) -> None:
    variables = {} if environment is None else {"RAY_ADDRESS": environment}
    chosen, line = choose_address(configured, variables)
    assert chosen == address
    assert line.endswith(why)


@pytest.mark.parametrize("address", ["auto", "10.0.0.2", "ray://10.0.0.2:10001", "a b:1", "10.0.0.2:6379/"])
def test_an_address_that_would_join_whatever_is_found_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"ray.address is '.*': name the head of the cluster as HOST:PORT"):
        choose_address(address, {})
    with pytest.raises(ConfigError, match="RAY_ADDRESS is"):
        choose_address(None, {"RAY_ADDRESS": address})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else object())
    with pytest.raises(ConfigError, match=r"Ray is not installed: run `pip install 'areal-lite\[ray\]'`"):
        check_ray(RayConfig())


def test_a_run_reserves_one_bundle_for_each_program() -> None:
    few = load_config(RAY_YAML, ["rollout.workers=1", "server.replicas=1", "server.num_threads=3"])
    assert bundles_of(few) == [("server-0", 3, 0)]
    many = load_config(
        RAY_YAML,
        ["rollout.workers=2", "server.replicas=2", "server.backend=sglang", "server.args={tp: 4}"]
        + ["server.num_threads=0", "cluster.n_gpus_per_node=8"],
    )
    roles = [("server-0", 1, 4), ("server-1", 1, 4), ("worker-0", 1, 0), ("worker-1", 1, 0)]
    assert bundles_of(many) == roles
    assert [bundle.resources for bundle in bundles_of(many)][1:3] == [{"CPU": 1, "GPU": 4}, {"CPU": 1}]
    gpus = {"both": (), "trainer": ("server.device=cpu",), "server": ("trainer.device=cpu",)}
    for who, changes in gpus.items():
        mixed = load_config(RAY_YAML, ["cluster.n_ranks=1", "cluster.n_gpus_per_node=1", *changes])
        assert [bundle.gpus for bundle in rank_bundles(mixed)] == [who != "server"], who
        assert bundles_of(mixed)[0].gpus == (who != "trainer"), who
        assert num_devices(mixed) == (1 if who == "trainer" else 2), who
    running = load_config(RAY_YAML, ["rollout.workers=2", "rollout.addresses=[127.0.0.1:1]"])
    assert [bundle.role for bundle in bundles_of(running)] == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("bundles", "nodes", "fits"),
    [
        ([{"CPU": 1}] * 4, [{"CPU": 2}, {"CPU": 2}], True),
        ([{"CPU": 1}] * 5, [{"CPU": 2}, {"CPU": 2}], False),  # together too many
        ([{"CPU": 3}], [{"CPU": 2}, {"CPU": 2}], False),  # one is larger than any node
        ([{"CPU": 1, "GPU": 1}], [{"CPU": 2}, {"GPU": 2}], False),
        ([{"CPU": 1, "GPU": 1}], [{"CPU": 1, "GPU": 1}], True),
        ([{"CPU": 1}], [], False),
    ],
)
def test_nodes_that_are_certainly_too_small_are_not_waited_for(
    bundles: list[dict[str, float]], nodes: list[dict[str, float]], fits: bool
) -> None:
    assert can_fit(bundles, nodes) is fits


def test_a_node_that_differs_is_refused_with_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    here = node_facts(str(tmp_path))
    assert here["folder"] == str(tmp_path)
    assert here["torch"].startswith("2.")
    check_facts(here, {"a": node_facts(str(tmp_path))})
    (tmp_path / "config.json").write_text("{ }")
    with pytest.raises(ConfigError, match=rf"^node b has config.json of {tmp_path} \w+, and this machine \w+: every"):
        check_facts(here, {"a": here, "b": node_facts(str(tmp_path))})
    with pytest.raises(ConfigError, match=r"^node b has torch 1.0, and this machine 2\."):
        check_facts(here, {"b": here | {"torch": "1.0"}})
    assert node_facts("org/model")["config.json of org/model"] == "none"


def engine_on(place: TcpPlace, stub: StubThread, stack: ExitStack) -> RemoteInfEngine:
    config = InferenceEngineConfig(backend="sglang", addresses=[stub.address], workers=2, group_size=2, seed=1)
    return stack.enter_context(RemoteInfEngine(config, places=lambda role: place))


def test_workers_over_tcp_give_the_groups_of_local_ones(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., Any], stack: ExitStack, tmp_path: Path
) -> None:
    stub = start_stub()
    scripts = ("ok", "two turns", "tensors", "reject", "raise")
    rows = [{"do": do, "ids": [1, n + 2], "reward": n} for n, do in enumerate(scripts)]
    local = start_engine(stub, workers=2, group_size=2, seed=1)
    remote = engine_on(TcpPlace(tmp_path / "log"), stub, stack)
    one, two = ([record_of(group) for group in engine.rollout_batch(rows, Scripted)] for engine in (local, remote))
    assert one == two
    pids = {scalar(group, "pid") for group in remote.rollout_batch([{}] * 4, Scripted)}
    assert len(pids) == 2
    remote.destroy()
    assert not any(map(alive, pids))


def test_a_worker_on_a_node_that_dies_is_named_with_its_node_and_started_again(
    start_stub: Callable[..., StubThread], stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_on(TcpPlace(tmp_path / "log"), start_stub(), stack)
    (victim, *_) = before = {int(scalar(g, "pid")) for g in engine.rollout_batch([{}] * 4, Scripted)}
    os.kill(victim, signal.SIGKILL)
    until(lambda: "starting it again" in caplog.text)
    assert f"(process {victim} on node n, log l) was ended by SIGKILL" in caplog.text
    until(lambda: len({scalar(g, "pid") for g in engine.rollout_batch([{}] * 4, Scripted)} - before) == 1)


@pytest.mark.parametrize(
    ("program", "timeout_s", "how"),
    [
        ("pass", 60.0, "ended before it connected"),
        ("import signal; signal.pause()", 0.01, "did not connect within 0.01 s"),
    ],
)
def test_a_worker_that_does_not_connect_is_an_error(
    start_stub: Callable[..., StubThread], stack: ExitStack, tmp_path: Path, program: str, timeout_s: float, how: str
) -> None:
    place = TcpPlace(tmp_path / "log", command=[sys.executable, "-S", "-c", program], timeout_s=timeout_s)
    with pytest.raises(
        EpisodeError,
        match=rf"could not be started \(process \d+ {how}\) .* 3 times in a row: its output on node n, log l",
    ):
        engine_on(place, start_stub(), stack)


WATCHED = """
import threading, time
from areal_lite.cluster import remote_program
from areal_lite.cluster.ray_session import _watch_head
from areal_lite.processes.child_process import ChildProcess

program = ChildProcess(["sleep", "1000"], environment=dict(), output=None)
remote_program._running.add(program)
print(program.pid, flush=True)
_watch_head({address!r}, threading.Event())
"""


def test_a_lost_head_ends_the_process_and_its_programs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head, ExitStack() as stack:
        command = [sys.executable, "-c", WATCHED.format(address=f"127.0.0.1:{head.getsockname()[1]}")]
        pipe = subprocess.PIPE
        watched = stack.enter_context(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        assert watched.stdout is not None
        pid = int(watched.stdout.readline())
        for _ in range(8):  # for longer than the head may be away
            head.accept()[0].close()
        assert watched.poll() is None
        head.close()
        said = watched.communicate()[1]
    assert watched.returncode == ServerError.exit_code
    assert "is lost: ending here; the same command resumes" in said
    assert not Path(f"/proc/{pid}").exists()


def test_only_paths_that_the_copy_of_the_folder_has_are_moved_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, copy = tmp_path / "main", tmp_path / "copy"
    (copy / "my code").mkdir(parents=True)
    (copy / "my code/agent.py").touch()
    monkeypatch.chdir(copy)
    actor = NodeActor(str(folder), is_copied=True)
    for text, moved in {
        f"{folder}": f"{copy}",
        f"{folder}/my code/agent.py": f"{copy}/my code/agent.py",
        f"--file={folder}/my code": f"--file={copy}/my code",
        f"{folder}/.venv/bin/python": f"{folder}/.venv/bin/python",
        f'["{folder}", "{folder}/.venv/lib"]': f'["{copy}", "{folder}/.venv/lib"]',
        f"{folder}:{folder}2:{folder}/my code": f"{copy}:{folder}2:{copy}/my code",
    }.items():
        assert actor._there(text) == moved


def test_a_copied_folder_is_without_what_no_node_needs_and_not_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in ((".git/objects", 4000), ("runs/a", 4000), ("data/rows", 900), ("mine.py", 100)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size))
    monkeypatch.setattr(ray_session, "MAX_COPIED", 1000)
    given = {"working_dir": str(tmp_path), "excludes": ["x"], "env_vars": {"A": "1"}}
    sent = runtime_env(RayConfig(runtime_env=given))
    assert sent == given | {"excludes": ["x", "/.git", "/.venv", "/runs"]}
    (tmp_path / "mine.py").write_bytes(bytes(101))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"and at most 0 are copied to the nodes; largest: data with 0 MiB, mine.py"):
        check_ray(RayConfig(runtime_env=given))
    assert runtime_env(RayConfig(runtime_env={"working_dir": "s3://a/b.zip"})) == {"working_dir": "s3://a/b.zip"}
    assert runtime_env(RayConfig()) == {}
