"""Where an agent runs: inline, in a thread or in a process; and who notices that it blocks the event loop."""

from __future__ import annotations
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
import anthropic
import pytest
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.agent_processes import pickled_agent, run_in_process
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.trajectory import Group
from areal_lite.errors import ConfigError
from areal_lite.processes.call_pool import CallPool
from areal_lite.processes.sandbox import ProcessLimits
from tests.agents.isolated_agents import (
    MESSAGES,
    AsyncAgent,
    BlockingAgent,
    Bystander,
    Hanging,
    OneConversation,
    PlainAgent,
    ProgramAgent,
    Reader,
    RecordingAgent,
    Unloadable,
)
from tests.agents.isolation.conftest import Start, gone, wait_until
from tests.fork_server import IN_A_FORK

ISOLATIONS = pytest.mark.parametrize("isolation", ["thread", "process"])


class BlockingAnthropicAgent:
    """Uses another sync SDK inside its coroutine."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 if the call answers."""
        with anthropic.Anthropic() as client:
            client.messages.create(model="m", max_tokens=5, messages=MESSAGES)
        return 1.0


def end_of(group: Group) -> str:
    return group.status if group.failure is None else group.failure.summary


@ISOLATIONS
@pytest.mark.parametrize("agent", [AsyncAgent, BlockingAgent, PlainAgent])
def test_agents_work_in_threads_and_processes(
    start: Start, isolation: str, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(isolation)
    groups = engine.rollout_batch([{}] * 3, agent)
    assert [end_of(group) for group in groups] == ["accepted"] * 3
    reward = 0.5 if agent is PlainAgent else 1.0
    assert [t.reward for group in groups for t in group.trajectories] == [reward] * 3
    assert all(group.trajectories[0].sequences for group in groups)
    facts = {"acc": 1.0, "pred": "yes"} if agent is PlainAgent else {}
    assert [group.trajectories[0].reward_extra for group in groups] == [facts] * 3
    assert not [record for record in caplog.records if "blocks the event loop" in record.message]


@ISOLATIONS
def test_numbers_that_an_agent_records_are_metrics(start: Start, isolation: str) -> None:
    engine = start(isolation)
    engine.rollout_batch([{"number": 1}, {"number": 3}, {"number": 50, "do": "raise"}], RecordingAgent)
    assert engine.take_scalars()["rollout/number"] == 2


@ISOLATIONS
def test_an_exception_comes_back_with_its_class_text_and_traceback(start: Start, isolation: str) -> None:
    groups = start(isolation).rollout_batch([{"do": "raise"}, {"do": "own error"}, {}], PlainAgent)
    assert [end_of(group) for group in groups] == [
        "ZeroDivisionError: the agent's own bug",
        "OwnError: a class of its own",
        "accepted",
    ]
    for group in groups[:2]:
        assert group.failure is not None and "in run" in group.failure.traceback


def test_a_process_that_dies_fails_its_episode_alone(start: Start) -> None:
    groups = start("process", processes=1).rollout_batch([{"do": "exit"}, {}], PlainAgent)
    assert "agent PlainAgent: its worker process died (exit code" in end_of(groups[0])
    assert end_of(groups[1]) == "accepted"


@ISOLATIONS
def test_an_agent_that_awaits_ends_when_its_episode_is_stopped(start: Start, isolation: str, tmp_path: Path) -> None:
    engine = start(isolation)
    pid = tmp_path / "pid"
    engine.submit({"wait": str(pid)}, AsyncAgent)
    wait_until(lambda: pid.exists() and pid.read_text() != "")
    engine.destroy()
    counts = engine.export_stats()
    assert (counts["cancelled"], counts["abandoned"]) == (1, 0)
    assert engine.rollout_metrics().get("abandoned_threads", 0) == 0
    if isolation == "process":
        assert int(pid.read_text()) != os.getpid()
        wait_until(lambda: gone(int(pid.read_text())))


def test_the_process_of_a_cancelled_episode_is_killed_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    row = {"path": str(path)}
    access = AgentAccess(base_url="http://x/v1", anthropic_base_url="http://x", api_key="k", http_client=None)

    async def play() -> None:
        processes, context = CallPool(1), EpisodeContext()
        hanging = asyncio.create_task(run_in_process(processes, pickled_agent(Hanging()), row, access, context))
        await asyncio.to_thread(wait_until, lambda: path.exists() and path.read_text() != "")
        waiting = asyncio.create_task(run_in_process(processes, pickled_agent(Reader()), row, access, context))
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert await waiting == 0.5
        for _ in range(2):
            with pytest.raises(LookupError, match="no such model folder"):
                await run_in_process(processes, pickled_agent(Unloadable()), row, access, context)
        assert await run_in_process(processes, pickled_agent(Reader()), row, access, context) == 0.5
        processes.close()

    asyncio.run(play())
    wait_until(lambda: gone(int(path.read_text())))


def test_a_thread_that_does_not_end_is_left_behind_counted_and_named(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start("thread", faults={"episode_timeout_s": 3})
    (group,) = engine.rollout_batch([{"do": "hang"}], PlainAgent)
    assert "episode_timeout_s" in end_of(group)
    assert engine.rollout_metrics()["abandoned_threads"] == 1
    (record,) = [record for record in caplog.records if "left behind" in record.message]
    assert "PlainAgent, task 0" in record.message and "isolated_agents.py:" in record.message


def test_what_cannot_be_isolated_is_refused_with_the_fix(start: Start) -> None:
    class Nested:
        async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
            return 1.0

    with pytest.raises(ConfigError, match="agent Nested cannot be sent to a process.*agents.isolation: thread"):
        pickled_agent(Nested())
    with pytest.raises(ConfigError, match="not async.*or set rollout.agents.isolation: thread"):
        start().rollout_batch([{}], PlainAgent)


@pytest.mark.parametrize("agent", [BlockingAgent, BlockingAnthropicAgent])
def test_a_sync_client_that_waits_for_the_loop_it_blocks_fails_with_the_reason(
    start: Start, agent: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    began = time.monotonic()
    (group,) = engine.rollout_batch([{}], agent)
    assert time.monotonic() - began < 20  # alone it takes 1.5 s
    assert group.failure is not None
    assert group.failure.type == ("InternalServerError" if agent is BlockingAgent else "ServiceUnavailableError")
    for part in (
        f"{agent.__name__}.run blocks the event loop",
        f"{agent.__module__.rpartition('.')[2]}.py:",
        "isolation: thread",
    ):
        assert part in group.failure.message
    wait_until(lambda: engine.rollout_metrics()["blocked_s"] > 1)
    (record,) = [record for record in caplog.records if "blocks the event loop" in record.message]
    assert record.levelno == logging.WARNING


def test_a_blocked_loop_is_named_and_serves_the_others_later(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start()
    groups = engine.rollout_batch([{"sleep": 2.5}, *[{}] * 5], OneConversation)
    assert [end_of(group) for group in groups] == ["accepted"] * 6
    record = next(record for record in caplog.records if "blocks the event loop" in record.message)
    assert "OneConversation.run" in record.message and "await an async call" in record.message
    wait_until(lambda: engine.rollout_metrics()["blocked_s"] > 1)


def test_a_call_of_another_episode_waits_for_a_blocked_loop_and_is_answered(start: Start) -> None:
    groups = start().rollout_batch([{"n": 0}, {"n": 1}], Bystander)
    assert [end_of(group) for group in groups] == ["accepted"] * 2
    assert Bystander.answers == [200]


def test_an_agents_processes_die_with_the_run_even_while_they_compute(tmp_path: Path) -> None:
    code = f"""{IN_A_FORK}
import asyncio
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.agent_processes import pickled_agent, run_in_process
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.processes.call_pool import CallPool
from tests.agents.isolated_agents import Hanging
async def main():
    processes, agent, context = CallPool(2), pickled_agent(Hanging()), EpisodeContext()
    access = AgentAccess(base_url="http://x/v1", anthropic_base_url="http://x", api_key="k", http_client=None)
    rows = [dict(path={str(tmp_path)!r} + "/" + name) for name in "ab"]
    await asyncio.gather(*(run_in_process(processes, agent, row, access, context) for row in rows))
asyncio.run(main())
"""
    runner = subprocess.Popen([sys.executable, "-c", code])
    files = [tmp_path / "a", tmp_path / "b"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    runner.kill()
    runner.wait()
    wait_until(lambda: all(gone(int(file.read_text())) for file in files))


# -- programs ---------------------------------------------------------------------------------


CALL = (
    "from openai import OpenAI; c = OpenAI().chat.completions.create(model='m', messages="
    "[{'role': 'user', 'content': 'hi'}]); print(c.id)"
)


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_a_program_calls_the_model_without_arguments_and_its_output_is_kept(start: Start, isolation: str) -> None:
    engine = start(isolation)
    (group,) = engine.rollout_batch([{"command": [sys.executable, "-c", CALL], "call": False}], ProgramAgent)
    (trajectory,) = group.trajectories
    (process,) = trajectory.processes
    assert (group.status, trajectory.reward, process.returncode) == ("accepted", 1.0, 0), process.stderr
    assert process.stdout.startswith("chatcmpl-") and not process.timed_out


def run_one(start: Start, *command: str, **options: Any) -> Any:
    (group,) = start().rollout_batch([{"command": list(command), "options": options}], ProgramAgent)
    assert group.status == "accepted", end_of(group)
    return group.trajectories[0].processes[0]


def test_a_program_sees_few_variables_and_a_folder_of_its_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hidden")
    monkeypatch.setenv("MY_FLAG", "shown")
    process = run_one(start, "sh", "-c", "env; pwd; ls -A; touch x", inherit=["MY_FLAG"], variables={"A": "1"})
    lines = process.stdout.split()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {
        "PATH", "HOME", "LANG", "MY_FLAG", "A", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY",
        "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY",
        "GOOGLE_API_KEY",
    }  # fmt: skip
    folder = lines[-1]
    assert f"HOME={folder}" in lines and folder != str(Path.cwd())
    wait_until(lambda: not Path(folder).exists())


def test_the_last_64_kib_of_each_output_are_kept(start: Start) -> None:
    process = run_one(
        start, sys.executable, "-c", "import sys; print('a' * 200_000 + 'b'); print('c', file=sys.stderr)"
    )
    assert len(process.stdout) == 64 * 1024 and process.stdout.endswith("aab\n")
    assert process.stderr == "c\n"


GRANDCHILD = "sleep 1000 & echo $! > {pid}; echo started; {then}"


def test_a_program_leaves_no_process_behind_when_it_ends(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    process = run_one(start, "sh", "-c", GRANDCHILD.format(pid=pid, then="exit 4"))
    assert (process.returncode, process.stdout) == (4, "started\n")
    wait_until(lambda: gone(int(pid.read_text())))


DAEMON = """
import os, sys, time
for _ in range(2):
    if os.fork():
        time.sleep({life})
        sys.exit(4)
    os.setsid()
with open({pid!r}, "w") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep(1000)
"""
"""A program whose grandchild is in a session of its own; at the end an orphan."""


def test_a_daemon_is_killed_when_its_program_ends(start: Start, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = DAEMON.format(pid=str(pid), life=1)
    assert run_one(start, sys.executable, "-c", code).returncode == 4
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_a_daemon_is_killed_when_its_episode_is_stopped(start: Start, tmp_path: Path, isolation: str) -> None:
    pid = tmp_path / "pid"
    engine = start(isolation)
    engine.submit({"command": [sys.executable, "-c", DAEMON.format(pid=str(pid), life=1000)]}, ProgramAgent)
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    engine.destroy()
    wait_until(lambda: gone(int(pid.read_text())))


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_a_program_is_killed_with_its_children_when_its_episode_is_stopped(
    start: Start, tmp_path: Path, isolation: str
) -> None:
    pid = tmp_path / "pid"
    row = {"command": ["sh", "-c", GRANDCHILD.format(pid=pid, then="sleep 1000")]}
    engine = start(isolation, dump_to_file=True)
    engine.submit(row, ProgramAgent)
    wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    engine.destroy()
    wait_until(lambda: gone(int(pid.read_text())))
    (dump,) = tmp_path.glob("*/*/rollout/*/0.jsonl")
    line = json.loads(dump.read_text())
    assert line["status"] == "cancelled"
    if isolation != "process":  # a killed process answers nothing
        (process,) = line["processes"]
        assert process["timed_out"] and process["returncode"] == -signal.SIGKILL
        assert process["command"] == row["command"] and "seconds" in process


def test_a_program_is_killed_at_its_own_timeout_and_by_its_limits(start: Start) -> None:
    process = run_one(start, "sleep", "1000", timeout_s=0.5)
    assert process.timed_out and process.returncode == -signal.SIGKILL
    process = run_one(start, "sh", "-c", "while :; do :; done", limits=ProcessLimits(cpu_s=1))
    assert not process.timed_out and process.returncode in (-signal.SIGKILL, -signal.SIGXCPU)
    big = "open('x', 'wb').write(bytes(2_000_000))"
    process = run_one(start, sys.executable, "-c", big, limits=ProcessLimits(file_bytes=1_000_000))
    assert process.returncode != 0 and "File too large" in process.stderr
    huge = "bytearray(500_000_000)"
    process = run_one(start, sys.executable, "-c", huge, limits=ProcessLimits(memory_bytes=200_000_000))
    assert process.returncode != 0 and "MemoryError" in process.stderr


def test_a_program_that_does_not_exist_is_named(start: Start) -> None:
    (group,) = start().rollout_batch([{"command": ["no-such-program"]}], ProgramAgent)
    assert "FileNotFoundError: no program 'no-such-program'" in end_of(group)


def test_a_program_dies_with_the_process_that_ran_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import asyncio
from areal_lite.agents.isolation.agent_access import AgentAccess
access = AgentAccess(base_url="", anthropic_base_url="", api_key="", http_client=None)
asyncio.run(access.run_process(["sh", "-c", {GRANDCHILD.format(pid=pid, then="sleep 1000")!r}]))
"""
    runner = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: pid.exists() and pid.read_text().strip() != "")
    runner.kill()
    runner.wait()
    wait_until(lambda: gone(int(pid.read_text())))
