"""A run on Ray's own cluster of three nodes, all of them processes of this machine: `make test-ray`."""

from __future__ import annotations
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
import psutil
import pytest
from safetensors.numpy import load_file
from areal_lite.tools.verify.verify import check_run
from tests.e2e.run_commands import command, until_step, variables

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
TIMED = re.compile("seconds|timing/|perf/|per_second|ms_per|mfu|latency|/started|memory|rollout/lead|wait")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Return a cluster of three nodes with two CPUs each."""
    from ray.cluster_utils import Cluster

    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_timeout_ms": 1000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "_system_config": quick})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def train(run_yaml: Path, trial: str, *changes: str) -> tuple[Path, str]:
    """Return the run's folder, and what it said."""
    words = command(run_yaml, f"trial_name={trial}", "rollout.workers=2", *changes)
    done = subprocess.run(words, env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run_yaml.parent / "runs/e2e" / trial, done.stderr


def record_of(run: Path) -> tuple[Any, ...]:
    """Return all of a run that does not depend on time or place."""
    dumps = {}
    for file in sorted(run.glob("*rollout/*/*.jsonl")):
        lines = [json.loads(line) for line in file.read_bytes().splitlines()]
        for line in lines:
            del line["timings"]
            for turn in line["turns"]:
                for name in ("latency_s", "started", "server"):
                    turn.pop(name, None)
        dumps[file.relative_to(run)] = lines
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    numbers = [{k: v for k, v in r.items() if k.startswith("train/") and not TIMED.search(k)} for r in metrics]
    (weights,) = (run / "model").glob("*.safetensors")
    return dumps, numbers, {name: array.tobytes() for name, array in load_file(weights).items()}


def test_a_run_on_nodes_has_the_bits_of_a_local_one(run_yaml: Path, cluster: Any) -> None:
    local, _ = train(run_yaml, "local")
    remote, said = train(run_yaml, "ray", "launch=ray", "cluster.n_nodes=3", f"ray.address={cluster.address}")
    assert f"joining the Ray cluster at {cluster.address}, which ray.address names" in said
    for one, two in zip(record_of(local), record_of(remote), strict=True):
        assert one == two
    assert "embedded server ready" in (remote / "logs/embedded-0.log").read_text()
    assert {path.name for path in (remote / "logs").iterdir()} >= {"worker-0.log", "worker-1.log"}


def test_a_cluster_that_nobody_named_is_not_joined(run_yaml: Path, cluster: Any) -> None:
    _, said = train(run_yaml, "own", "launch=ray", "trainer.total_steps=1")
    assert "starting a Ray of this run alone: neither ray.address nor RAY_ADDRESS names a cluster" in said


def test_resources_that_do_not_exist_are_one_sentence_at_once(run_yaml: Path, cluster: Any) -> None:
    words = command(run_yaml, "launch=ray", f"ray.address={cluster.address}", "server.num_threads=5")
    done = subprocess.run(words, env=variables(), capture_output=True, text=True)
    assert done.returncode == 64
    (line,) = [line for line in done.stderr.splitlines() if "the run wants" in line]
    assert "the run wants 5 CPUs and 0 GPUs for server-0; the cluster has 3 nodes with 2 CPUs and 0 GPUs, 2" in line


def process_of(node: Any) -> int:
    """Return the process that a node of a cluster is."""
    return int(node.all_processes["raylet"][0].process.pid)


def programs_on_nodes(cluster: Any) -> list[psutil.Process]:
    """Return all processes of this package on the nodes of a cluster."""
    nodes = [psutil.Process(process_of(node)) for node in cluster.list_all_nodes()]
    below = [each for node in nodes for each in node.children(recursive=True)]
    return [each for each in below if "areal_lite" in words_of(each)]


def words_of(process: psutil.Process) -> str:
    """Return the command line of a process; nothing of one that has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def nodes_with(part: str, cluster: Any) -> set[int]:
    """Return the process of each node that runs a program whose command line has this part."""
    programs = [each for each in programs_on_nodes(cluster) if part in words_of(each)]
    return {parent.pid for each in programs for parent in each.parents() if parent.name() == "raylet"}


AGENT = """
from tests.e2e.agents import LetterAgent


class Agent(LetterAgent):
    def __init__(self, seen):
        self.seen = seen

    async def run(self, data, **extra_kwargs):
        with open(self.seen, "a") as file:
            file.write(__file__ + "\\n")
        return await super().run(data, **extra_kwargs)
"""


def test_a_copied_folder_has_the_workflow_that_nodes_run(run_yaml: Path, cluster: Any, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "copied_agent.py").write_text(AGENT)
    words = command(run_yaml, "launch=ray", "rollout.workers=2", "trainer.total_steps=1", "eval_dataset=null")
    words += [f"ray.address={cluster.address}", f"ray.runtime_env={{working_dir: {code}}}"]
    words += ["workflow=copied_agent.Agent", f"workflow_kwargs={{seen: {tmp_path / 'seen'}}}"]
    done = subprocess.run(words, env=variables(), cwd=code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = set((tmp_path / "seen").read_text().splitlines())
    assert files and all("runtime_resources" in file and file.endswith("copied_agent.py") for file in files)


def test_a_worker_on_a_node_that_is_lost_is_started_elsewhere(run_yaml: Path, cluster: Any) -> None:
    words = command(run_yaml, "launch=ray", "rollout.workers=2", "trainer.total_steps=8", "trial_name=lost")
    words += [f"ray.address={cluster.address}", "cluster.n_nodes=3"]
    with subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until_step(process, 3)
        nodes = {process_of(node): node for node in cluster.worker_nodes}
        lost = nodes_with("rollout.workers.worker_process", cluster) - nodes_with("areal_lite.embedded", cluster)
        cluster.remove_node(nodes[(lost & nodes.keys()).pop()], allow_graceful=False)
        _, said = process.communicate(timeout=300)
    cluster.add_node(num_cpus=2)
    assert process.returncode == 0, said
    assert re.search(r"worker-\d on node \S+ \(log \S+/logs/worker-\d.log\) is lost: ", said)
    assert "starting it again" in said
    run = run_yaml.parent / "runs/e2e/lost"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert [r["step"] for r in steps if "train/loss" in r] == list(range(1, 9))
    assert check_run(run).findings == []


def test_a_killed_rank_has_all_start_again_from_the_newest_checkpoint(run_yaml: Path, cluster: Any) -> None:
    ranks = ["launch=ray", "cluster.n_ranks=2", f"ray.address={cluster.address}", "checkpoint.every_steps=2"]
    ranks += ["trainer.total_steps=6"]
    whole, _ = train(run_yaml, "whole", *ranks)
    words = command(run_yaml, "rollout.workers=2", "trial_name=killed", *ranks)
    with subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until_step(process, 3)
        of_run = [each for each in psutil.process_iter() if "trial_name=killed" in words_of(each)]
        (victim,) = [each for each in of_run if each.environ().get("RANK") == "1"]
        victim.kill()
        _, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert re.search(r"rank-1 on node \S+, log \S+/logs/rank-1.log was ended by SIGKILL: all ranks start again", said)
    run = run_yaml.parent / "runs/e2e/killed"
    assert (run / "incarnation").read_text() == "2"
    assert record_of(run)[2] == record_of(whole)[2]
    assert check_run(run).findings == []


STATES = ("before_model", "after_model", "after_optimizer", "after_state", "after_files", "before_manifest")
STATES += ("after_manifest", "after_rename", "before_delete", "during_delete", "after_delete")
CRASHES = [f"checkpoint:{state}:2" for state in STATES]
CRASHES += [f"weights:{state}:4" for state in ("before_manifest", "after_rename", "during_delete", "after_delete")]
CRASHES += ["metrics:before_write:4", "metrics:after_write:4"]


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, bytes]:
    """Return a place for the weights of the run that nothing ends."""
    return {}


def six_steps(cluster: Any, *changes: str) -> list[str]:
    words = ["launch=ray", f"ray.address={cluster.address}", "trainer.total_steps=6", "rollout.weight_update=disk"]
    return [*words, "checkpoint={every_steps: 2, keep: 1}", "eval_dataset=null", *changes]


def check_weights(run_yaml: Path, trial: str, cluster: Any, uninterrupted: dict[str, bytes]) -> None:
    """Check that a run has the weights of one that nothing ended, and that its folder is sound."""
    if not uninterrupted:
        whole, _ = train(run_yaml, "whole", *six_steps(cluster))
        uninterrupted.update(record_of(whole)[2])
    run = run_yaml.parent / "runs/e2e" / trial
    assert record_of(run)[2] == uninterrupted
    assert check_run(run).findings == []


@pytest.mark.parametrize("crash", CRASHES)
def test_a_rank_killed_in_the_midst_of_a_file_leaves_the_weights_of_an_uninterrupted_run(
    run_yaml: Path, cluster: Any, uninterrupted: dict[str, bytes], crash: str
) -> None:
    words = command(run_yaml, "trial_name=crashed", "rollout.workers=2", *six_steps(cluster, "cluster.n_ranks=1"))
    done = subprocess.run(words, env=variables(AREAL_LITE_CRASH_AT=crash), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "was ended by SIGKILL: all ranks start again" in done.stderr
    check_weights(run_yaml, "crashed", cluster, uninterrupted)


@pytest.mark.parametrize("crash", CRASHES)
def test_a_driver_killed_in_the_midst_of_a_file_leaves_no_program_and_resumes(
    run_yaml: Path, cluster: Any, uninterrupted: dict[str, bytes], crash: str
) -> None:
    words = command(run_yaml, "trial_name=driver", "rollout.workers=2", *six_steps(cluster))
    done = subprocess.run(words, env=variables(AREAL_LITE_CRASH_AT=crash), capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = programs_on_nodes(cluster)
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    train(run_yaml, "driver", *six_steps(cluster))
    check_weights(run_yaml, "driver", cluster, uninterrupted)


@pytest.mark.parametrize("crash", CRASHES)
def test_a_server_killed_meanwhile_is_started_again_and_the_weights_are_those_of_an_uninterrupted_run(
    run_yaml: Path, cluster: Any, uninterrupted: dict[str, bytes], crash: str, tmp_path: Path
) -> None:
    victim, pipe = tmp_path / "victim", subprocess.PIPE
    os.mkfifo(victim)  # the run waits at the crash point for the server's id
    words = command(run_yaml, "trial_name=served", "rollout.workers=2", *six_steps(cluster))
    env = variables(AREAL_LITE_CRASH_AT=crash, AREAL_LITE_CRASH_VICTIM=str(victim))
    with subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        until_step(process, 1)
        (server,) = [each for each in programs_on_nodes(cluster) if "areal_lite.embedded" in words_of(each)]
        victim.write_text(str(server.pid))
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert re.search(r"server embedded-0 on node \S+ \(log \S+/logs/embedded-0.log\) was killed by signal 9", said), (
        said
    )
    check_weights(run_yaml, "served", cluster, uninterrupted)


@pytest.mark.parametrize("crash", CRASHES)
def test_a_head_killed_meanwhile_ends_all_programs_and_the_same_command_resumes(
    run_yaml: Path, cluster: Any, uninterrupted: dict[str, bytes], crash: str, tmp_path: Path
) -> None:
    from ray.cluster_utils import Cluster

    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    victim, pipe = tmp_path / "victim", subprocess.PIPE
    victim.write_text(str(own.head_node.all_processes["gcs_server"][0].process.pid))
    words = command(run_yaml, "rollout.workers=2", "trial_name=head", *six_steps(own))
    env = variables(AREAL_LITE_CRASH_AT=crash, AREAL_LITE_CRASH_VICTIM=str(victim))
    with subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        until_step(process, 1)
        programs = programs_on_nodes(own)
        assert len(programs) == 3
        _, said = process.communicate(timeout=120)
    assert process.returncode in (0, 75), said  # 0 if its last steps were done before it missed the head
    _, alive = psutil.wait_procs(programs, timeout=5)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    own.shutdown()
    train(run_yaml, "head", *six_steps(cluster))
    check_weights(run_yaml, "head", cluster, uninterrupted)


def test_a_lost_head_ends_all_programs_and_the_same_command_resumes(run_yaml: Path) -> None:
    from ray.cluster_utils import Cluster

    own = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    words = command(run_yaml, "launch=ray", "rollout.workers=2", "trial_name=head", "checkpoint.every_steps=1")
    words += ["trainer.total_steps=1000", f"ray.address={own.address}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=variables(), stdout=pipe, stderr=pipe, text=True) as process:
        until_step(process, 2)
        programs = programs_on_nodes(own)
        assert len(programs) == 3
        own.head_node.all_processes["gcs_server"][0].process.kill()
        _, said = process.communicate(timeout=30)
    assert process.returncode == 75, said
    assert f"the head of the Ray cluster at {own.address} is lost: ending here; the same command resumes" in said
    _, alive = psutil.wait_procs(programs, timeout=5)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    own.shutdown()
    run, _ = train(run_yaml, "head", "checkpoint.every_steps=1", "trainer.total_steps=8")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert max(steps) >= 8
    assert check_run(run).findings == []


def test_servers_on_nodes_are_served_until_a_signal(tiny_model: Path, cluster: Any) -> None:
    words = [sys.executable, "-m", "areal_lite", "serve", str(tiny_model), "--launch=ray", "--replicas=2"]
    words += [f"--ray-address={cluster.address}"]
    with subprocess.Popen(words, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("ready:"))
        addresses = re.findall(r"[\d.]+:\d+", ready)
        assert len(addresses) == 2
        for address in addresses:
            with urllib.request.urlopen(f"http://{address}/model_info", timeout=30) as answer:
                assert answer.status == 200
        process.terminate()
        process.wait(30)


def test_a_sweep_makes_its_runs_on_several_nodes(run_yaml: Path, cluster: Any) -> None:
    words = [sys.executable, "-m", "areal_lite", "sweep", str(run_yaml), "--seeds=3", "launch=ray", "cluster.n_nodes=2"]
    words += [f"ray.address={cluster.address}", "trainer.total_steps=1"]
    done = subprocess.run(words, env=variables(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = sorted(run_yaml.parent.glob("runs/e2e/*-seed*"))
    assert len(runs) == 3
    assert all((run / "finished.yaml").exists() and (run / "logs/run.log").exists() for run in runs)
