"""Episodes in worker processes end as they do in one process, whatever happens to a worker."""

from __future__ import annotations
import asyncio
import gc
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.api import EpisodeStatus, InferenceEngineConfig, ModelRequest
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import Group, TokenSequence, Trajectory
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.processes import child_process
from areal_lite.processes.channel import encode_reply, framed, read_message
from areal_lite.processes.child_process import PickledObject, pickled_object
from areal_lite.rollout import garbage_collection, workflow_context
from areal_lite.rollout.episodes import group_runner
from areal_lite.rollout.episodes.workflow_resolution import pickled_workflow
from areal_lite.rollout.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from areal_lite.rollout.workers import worker as workers
from areal_lite.rollout.workers import worker_pool
from areal_lite.rollout.workers.messages import RESPONSE_FIELDS, pack_end, read_end, read_report, request
from areal_lite.rollout.workers.worker_process import WorkerProcess
from tests import fork_server
from tests.agents.isolated_agents import AsyncAgent, OneConversation, RecordingAgent
from tests.agents.scripted_engine import tokenizer
from tests.rollout.episodes.test_partial_rollout import hold, let_go
from tests.rollout.scripted import on_a_loop, until
from tests.rollout.worker_episodes import Hostile, Judged, OutOfReach, RunsCode, Scripted, number_of_tokens
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


SCRIPT = """
import sys
from areal_lite.api import InferenceEngineConfig, RolloutWorkflow
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine


class Raises(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        raise RuntimeError("it ran")


if __name__ == "__main__":
    with RemoteInfEngine(InferenceEngineConfig(addresses=[sys.argv[1]], workers=2, backend="sglang")) as engine:
        (group,) = engine.rollout_batch([{}], Raises)
        print(group.failure.message)
"""


class Port(OneConversation):
    """Records the port of its listener."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 after two calls."""
        workflow_context.record(port=int(extra_kwargs["base_url"].split(":")[2].split("/")[0]))
        return await super().run(data, **extra_kwargs)


