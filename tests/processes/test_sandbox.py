"""Sandboxes: escape attempts fail in one and succeed outside; each program gets its own box; docker by its command."""

from __future__ import annotations
import asyncio
import dataclasses
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any
import pytest
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.api.trajectory import ProcessRecord
from areal_lite.config.rollout_config import AgentsConfig
from areal_lite.environments.environment_process import box_around
from areal_lite.errors import ConfigError
from areal_lite.processes import sandbox
from areal_lite.processes.sandbox import ProcessLimits, boxed, check_sandbox
from areal_lite.tools.doctor.doctor_sandbox import ATTEMPTS, escapes, sandbox_findings

NO_LIMITS = ProcessLimits(cpu_s=None, memory_bytes=None, file_bytes=None, processes=None)
NEEDS_BUBBLEWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap")
NEEDS_DOCKER = pytest.mark.skipif("AREAL_LITE_DOCKER_IMAGE" not in os.environ, reason="set AREAL_LITE_DOCKER_IMAGE")


def access(kind: str = "bubblewrap") -> AgentAccess:
    return AgentAccess(base_url="u", anthropic_base_url="u", api_key="k", http_client=None, sandbox=kind)


def run(*command: str, kind: str = "bubblewrap", **options: Any) -> ProcessRecord:
    return asyncio.run(access(kind).run_process(command, **options))


def run_python(code: str, *arguments: str, **options: Any) -> ProcessRecord:
    return run(sys.executable, "-c", f"import os, socket, sys, time\n{code}", *arguments, **options)


@pytest.mark.slow
def test_without_a_sandbox_every_attempt_escapes() -> None:
    """Else an attempt that is wrong would count as one that fails."""
    assert asyncio.run(escapes("none", NO_LIMITS)) == list(ATTEMPTS)


@NEEDS_BUBBLEWRAP
def test_no_attempt_escapes_from_bubblewrap() -> None:
    (finding,) = sandbox_findings("bubblewrap")
    assert finding.level == "ok"
    assert all(attempt in finding.text for attempt in ATTEMPTS)


@NEEDS_BUBBLEWRAP
def test_a_verifier_after_an_agent_gets_a_box_of_its_own(tmp_path: Path) -> None:
    leave = """
if not os.fork():
    os.setsid()
    while True: time.sleep(0.01); open("/tmp/left", "a").close(); open("alive", "a").write("x")
open("answer", "w").write("4")
while not os.path.exists("alive"): time.sleep(0.01)
"""
    assert run_python(leave, cwd=str(tmp_path)).returncode == 0
    size = (tmp_path / "alive").stat().st_size
    found = run("sh", "-c", "cat answer; ls -A /tmp /var/tmp /dev/shm; ls /proc | grep -c '^[0-9]'", cwd=str(tmp_path))
    assert found.stdout.startswith("4") and "left" not in found.stdout
    assert int(found.stdout.split()[-1]) < 8
    assert (tmp_path / "alive").stat().st_size == size


@NEEDS_BUBBLEWRAP
def test_a_box_shows_programs_but_not_the_home_the_working_directory_or_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here, tools = tmp_path / "home", tmp_path / "home" / "run", tmp_path / "home" / "python" / "bin"
    for folder in (here, tools):
        folder.mkdir(parents=True)
    (home / ".netrc").write_text("secret")
    (here / "rows.jsonl").write_text("secret")
    (tools / "python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sandbox.sys, "executable", str(tools / "python"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/socket")
        listener.listen()
        look = "for path in sys.argv[1:]: print(os.listdir(path) if os.path.exists(path) else None)"
        paths = [home, here, tools, "/run", f"{tmp_path}/socket", "/usr/lib", "."]
        done = run_python(look, *map(str, paths))
    seen = done.stdout.splitlines()
    assert [seen[index] for index in (0, 1, 2, 3, 4, 6)] == [
        "['python', 'run']",
        "[]",
        "['python']",
        "[]",
        "None",
        "[]",
    ]
    assert len(seen[5]) > 100


@NEEDS_BUBBLEWRAP
def test_a_box_has_no_privileges_and_its_limits_count_for_what_is_in_memory_too() -> None:
    look = "grep CapEff /proc/self/status; ulimit -u; ulimit -t; df --output=size -B1 /tmp /run /dev/shm; touch /dev/x"
    done = run("bash", "-c", look, limits=ProcessLimits(memory_bytes=2**28, processes=77, cpu_s=9))
    assert done.stdout.split() == ["CapEff:", "0" * 16, "77", "9", "1B-blocks", *[str(2**28)] * 3]
    assert "Read-only file system" in done.stderr


@NEEDS_BUBBLEWRAP
def test_a_program_with_network_reaches_the_model_and_one_without_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        call = f"socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 5)"
        assert run_python(call).returncode != 0
        assert run_python(call, limits=ProcessLimits(network=True)).returncode == 0


@NEEDS_BUBBLEWRAP
def test_a_box_ends_with_its_program_and_at_its_time_limit() -> None:
    done = run_python("os._exit(5)")
    assert (done.returncode, done.timed_out) == (5, False)
    done = run_python("time.sleep(1000)", timeout_s=0.3)
    assert (done.returncode, done.timed_out) == (-9, True)


