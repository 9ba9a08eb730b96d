"""Processes that an agent starts with subprocess or asyncio end with their episode."""

from __future__ import annotations
import os
import signal
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.agents.isolation import episode_processes
from tests.agents.isolated_agents import LateStart, Leaving, OneConversation, shown
from tests.agents.isolation.conftest import Start, gone, wait_until

SHOW = "import os, signal, sys, time; file = open({pid!r}, 'w'); print(os.getpid(), file=file, flush=True)\n"
STUBBORN = "import signal; [signal.signal(each, signal.SIG_IGN) for each in (15, 1, 2)]\n" + SHOW + "time.sleep(1000)"
DAEMON = "import os\nfor _ in range(2):\n    if os.fork(): os._exit(0)\n    os.setsid()\n" + SHOW + "time.sleep(1000)"
GRANDCHILD = """import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session=True)
time.sleep(1000)"""
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # nobody waits for them, on purpose
WAYS = pytest.mark.parametrize(
    ("isolation", "how"),
    [
        *(("inline", how) for how in ("Popen", "asyncio", "shell", "executor")),
        *((isolation, how) for isolation in ("thread", "process") for how in ("Popen", "asyncio")),
    ],
)


def row(pid: Path, code: str, how: str, **fields: Any) -> dict[str, Any]:
    return {"command": [sys.executable, "-c", code], "how": how, "pid": str(pid), **fields}


@pytest.fixture(autouse=True)
def warn_again() -> None:
    episode_processes._named.clear()


@WAYS
def test_a_daemon_that_ignores_signals_ends_with_its_episode(
    start: Start,
    tmp_path: Path,
    isolation: str,
    how: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pid = tmp_path / "pid"
    code = STUBBORN.partition("\n")[0] + "\n" + DAEMON.format(pid=str(pid))
    (group,) = start(isolation).rollout_batch([row(pid, code, how)], Leaving)
    assert group.status == "accepted", group.failure
    wait_until(lambda: gone(int(pid.read_text())))
    assert "still ran when its episode ended, and was killed" in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_a_grandchild_in_its_own_session_ends_when_its_episode_is_stopped(
    start: Start, tmp_path: Path, isolation: str
) -> None:
    pid = tmp_path / "pid"
    engine = start(isolation)
    engine.submit(row(pid, GRANDCHILD.format(child=STUBBORN.format(pid=str(pid))), "asyncio", hang=True), Leaving)
    wait_until(lambda: shown(pid))
    engine.destroy()
    wait_until(lambda: gone(int(pid.read_text())))


def test_an_episode_ends_its_own_processes_and_names_them(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pids = [tmp_path / name for name in "abc"]
    rows = [
        row(pids[0], STUBBORN.format(pid=str(pids[0])), "Popen"),
        row(pids[1], STUBBORN.format(pid=str(pids[1])), "Popen", hang=True),
        row(pids[2], STUBBORN.format(pid=str(pids[2])), "shared"),
    ]
    engine = start()
    engine.submit(rows[1], Leaving)
    wait_until(lambda: shown(pids[1]))
    assert [group.status for group in engine.rollout_batch([rows[0], rows[2]], Leaving)] == ["accepted"] * 2
    wait_until(lambda: gone(int(pids[0].read_text())))
    assert not gone(int(pids[1].read_text()))
    assert not gone(int(pids[2].read_text()))  # it belongs to no episode
    (record,) = [each for each in caplog.records if "still ran" in each.message]
    assert "python" in record.message and "end it in run()" in record.message
    engine.destroy()
    wait_until(lambda: gone(int(pids[1].read_text())))
    os.kill(int(pids[2].read_text()), signal.SIGKILL)


def test_programs_that_fill_every_thread_of_the_loop_are_ended(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    engine = start(faults={"episode_timeout_s": 5})
    (group,) = engine.rollout_batch([row(pid, STUBBORN.format(pid=str(pid)), "waits in threads")], Leaving)
    assert group.failure is not None and "episode_timeout_s" in group.failure.summary
    wait_until(lambda: gone(int(pid.read_text())))


def test_code_that_outlives_its_episode_starts_no_process(start: Start) -> None:
    (group,) = start().rollout_batch([{}], LateStart)
    assert group.status == "accepted"
    wait_until(lambda: len(LateStart.errors) == 1)
    assert LateStart.errors.pop() == "the episode has ended: its code must start no more processes"


def test_an_episode_that_starts_nothing_looks_at_no_process(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_processes, "_kill", lambda marks: pytest.fail("looked"))
    assert [group.status for group in start().rollout_batch([{}] * 3, OneConversation)] == ["accepted"] * 3
    assert not episode_processes._ended