def test_a_workflow_of_the_script_itself_runs_in_workers(start_stub: StartStub, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(fork_server.IN_A_FORK + SCRIPT)
    command = [sys.executable, str(script), start_stub().address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "it ran\n", done.stderr


def scalar(group: Group, name: str) -> float:
    """Return a number that the group's first episode recorded."""
    return dict(group.trajectories[0].scalars)[f"rollout/{name}"]


def alive(pid: float) -> bool:
    """Return whether a process runs."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{int(pid)}/status").read_text()
    except FileNotFoundError:
        return False


def record_of(group: Group) -> Any:
    """Return all of a group that does not depend on time or place."""

    def columns(part: Any, *names: str) -> list[Any]:
        values = [getattr(part, name) for name in names]
        return [value.tolist() if hasattr(value, "tolist") else value for value in values]

    return (
        *(group.task_id, group.status, group.data, group.rejection, group.start_version, group.head_version),
        group.failure and (group.failure.kind, group.failure.type, group.failure.message),
        [
            (
                *(t.member_idx, t.status, t.reward, t.counts, t.extras, t.failure and t.failure.message),
                [entry for entry in t.scalars if entry[0] != "rollout/pid"],
                [
                    columns(turn, "role", "parent", "start", "ids", "loss_mask", "logprobs", "versions", "stop_reason")
                    for turn in t.turns
                ],
                [
                    columns(s, "input_ids", "loss_mask", "logprobs", "versions", "reward", "path", "turn_idx")
                    for s in t.sequences
                ],
            )
            for t in group.trajectories
        ],
    )


def dumps_in(folder: Path) -> dict[str, Any]:
    """Return the lines of all dumps, without times and tracebacks."""
    files = {path.name: path.read_bytes().splitlines() for path in folder.rglob("rollout/*/*.jsonl")}
    records = {name: [json.loads(line) for line in lines] for name, lines in files.items()}
    for lines in records.values():
        for record in lines:
            del record["timings"], record["error"]
            for turn in record["turns"]:
                turn.pop("latency_s", None), turn.pop("started", None)
    return records


def test_groups_scalars_and_dumps_are_those_of_one_process(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", fork_server.RealPopen)
    stub = start_stub()
    scripts = ("ok", "two turns", "tensors", "reject", "raise", "exit", "self-cancel", "bad", "odd")
    rows = [{"do": do, "ids": [1, n + 2], "reward": n} for n, do in enumerate(scripts)]
    seen: list[Any] = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        engine = start_engine(
            stub, workers=number, dump_to_file=True, group_size=2, seed=1, experiment_name=folder.name
        )
        groups = engine.rollout_batch(rows, Scripted)
        numbers = engine.take_scalars()
        del numbers["rollout/pid"]
        failed = {name: value for name, value in engine.rollout_metrics().items() if "failed" in name}
        stats = engine.export_stats()
        engine.destroy()
        dumps = dumps_in(folder)
        assert len(dumps) == len(rows)
        seen.append(([record_of(group) for group in groups], numbers, failed, stats, dumps))
    for one, two in zip(*seen, strict=True):
        assert one == two
    assert {status for _, status, *_ in seen[0][0]} == {"accepted", "rejected", "failed"}
    (accepted, *_) = groups
    sequence, turn = accepted.trajectories[0].sequences[0], accepted.trajectories[0].turns[1]
    turn.loss_mask[:] = False
    assert not sequence.loss_mask.any()  # they share memory here too


def test_groups_run_in_all_workers_with_their_own_context(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), workers=2)
    engine.set_version(7)
    groups = engine.rollout_batch([{}] * 20, Scripted, group_size=3)
    assert {scalar(group, "pid") for group in groups}.isdisjoint({os.getpid()})
    assert len({scalar(group, "pid") for group in groups}) == 2
    for group in groups:
        assert [dict(t.scalars)["rollout/member"] for t in group.trajectories] == [0, 1, 2]
        assert (scalar(group, "version"), scalar(group, "engine_version")) == (7, 7)
    (held_out,) = engine.rollout_batch([{}], Scripted, is_eval=True)
    assert held_out.is_eval
    assert engine.take_scalars(is_eval=True)["eval-rollout/member"] == 0
    assert engine.take_scalars()["rollout/member"] == 1
    nested = engine.rollout_batch([{}], GroupedRolloutWorkflow(Scripted(), 3))  # it runs more than were drawn
    assert [t.member_idx for t in nested[0].trajectories] == [0, 1, 2]
    assert all(len(t.turns) == 2 for t in nested[0].trajectories)


def test_a_killed_worker_fails_its_own_groups_and_is_started_again(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(start_stub(), workers=2, consumer_batch_size=8, dump_to_file=True)
    before = {scalar(group, "pid") for group in engine.rollout_batch([{}] * 4, Scripted)}
    engine.set_version(3)
    hanging = [engine.submit({"do": "hang"}, Scripted) for _ in range(2)]
    dying = engine.submit({"do": "die", "mark": str(tmp_path / "mark")}, Scripted)
    ended = engine.wait(2, timeout=20)
    assert [group.status for group in ended] == ["failed"] * 2
    for group in ended:
        assert group.failure is not None
        assert group.failure.kind is FailureKind.WORKER
        assert "was ended by SIGKILL" in group.failure.message
    (other,) = {*hanging, dying} - {group.task_id for group in ended}
    until(lambda: "starting it again" in caplog.text)
    until(lambda: len({scalar(g, "pid") for g in engine.rollout_batch([{}] * 4, Scripted)}) == 2)
    groups = engine.rollout_batch([{}] * 4, Scripted)
    after = {scalar(group, "pid") for group in groups}
    assert len(after & before) == 1
    assert {scalar(group, "engine_version") for group in groups} == {3}
    with pytest.raises(TimeoutError, match="0 of 1"):
        engine.wait(1, timeout=0.01)
    ends: list[Group] = []
    engine._executor.ended.on_end = ends.append
    engine.destroy()
    assert [(group.task_id, group.status) for group in ends] == [(other, "cancelled")]
    assert not any(map(alive, before | after))


def test_signals_that_all_processes_of_a_job_get_leave_the_workers_to_the_run(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), workers=2)
    before = {scalar(group, "pid") for group in engine.rollout_batch([{}] * 4, Scripted)}
    for pid in before:
        os.kill(int(pid), signal.SIGINT)
        os.kill(int(pid), signal.SIGTERM)
    groups = engine.rollout_batch([{}] * 8, Scripted)
    assert {group.status for group in groups} == {"accepted"}
    assert {scalar(group, "pid") for group in groups} == before


def test_a_row_whose_worker_died_is_drawn_again(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), workers=2, consumer_batch_size=2, group_size=2)
    rows = [{"do": "die", "mark": str(tmp_path / "mark")}, {"do": "ok"}]
    batch = engine.prepare_batch(RolloutDataSourceWithBuffer(rows, SourceSettings(n_samples_per_prompt=2)), Scripted)
    assert {group.data["do"] for group in batch} == {"die", "ok"}
    assert engine.failures.metrics()["failed_episodes/worker"] >= 2


def test_calls_of_workers_that_died_end_on_the_server_and_new_groups_wait_for_their_successors(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, workers=2, consumer_batch_size=2)
    before = {scalar(group, "pid") for group in engine.rollout_batch([{}] * 4, Scripted)}
    hold(stub, lambda _: True)
    for _ in before:
        engine.submit({}, Scripted)
    stub.until_held(2)
    for pid in before:
        os.kill(int(pid), signal.SIGKILL)
    assert [group.failure and group.failure.kind for group in engine.wait(2, timeout=20)] == [FailureKind.WORKER] * 2
    until(lambda: not engine._client._calls)
    let_go(stub)
    assert [group.status for group in engine.rollout_batch([{}] * 2, Scripted)] == ["accepted"] * 2
    assert engine._workers is not None
    until(lambda: engine._workers is not None and len(engine._workers._workers) == 2)
    assert not any(worker._calls for worker in engine._workers._workers)


def test_workers_that_cannot_start_are_one_error(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub = start_stub()
    engine = start_engine(stub, workers=2)
    starts: list[str] = []

    def broken(module: str, _: int, **__: Any) -> list[str]:
        starts.append(module)
        return [sys.executable, "-c", "raise SystemExit(3)"]

    monkeypatch.setattr(child_process, "main_command", broken)
    with pytest.raises(
        EpisodeError, match=r"worker . \(process \d+\) ended with exit code 3 before it was ready, 3 times"
    ):
        start_engine(stub, workers=2)
    assert len(starts) == 2 * 3
    with pytest.raises(EpisodeError, match="before it was ready, 3 times in a row"):
        engine.rollout_batch([{"do": "die", "mark": str(tmp_path / "mark")}, {"do": "hang"}], Scripted)
    assert len(starts) == 3 * 3


NOT_READY = {
    "hangs": ("import signal; signal.pause()", "was ended by SIGKILL"),
    "hangs up": ("import os, signal; os.close({fd}); signal.pause()", "was ended by SIGKILL"),
    "returns": ("pass", "ended with exit code 0"),
    "leaves its connection": (
        "import subprocess; subprocess.Popen(['sleep', '3'], pass_fds=[{fd}], start_new_session=True)",
        "ended with exit code 0",
    ),
}


@pytest.mark.parametrize("how", NOT_READY)
def test_a_worker_that_does_not_get_ready_has_ended(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program, end = NOT_READY[how]
    monkeypatch.setattr(
        child_process, "main_command", lambda _, fd, **__: [sys.executable, "-S", "-c", program.format(fd=fd)]
    )
    monkeypatch.setattr(workers, {"hangs": "START_S", "hangs up": "CLOSE_S"}.get(how, "UNREAD_S"), 0.1)
    with pytest.raises(EpisodeError, match=f"{end} before it was ready, 3 times"):
        start_engine(start_stub(), workers=2)


def test_a_worker_that_ends_before_it_is_connected_leaves_no_connection(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = NOT_READY["leaves its connection"][0]
    monkeypatch.setattr(
        child_process, "main_command", lambda _, fd, **__: [sys.executable, "-S", "-c", program.format(fd=fd)]
    )
    read_from, transports = workers.messages.Reader.read_from, list[asyncio.WriteTransport]()

    async def read_late(reader: Any, connection: socket.socket) -> asyncio.WriteTransport:
        await reader._on_close.__self__.ended.wait()
        transports.append(await read_from(reader, connection))
        return transports[-1]

    monkeypatch.setattr(workers.messages.Reader, "read_from", read_late)
    with pytest.raises(EpisodeError, match="ended with exit code 0 before it was ready, 3 times"):
        start_engine(start_stub(), workers=2)
    assert len(transports) >= 3 and all(transport.is_closing() for transport in transports)


def test_a_worker_whose_program_is_missing_is_an_error(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "main_command", lambda *_, **__: ["/nowhere/python"])
    with pytest.raises(EpisodeError, match=r"worker . could not be started \(.*No such file.* 3 times"):
        start_engine(start_stub(), workers=2)


def time_to_close(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (workers, worker_pool):
        monkeypatch.setattr(module, "CLOSE_S", seconds)


def test_a_blocked_worker_is_killed_at_the_end(
    start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(group_runner, "CANCEL_GRACE_S", 0.05)
    time_to_close(monkeypatch, 0.05)
    engine = start_engine(start_stub(), workers=2)
    begun = tmp_path / "begun"
    engine.submit({"do": "block", "begun": str(begun)}, Scripted)
    until(lambda: begun.exists() and begun.read_text())
    engine.destroy()
    assert not alive(int(begun.read_text()))


def test_a_call_that_its_episode_gives_up_ends_on_the_server(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    hold(stub, lambda _: True)
    engine = start_engine(stub, workers=2)
    engine.submit({"do": "give up"}, Scripted)
    stub.until_held(2)  # that call, and the episode's next one
    until(lambda: len(engine._client._calls) == 1)
    let_go(stub)
    (group,) = engine.wait(1, timeout=10)
    assert group.status is EpisodeStatus.ACCEPTED


def test_stopped_episodes_clean_up_and_no_process_is_left(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_to_close(monkeypatch, 3600.0)  # none has to be killed
    engine = start_engine(start_stub(), workers=2, consumer_batch_size=2)
    for n in range(2):
        engine.submit({"do": "clean up", "begun": f"{tmp_path}/begun{n}", "mark": f"{tmp_path}/{n}"}, Scripted)
    until(lambda: all((tmp_path / f"begun{n}").exists() for n in range(2)))
    engine.destroy()
    pids = {int((tmp_path / str(n)).read_text()) for n in range(2)}
    assert len(pids) == 2 and not any(map(alive, pids))
    assert engine.export_stats()["cancelled"] == 2


def test_groups_stopped_as_they_start_end_at_once(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), workers=2, consumer_batch_size=40)
    for _ in range(40):
        engine.submit({"do": "hang"}, Scripted)
    engine.destroy()
    assert {name: count for name, count in engine.export_stats().items() if count} == {"cancelled": 40}


def test_paused_workers_send_no_request_and_resume(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    engine = start_engine(stub, workers=2, consumer_batch_size=2)
    engine.rollout_batch([{}] * 2, Scripted)
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    asked = stub.server.seen["generate"]
    engine.submit({"do": "two turns"}, Scripted)
    stub.until_held(1)
    engine.pause()
    engine.submit({}, Scripted)
    stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
    assert engine.wait(1, timeout=0.3, raise_timeout=False) == []
    assert stub.server.seen["generate"] == asked + 1
    engine.resume()
    assert [group.status for group in engine.wait(2, timeout=10)] == ["accepted"] * 2
    assert stub.server.seen["generate"] == asked + 3


def test_an_episode_that_blocks_its_worker_ends_at_its_deadline(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine(start_stub(), workers=2, faults={"episode_timeout_s": 4.0})
    engine.rollout_batch([{}] * 4, Scripted)
    groups = engine.rollout_batch([{"do": "spin" if n == 1 else "ok"} for n in range(6)], Scripted)
    assert [n for n, group in enumerate(groups) if group.status is not EpisodeStatus.ACCEPTED] == [1]
    assert groups[1].failure is not None
    assert groups[1].failure.kind is FailureKind.DEADLINE
    assert "Scripted.arun_episode blocks the event loop of all episodes at" in caplog.text
    (hung,) = engine.rollout_batch([{"do": "hang"}], Scripted)
    assert hung.failure is not None and "episode_timeout_s=4" in hung.failure.message
    engine.rollout_batch([{}] * 4, Scripted)  # its ends tell what both workers have counted by then
    assert engine.rollout_metrics()["blocked_s"] > 1


def test_a_weight_update_interrupts_and_continues_the_calls_of_all_workers(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, workers=2, consumer_batch_size=2, max_head_offpolicyness=1)
    engine.rollout_batch([{}] * 2, Scripted)
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    for _ in range(2):
        engine.submit({"ids": [1, 1, 1]}, Scripted)
    stub.until_held(2)
    engine.update_weights_from_disk("ckpt", 1)
    stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
    half = answer_tokens([1, 1, 1], 0, 4)
    for group in engine.wait(2, timeout=10):
        (sequence,) = group.sequences
        assert sequence.input_ids.tolist() == [1, 1, 1, *half, *answer_tokens([1, 1, 1, *half], 1, 8)]
        assert sequence.versions is not None
        assert sequence.versions.tolist() == [-1] * 3 + [0] * 4 + [1] * 8
        assert scalar(group, "engine_version") == 0
    groups = engine.rollout_batch([{}] * 2, Scripted)
    assert [(scalar(g, "version"), scalar(g, "engine_version")) for g in groups] == [(1, 1)] * 2


@pytest.mark.parametrize("bound", [0, 1])
def test_batches_keep_the_staleness_bound(start_stub: StartStub, start_engine: StartEngine, bound: int) -> None:
    engine = start_engine(start_stub(), workers=2, consumer_batch_size=3, max_head_offpolicyness=bound)
    source = RolloutDataSourceWithBuffer([{"n": n} for n in range(30)])
    drawn = []
    for version in range(4):
        batch = engine.prepare_batch(source, Scripted)
        drawn += [group.data["n"] for group in batch]
        assert all(version - bound <= (group.head_version or 0) <= version for group in batch)
        engine.update_weights_from_disk("ckpt", version + 1)
    assert len(set(drawn)) == 12


def test_a_surplus_group_keeps_its_tokens_and_resumes_in_any_worker(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    engine = start_engine(stub, workers=2, mask_offpolicy_in_partial_rollout=True, dump_to_file=True)
    engine.rollout_batch([{}] * 2, Scripted)
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    source = RolloutDataSourceWithBuffer([{"ids": [1, 1, 1]}])
    with ThreadPoolExecutor() as thread:
        batch = thread.submit(engine.prepare_batch, source, Scripted)
        stub.until_held(1)
        engine.close_source(source)
        with pytest.raises(ConfigError, match="the source was closed"):
            batch.result(10)
    half = [1, 1, 1, *answer_tokens([1, 1, 1], 0, 4)]
    assert [list(group[0].tokens) for group in source.buffer] == [half]
    stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
    engine.update_weights_from_disk("ckpt", 1)
    (group,) = engine.prepare_batch(source, Scripted)
    assert group.sequences[0].input_ids.tolist() == half + answer_tokens(half, 1, 8)


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.timeout(300)  # each process loads the SDKs
def test_agents_have_their_doors_in_each_worker(
    start_stub: StartStub, start_engine: StartEngine, tokenizer_path: str
) -> None:
    stub = start_stub()
    alone = start_engine(stub, tokenizer_path=tokenizer_path)
    engine = start_engine(stub, workers=2, tokenizer_path=tokenizer_path)
    for agent in (AsyncAgent, Port, OneConversation()):  # in-process client and streams; listener; an instance
        groups = engine.rollout_batch([{}] * 4, agent, group_size=2)
        assert [(group.status, group.error) for group in groups] == [("accepted", None)] * 4
        if agent is not Port:
            expected = alone.rollout_batch([{}] * 4, agent, group_size=2)
            assert [record_of(group)[1:] for group in groups] == [record_of(group)[1:] for group in expected]
        else:
            assert len({scalar(group, "port") for group in groups}) == 2
    assert {t.turns[1].agent for group in groups for t in group.trajectories} == {"main"}
    (blocked,) = engine.rollout_batch([{"sleep": 1.5}], OneConversation)
    assert blocked.status == "accepted"


@pytest.mark.timeout(300)  # each process loads the SDKs
def test_agent_processes_and_reward_processes_work_in_workers(
    start_stub: StartStub, start_engine: StartEngine, tokenizer_path: str
) -> None:
    engine = start_engine(
        start_stub(), workers=2, tokenizer_path=tokenizer_path, agents={"isolation": "process", "processes": 1}
    )
    groups = engine.rollout_batch([{"number": n} for n in range(2)], RecordingAgent)
    assert [(group.status, scalar(group, "number")) for group in groups] == [("accepted", n) for n in range(2)]
    assert [group.trajectories[0].reward_extra for group in groups] == [{"acc": 1.0, "pred": "yes"}] * 2
    judged = engine.rollout_batch([{}] * 4, Judged, {"reward_fn": number_of_tokens})
    assert [group.rewards for group in judged] == [[8.0]] * 4


def test_what_workers_log_is_logged_by_the_run(
    start_stub: StartStub,
    start_engine: StartEngine,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = start_engine(start_stub(), workers=2)
    (group,) = engine.rollout_batch([{"do": "log"}], Scripted)
    assert ("areal_lite.of_a_worker", logging.WARNING, "said in a worker") in caplog.record_tuples
    engine.destroy()
    assert "printed in a worker" in capfd.readouterr().out
    assert scalar(group, "inherited") == 0  # programs of episodes do not keep the connection open


def test_what_does_not_work_in_workers_is_refused_by_name(start_stub: StartStub, start_engine: StartEngine) -> None:
    class Local(Scripted):
        pass

    engine = start_engine(start_stub(), workers=2)
    cannot = "rollout.workers is 2, and workflow .*{} cannot be sent to a process: .*rollout.workers: 1"
    with pytest.raises(ConfigError, match=cannot.format("Local")):
        engine.submit({}, Local)
    with pytest.raises(ConfigError, match=cannot.format("OutOfReach")):
        engine.submit({}, OutOfReach())
    with pytest.raises(ConfigError, match=cannot.format("Scripted")):
        engine.rollout_batch([{}], Scripted, {"given": lambda: None})
    (group,) = engine.rollout_batch([{"do": "submit"}], Scripted)
    assert group.failure is not None
    assert "rollout.workers is 2, and in a worker an episode can only generate" in group.failure.message
    (group,) = engine.rollout_batch([{"lock": threading.Lock()}], Scripted)
    assert group.failure is not None and group.failure.kind is FailureKind.DATA
    (group,) = engine.rollout_batch([{"do": "not loadable"}], Scripted)
    assert group.failure is not None and group.failure.kind is FailureKind.OUTPUT
    assert group.failure.type == "TypeError" and "holds a OfAnotherProcess" in group.failure.message


@pytest.mark.parametrize("number", [0, 257, -1])
def test_an_odd_number_of_workers_is_a_config_error(number: int) -> None:
    with pytest.raises(ValueError, match="workers"):
        InferenceEngineConfig(workers=number)
    with pytest.raises(ValueError, match="workers is 3 and max_concurrent_rollouts 2"):
        InferenceEngineConfig(workers=3, max_concurrent_rollouts=2)


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from areal_lite.api import InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.worker_episodes import Scripted

config = InferenceEngineConfig(backend="sglang", addresses=[sys.argv[1]], workers=2, consumer_batch_size=4)
with RemoteInfEngine(config) as engine:
    groups = engine.rollout_batch([{}] * 4, Scripted)
    print(*{dict(group.trajectories[0].scalars)["rollout/pid"] for group in groups}, flush=True)
    engine.rollout_batch([{"do": "hang"}] * 4, Scripted)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_run(start_stub: StartStub, sent: signal.Signals) -> None:
    command = [sys.executable, "-c", fork_server.IN_A_FORK + PROGRAM, start_stub().address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        pids = [float(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        process.send_signal(sent)
        assert process.wait(20) != 0
    until(lambda: not any(map(alive, pids)))


# -- one side of the connection ----------------------------------------------------------------


class Line:
    """A worker's object in this process, and the run's end of its connection."""

    def __init__(self, **config: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self._file = self.socket.makefile("rb")
        self.config = InferenceEngineConfig(**config)
        self.process = WorkerProcess(theirs, self.config, {"areal_lite.of_a_worker": 37}, elsewhere=False)

    def send(self, *messages: tuple[Any, ...]) -> None:
        """Send messages at once."""
        self.socket.sendall(b"".join(request(*message) for message in messages))

    def next(self) -> Any:
        """Return what it sends next."""
        body = read_message(self._file)
        assert body is not None
        return read_report(body)

    def run(self, key: int, task_id: int = 5, workflow: Any = Scripted, **row: Any) -> list[tuple[Any, ...]]:
        """Return the messages that start a group of one episode."""
        sent = pickled_workflow(workflow, None, self.config)
        place = {"is_eval": False, "task_id": task_id, "group_id": str(task_id), "version": 0}
        return [("workflow", sent), ("run", key, sent.key, pickle.dumps(row), place, 1, 100.0 * key)]


@pytest.fixture
def line() -> Iterator[Line]:
    handlers, pace = list(logging.getLogger().handlers), gc.get_threshold()
    line = Line(workers=2)
    try:
        assert line.next() == ("ready",)
        yield line
    finally:
        line.send(("close",))
        assert line.process.ended.wait(20)
        line.process._watchdog.stop()
        line.socket.shutdown(socket.SHUT_RDWR)
        line._file.close()
        line.socket.close()
        line.process._loop.stop()
        line.process._sender.close()
        logging.getLogger("areal_lite.of_a_worker").setLevel(logging.NOTSET)
        logging.getLogger().handlers[:] = handlers
        garbage_collection.restore()
        gc.set_threshold(*pace)


ANSWER = ([4], [-1.0], [0], [], "stop", 0.1, 0.1, 0.0, 1, "server")
"""What is sent as the answer to a call."""


def test_a_worker_answers_each_group_once_and_keeps_nothing_of_it(line: Line) -> None:
    process = line.process
    assert process.get_version() == 0 and len(ANSWER) == len(RESPONSE_FIELDS)
    assert logging.getLogger("areal_lite.of_a_worker").level == 37 and gc.get_threshold()[0] >= 50_000
    process._shared.while_blocked[0]("agent", "blocks")
    assert line.next() == ("blocked",)
    logging.getLogger("areal_lite.of_a_worker").error("said")
    kind, record = line.next()
    assert (kind, record.getMessage()) == ("log", "said")
    line.send(("cancel", 99), ("answer", 99, ANSWER), ("tokens", 99, [4], [-1.0]))  # of what has ended
    line.send(*line.run(1, do="two turns"))
    kind, call_id, key, member, call, _, _ = line.next()
    assert (kind, key, member, call.input_ids) == ("generate", 1, 0, [1, 2, 3])
    line.send(("answer", call_id, ANSWER), ("answer", call_id, ANSWER), ("tokens", call_id, [4], [-1.0]))
    kind, call_id, *_, call, _, _ = line.next()
    assert (kind, call.input_ids) == ("generate", [4, 5, 6])  # it has the others
    assert len(process._groups[1].calls) == len(process._calls) == 1
    line.send(("answer", call_id, ANSWER))
    kind, key, _, left, columns = line.next()
    was_stopped, failure, (reply,) = read_end(left, columns)
    assert reply.trajectory is not None
    assert (kind, key, was_stopped, failure, reply.trajectory.reward) == ("ended", 1, False, None, 2.0)
    assert not process._groups and not process._by_task and not process._calls
    line.send(("forget_workflows",), ("cancel", 1))
    until(lambda: not process._workflows)


def test_a_group_that_has_the_task_of_another_keeps_its_deadline(line: Line) -> None:
    line.send(*line.run(1, do="hang"), *line.run(2, do="hang"))
    until(lambda: (line.process._deadline_of(5) or 0) > time.monotonic() + 150)
    deadline = line.process._deadline_of(5)
    assert deadline is not None and deadline <= time.monotonic() + 200  # by the clock of the worker's machine
    line.send(("cancel", 1))
    kind, key, _, left, columns = line.next()
    assert (kind, key, read_end(left, columns)[:2]) == ("ended", 1, (True, None))
    assert line.process._deadline_of(5) == deadline
    line.send(("cancel", 2))
    assert line.next()[:2] == ("ended", 2)
    assert line.process._deadline_of(5) is None


class LeavesTask(Scripted):
    """Returns while a task of its own waits for an answer."""

    tasks: list[asyncio.Task[Any]] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Start the call, and make another."""
        self.tasks.append(asyncio.create_task(engine.agenerate(ModelRequest(input_ids=[7]))))
        await asyncio.sleep(0)
        return await super().arun_episode(engine, data)


class ReturnsLock(Scripted):
    """Returns what cannot be sent."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Return it beside tensors."""
        ids = torch.ones(1, 2, dtype=torch.int32)
        return {"input_ids": ids, "attention_mask": ids, "lock": threading.Lock()}


def test_calls_that_a_group_leaves_behind_are_dropped(line: Line) -> None:
    line.send(*line.run(1, workflow=LeavesTask))
    (_, left, *_), (_, waits, *_) = line.next(), line.next()
    line.send(("answer", waits, ANSWER))
    assert sorted([line.next()[:2], line.next()[:2]]) == [("drop", left), ("ended", 1)]


def test_a_result_that_cannot_be_sent_is_a_failure_of_its_group(line: Line) -> None:
    line.send(*line.run(1, workflow=ReturnsLock))
    kind, key, _, left, columns = line.next()
    was_stopped, failure, replies = read_end(left, columns)
    assert failure is not None and (kind, key, was_stopped) == ("ended", 1, False)
    assert (failure.kind, replies) == (FailureKind.OUTPUT, []) and "holds a lock" in failure.message


def test_an_error_of_the_receiver_of_tokens_ends_the_call(line: Line) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("full")

    async def ask() -> None:
        await line.process.agenerate(ModelRequest(input_ids=[7], on_tokens=fail))

    with ThreadPoolExecutor() as thread:
        asked = thread.submit(asyncio.run, ask())
        _, call_id, key, _, call, streams, place = line.next()
        assert (key, streams, call.input_ids, place) == (None, True, [7], None)
        line.send(("tokens", call_id, [4], [-1.0]), ("tokens", call_id, [4], [-1.0]))
        with pytest.raises(KeyError, match="full"):
            asked.result(20)
    assert line.next() == ("drop", call_id)


def test_a_message_waits_until_it_is_read(line: Line) -> None:
    with ThreadPoolExecutor() as thread:
        sent = thread.submit(line.process._send, "said", " " * 10_000_000)
        assert len(line.next()[1]) == 10_000_000
        sent.result(20)


def spread(head: Any, sizes: list[int], content: bytes) -> bytes:
    """Return a message whose columns have those sizes."""
    text = json.dumps([head, sizes]).encode()
    return framed(text) + content


CALL = ["rid", "{}", 0, None, False, None]
HOSTILE = {
    "a pickle": None,
    "no reply": b"\x00" * 100,
    "a method that is no report": encode_reply(["_finish"]),
    "a kind that is no text": encode_reply([["ended"], 0]),
    "one episode too many for memory": encode_reply(["generate", 1, 0, 10**12, CALL], [b""]),
    "an episode before the first": encode_reply(["generate", 1, 0, -1, CALL], [b""]),
    "one column many times": spread(["log", {"name": "x", "levelno": 10}], [2**20, -(2**20)] * 5_000, bytes(2**20)),
    "the end of another's group": encode_reply(["ended", 7, {}, None]),
    "counts that are texts": encode_reply(["ended", 0, {"calls": "many"}, ["tuple", False, None, ["list"]]]),
    "more than fits": struct.pack("!Q", 2**62),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_is_an_error_of_its_worker_and_never_code(
    name: str, start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    time_to_close(monkeypatch, 0.2)
    engine = start_engine(start_stub(), workers=2, faults={"episode_timeout_s": 60.0})
    body = HOSTILE[name]
    body = pickle.dumps(RunsCode(tmp_path / "mark")) if body is None else body
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    group, other = engine.rollout_batch([{"body": body}, {}], Hostile)
    assert (group.status, other.status) == ("failed", "accepted")
    assert group.failure is not None and group.failure.kind is FailureKind.WORKER
    assert not (tmp_path / "mark").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
    assert [each.status for each in engine.rollout_batch([{}] * 2, Hostile)] == ["accepted"] * 2


def with_wrong(**changes: Any) -> Episode:
    """Return an episode with one sequence, in which values have another type than the run counts on."""
    ids, mask = np.ones(3, np.int32), np.array([False, True, True])
    sequence = TokenSequence(input_ids=ids, loss_mask=mask, logprobs=np.zeros(3, np.float32), reward=1.0)
    episode = Episode(trajectory=Trajectory(status=EpisodeStatus.ACCEPTED, sequences=[sequence], reward=1.0))
    for name, value in changes.items():
        owner = next(each for each in (episode, sequence, episode.trajectory) if hasattr(each, name))
        setattr(episode.trajectory if name == "reward" else owner, name, value)
    return episode


WRONG_PARTS: dict[str, dict[str, Any]] = {
    "counts": {"counts": {"forks": "many"}},
    "facts": {"reward_extra": {"why": [1]}},
    "scalars": {"scalars": [("rollout/x", "y")]},
    "processes": {"processes": [5]},
    "no list of sequences": {"sequences": 5},
    "no sequence": {"sequences": [5]},
    "status": {"status": "accepted"},
    "reward": {"reward": "1"},
    "failure": {"failure": "broken"},
    "failure's text": {"failure": Failure(FailureKind.AGENT, "E", None)},  # type: ignore[arg-type]
    "a mask of numbers": {"loss_mask": np.zeros(3, np.int32)},
    "ids of two dimensions": {"input_ids": np.ones((3, 2), np.int32)},
    "ids that are texts": {"input_ids": np.array(["a", "b", "c"])},
    "log-probs of another length": {"logprobs": np.zeros(2, np.float32)},
}


@pytest.mark.parametrize("name", ["", *WRONG_PARTS])
@on_a_loop
async def test_an_episode_of_a_worker_has_the_types_that_the_run_counts_on(name: str) -> None:
    worker, episode = a_worker(), Episode()
    worker.groups[3] = group = workers.WorkerGroup(3, EpisodeContext(episodes=[episode]))
    end, columns = pack_end(False, None, [with_wrong(**WRONG_PARTS.get(name, {}))])
    report = read_report(encode_reply(["ended", 3, {}, end], columns))
    worker._on_ended(*report[1:])
    was_stopped, failure = group.end.result()
    assert (was_stopped, failure and failure.kind) == (False, FailureKind.OUTPUT if name else None)
    assert (episode.trajectory is None) == bool(name)
    assert not episode.counts and not episode.processes and not episode.scalars


def a_worker(shared: SharedResources | None = None) -> workers.Worker:
    engine: Any = RemoteInfEngine(InferenceEngineConfig(backend="sglang", addresses=["nowhere:1"]))
    return workers.Worker(0, engine, shared or SharedResources())


@on_a_loop
async def test_what_workers_counted_is_summed_and_each_of_their_groups_gets_its_end() -> None:
    shared = SharedResources()
    for _ in range(2):
        worker = a_worker(shared)
        for key, (count, left) in enumerate([(2.0, (False, None, [])), (5.0, (True, None, [])), (5.0, ())]):
            worker.groups[key] = group = workers.WorkerGroup(key, EpisodeContext(episodes=[Episode()]))
            worker._on_ended(key, {"calls": count}, left, [])
            was_stopped, failure = group.end.result()
            assert (was_stopped, failure and failure.kind) == (key == 1, FailureKind.OUTPUT if key == 2 else None)
    assert shared.counts["calls"] == 10


@on_a_loop
async def test_a_worker_has_each_workflow_that_it_is_to_run_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MAX_WORKFLOWS", 3)
    worker, sent, held = a_worker(), [], set()
    monkeypatch.setattr(worker, "send", lambda *message: sent.append(message))
    for number in [0, 1, 2, 0, 3, 0, 1, 2, 2, 3]:
        worker.run(PickledObject("workflow", bytes([number]), {}, b""), b"", EpisodeContext(episodes=[Episode()]), 1.0)
    for kind, *rest in sent:
        if kind == "workflow":
            assert rest[0].key not in held
            held.add(rest[0].key)
        elif kind == "forget_workflows":
            assert len(held) == 3
            held.clear()
        else:
            assert rest[1] in held and len(held) <= 3
    assert [message[0] for message in sent].count("forget_workflows") == 2


@on_a_loop
async def test_a_worker_that_is_closed_before_it_runs_ends() -> None:
    worker = a_worker()
    worker.close()
    levels: dict[str, int] = {}
    settings = pickled_object((InferenceEngineConfig(workers=2), levels), name="settings", hint="")
    await worker.open(settings)
    await worker.ended.wait()
    assert "ended with exit code 0" in worker.end