@NEEDS_BUBBLEWRAP
def test_a_box_that_grows_too_large_is_ended_and_says_why() -> None:
    forks = "for _ in range(30): os.fork() or time.sleep(1000)\ntime.sleep(1000)"
    done = run_python(forks, limits=ProcessLimits(processes=20))
    assert done.returncode != 0
    assert "killed: the limit of this sandbox is 20 processes" in done.stderr or "BlockingIOError" in done.stderr
    takes = """
for _ in range(4):
    if not os.fork():
        kept = os.urandom(2**20) * 40
        time.sleep(1000)
time.sleep(1000)"""
    done = run_python(takes, limits=ProcessLimits(memory_bytes=100 * 2**20))
    assert (done.returncode, done.stderr) == (
        -9,
        f"killed: the limit of this sandbox is {100 * 2**20} bytes of memory\n",
    )


@NEEDS_BUBBLEWRAP
def test_a_server_in_a_box_reads_what_the_run_imports_and_writes_nothing(tmp_path: Path) -> None:
    look = "import areal_lite, numpy, sys; open('/dev/null'); open('escaped', 'w')"
    box = box_around(access(), sys.executable)
    done = asyncio.run(
        access("none").run_process([*box, sys.executable, "-c", look], variables={"PYTHONPATH": ":".join(sys.path)})
    )
    assert "Read-only file system" in done.stderr and not Path("escaped").exists()
    assert box_around(None) == box_around(access("none")) == []
    with pytest.raises(ConfigError, match="docker:x: only bubblewrap"):
        box_around(access("docker:x"))


def test_a_sandbox_that_does_not_start_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sandbox("none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"sandbox is 'bubblewrap', and no box starts.*'bwrap'.*apt-get install bubblew"
    ):
        check_sandbox("bubblewrap")
    with pytest.raises(
        ConfigError, match=r"'docker:x:1', and no box starts.*'docker'.*Install docker, start its daemon"
    ):
        check_sandbox("docker:x:1")
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho No permissions to create new namespace >&2; exit 1")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(
        ConfigError, match="no box starts: No permissions to create new namespace. .*unprivileged_userns"
    ):
        check_sandbox("bubblewrap")


def test_other_words_are_no_sandbox() -> None:
    for word in ("docker", "docker:", "firejail", "bubblewrap:x"):
        with pytest.raises(ValueError, match="sandbox"):
            AgentsConfig(sandbox=word)
    assert AgentsConfig(sandbox="docker:python:3.11-slim").sandbox.endswith("slim")


LIMITED = ProcessLimits(cpu_s=7, memory_bytes=2**30, file_bytes=2**20, processes=99)


def test_the_command_of_docker_has_every_limit_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    variables = {"PATH": "/bin", "HOME": "/work", "KEY": "s3"}
    command, watch = boxed("docker:python:3.11", ["python3", "-V"], "/work", variables, LIMITED)
    assert command[:2] == ["docker", "run"] and command[-3:] == ["python:3.11", "python3", "-V"]
    options = command[2:-3]
    (name,) = (option.removeprefix("--name=") for option in options if option.startswith("--name="))
    assert {*options} == {
        *("--rm", "--interactive", "--init", "--read-only", f"--name={name}", "--network=none", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", f"--user={os.getuid()}:{os.getgid()}", "--pids-limit=99"),
        *(f"--memory={2**30}", f"--memory-swap={2**30}", f"--ulimit=fsize={2**20}", "--ulimit=cpu=7"),
        *(f"--tmpfs=/tmp:size={2**30}", "--volume=/work:/work", "--workdir=/work", "--env=HOME", "--env=KEY"),
    }
    assert watch == ({}, [], ["docker", "rm", "--force", name])
    free, _ = boxed("docker:x", ["a"], "/work", {}, dataclasses.replace(NO_LIMITS, network=True))
    assert {"--network=host", "--tmpfs=/tmp:size=0"} <= {*free}
    assert not [option for option in free if option.startswith(("--ulimit", "--memory", "--pids"))]
    monkeypatch.setenv("DOCKER_HOST", "unix:///x")
    command, (*_, at_end) = boxed("docker:x", ["a"], "/work", {}, LIMITED)
    assert command[:3] == [*at_end[:2], "run"] == ["docker", "--host=unix:///x", "run"]


def test_a_container_is_removed_however_its_program_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program named docker that writes its arguments down and does not run a container."""
    log = tmp_path / "log"
    (tmp_path / "docker").write_text(
        f"#!/bin/sh\necho $* KEY $KEY >> {log}\necho noise\ncase $* in *hang) sleep 1000;; esac\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    done = run("only-in-the-image", kind="docker:x", variables={"KEY": "s3"})
    assert (done.returncode, done.stdout, done.command) == (0, "noise\n", ["only-in-the-image"])

    def begun() -> None:
        while len(log.read_text().splitlines()) < 3:
            time.sleep(0.01)

    async def stopped() -> None:
        hanging = asyncio.create_task(access("docker:x").run_process(["hang"], variables={"KEY": "s3"}))
        await asyncio.to_thread(begun)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging

    asyncio.run(stopped())
    lines = [line.partition(" KEY ") for line in log.read_text().splitlines()]
    assert [arguments.split()[0] for arguments, *_ in lines] == ["run", "rm", "run", "rm"]
    assert all(key == "s3" and "s3" not in arguments for arguments, _, key in lines)
    for (started, *_), (removed, *_) in zip(lines[::2], lines[1::2], strict=True):
        assert f"--name={removed.split()[-1]} " in started


@NEEDS_DOCKER
def test_no_attempt_escapes_from_docker() -> None:
    (finding,) = sandbox_findings(f"docker:{os.environ['AREAL_LITE_DOCKER_IMAGE']}")
    assert finding.level == "ok"
