"""The dump: one line per sample, right for several turns, for failures, and without a tokenizer."""

from __future__ import annotations
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.api import InferenceEngine, InferenceEngineConfig, RolloutWorkflow
from areal_lite.api.episode_context import record_counts
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, ProcessRecord, TokenSequence, Trajectory, Turn, TurnRole
from areal_lite.errors import ConfigError, StorageError
from areal_lite.processes.child_process import start_python
from areal_lite.rollout.dumps import dump_writer, trajectory_dumper
from areal_lite.rollout.dumps.dump_lines import CHAIN, dump_lines, dump_text
from areal_lite.rollout.dumps.dump_writer import Chain, write_file
from areal_lite.rollout.dumps.packed_group import File, Report, pack_group
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper, next_task_id
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests import fork_server
from tests.agents.scripted_engine import tokenizer
from tests.rollout.episodes.test_row_feed import Clock
from tests.rollout.scripted import OneTurn, TwoTurns, until
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def lines(root: Path, *parts: str) -> list[dict[str, Any]]:
    (path,) = root.glob("/".join(("experiment", "trial", *parts)))
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_one_line_per_sample_at_the_seeds_path_with_the_seeds_fields(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{"reward": 2.5}], OneTurn, group_size=3)
    engine.rollout_batch([{}], OneTurn, is_eval=True)
    engine.destroy()
    records = lines(tmp_path, "rollout", "0", "0.jsonl")
    assert [r["sample_idx"] for r in records] == [0, 1, 2]
    record = records[0]
    seed_fields = {
        "task_id": 0,
        "seqlen": 11,
        "prompt_len": 3,
        "head_version": 0,
        "tail_version": 0,
        "reward": 2.5,
    }
    assert seed_fields.items() <= record.items()
    assert record["prompt"] is record["completion"] is None  # no tokenizer was given
    assert (record["status"], record["group_id"], record["schema"]) == ("accepted", "0", 2)
    assert len(lines(tmp_path, "eval-rollout", "0", "1.jsonl")) == 1


def test_a_trajectory_of_several_turns_keeps_its_structure(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    stub = start_stub(answer_len=2)
    engine = start_engine(stub, dump_to_file=True)
    engine.rollout_batch([{}], TwoTurns)
    engine.destroy()
    (record,) = lines(tmp_path, "rollout", "0", "0.jsonl")
    first = answer_tokens([1, 2, 3], 0, 2)
    second = answer_tokens([*first, 5, 6], 0, 2)
    assert [(t["role"], t["ids"], t["loss_mask"]) for t in record["turns"]] == [
        ("prompt", [1, 2, 3], [0, 0, 0]),
        ("assistant", first, [1, 1]),
        ("environment", [5, 6], [0, 0]),
        ("assistant", second, [1, 1]),
    ]
    assert (record["prompt_len"], record["seqlen"]) == (3, 9)
    sampled = [t for t in record["turns"] if t["role"] == "assistant"]
    assert all(t["logprobs"] == [-0.5, -0.515625] and t["versions"] == [0, 0] for t in sampled)
    assert all(t["latency_s"] > 0 and t["stop_reason"] == "stop" for t in sampled)
    assert {t["server"] for t in sampled} == {f"http://{stub.address}"}


def test_a_row_that_no_model_call_explains_is_split_by_its_mask_and_freed_of_its_padding(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    class Replay(RolloutWorkflow):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
            return {
                "input_ids": torch.tensor([[1, 2, 11, 12, 3, 4, 21, 0]]),
                "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1, 0]]),
                "loss_mask": torch.tensor([[False, False, True, True, False, False, True, False]]),
                "versions": torch.tensor([[-1, -1, 4, 5, -1, -1, 6, -1]]),
            }

    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}], Replay)
    engine.destroy()
    (record,) = lines(tmp_path, "rollout", "6", "0.jsonl")
    assert (record["seqlen"], record["prompt_len"], record["head_version"], record["tail_version"]) == (
        7,
        2,
        4,
        6,
    )
    assert [(t["role"], t["ids"], t.get("versions")) for t in record["turns"]] == [
        ("prompt", [1, 2], None),
        ("assistant", [11, 12], [4, 5]),
        ("environment", [3, 4], None),
        ("assistant", [21], [6]),
    ]
    assert record["reward"] is None


def test_rejected_failed_and_partly_failed_episodes_are_dumped_with_their_cause(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{"do": "reject"}, {"do": "raise"}], OneTurn)
    engine.rollout_batch([{"do": "odd"}], OneTurn, group_size=2)
    engine.rollout_batch([{}], OneTurn, should_accept_fn=lambda trajectory: False)
    engine.destroy()
    (rejected,) = lines(tmp_path, "rollout", "0", "0.jsonl")
    assert (rejected["status"], rejected["error"]) == ("rejected", "the workflow returned None")
    assert (rejected["seqlen"], rejected["prompt_len"], len(rejected["turns"])) == (11, 3, 2)
    (failed,) = lines(tmp_path, "rollout", "0", "1.jsonl")
    assert failed["status"] == "failed" and "broken agent" in failed["error"] and failed["seqlen"] == 0
    good, odd = lines(tmp_path, "rollout", "0", "2.jsonl")
    assert (good["status"], odd["status"]) == ("accepted", "failed")
    assert good["error"] is None and "odd member" in odd["error"]
    (filtered,) = lines(tmp_path, "rollout", "0", "3.jsonl")
    assert (filtered["status"], filtered["error"], filtered["seqlen"]) == (
        "rejected",
        "should_accept_fn said no",
        11,
    )


def test_the_folder_is_the_newest_trained_version(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.update_weights_from_disk("ckpt", 3)
    engine.rollout_batch([{}], OneTurn)
    engine.destroy()
    (record,) = lines(tmp_path, "rollout", "3", "0.jsonl")
    assert (record["head_version"], record["tail_version"], record["start_version"]) == (3, 3, 3)


def test_every_accepted_group_is_dumped_once_whether_trained_or_left_over(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True, consumer_batch_size=2, max_head_offpolicyness=2)
    source = [{"n": n} for n in range(10)]
    batch = engine.prepare_batch(source, OneTurn)
    engine.close_source(source)
    counts = engine.export_stats()
    engine.destroy()
    files = list(tmp_path.glob("experiment/trial/rollout/*/*.jsonl"))
    statuses = [json.loads(f.read_text())["status"] for f in files]
    assert statuses.count("accepted") == len(batch) == counts["accepted"] == 2
    assert statuses.count("cancelled") == counts["cancelled"] == len(files) - 2


def not_dumped(engine: RemoteInfEngine, tmp_path: Path) -> str:
    """Return what an engine says at its end if it dumped no group."""
    counts = engine.export_stats()
    ended = sum(counts.values()) - counts["abandoned"]
    return f"{ended} ended groups are not dumped below {tmp_path}/experiment/trial"


def test_a_folder_that_cannot_be_written_ends_every_call_with_the_path_and_the_number_of_missing_groups(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    (tmp_path / "experiment").write_text("a file where the folder should be")
    engine = start_engine(start_stub(), dump_to_file=True, max_concurrent_rollouts=1)
    with pytest.raises(
        StorageError, match=r"experiment/trial/rollout/0/\d+.jsonl \(\d+ bytes\) cannot be written: Not a"
    ) as ended:
        while True:
            engine.rollout_batch([{}, {}], OneTurn)
    with pytest.raises(StorageError, match="cannot be written"):
        engine.prepare_batch([{}], OneTurn)
    engine.submit({}, OneTurn)
    with pytest.raises(StorageError, match="cannot be written"):
        engine.wait(1, timeout=20)
    with pytest.raises(StorageError) as closed:
        engine.destroy()
    assert closed.value is ended.value
    assert closed.value.__notes__ == [not_dumped(engine, tmp_path)]


def test_a_group_without_a_json_form_changes_no_outcome(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Garbled(OneTurn):
        async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
            if data["garbled"]:
                record_counts({"half a character: \ud800": 1})
                raise ValueError
            return await super().arun_episode(engine, data)

    engine = start_engine(start_stub(), dump_to_file=True)
    groups = engine.rollout_batch([{"garbled": n in (1, 2)} for n in range(4)], Garbled)
    assert [group.status for group in groups] == ["accepted", "failed", "failed", "accepted"]
    engine.destroy()
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["0.jsonl", "3.jsonl"]
    assert "group 1 could not be dumped" in caplog.text and "surrogates not allowed" in caplog.text
    assert f"2 ended groups could not be dumped below {tmp_path}" in caplog.text


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_columns_are_written_as_the_numbers_that_they_hold(dtype: str) -> None:
    """Log-probs keep all digits of their float32, and a missing one is null."""
    ids = np.arange(20, dtype=dtype)[::2]
    logprobs = np.array([0, 0, -0.1, np.nan, -1e-7, -33.3, -0.5, 0, 0, 0], dtype=np.float32)
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 0, 0, 0], dtype=bool)
    columns = {"ids": ids, "loss_mask": mask, "logprobs": logprobs, "versions": np.full(10, 3, dtype)}
    turn = Turn(role=TurnRole.ASSISTANT, **columns)
    trajectory = Trajectory(status=EpisodeStatus.FAILED, made_turns=[turn])
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.FAILED, data={}, trajectories=[trajectory])
    (written,) = json.loads(dump_text(dump_lines(group)))["turns"]
    assert written["ids"] == ids.tolist()
    assert written["loss_mask"] == mask.astype(int).tolist()
    assert written["versions"] == [3] * 10
    assert written["logprobs"] == [None if np.isnan(value) else value for value in logprobs.tolist()]


def test_a_shared_turn_has_the_columns_of_the_sequence_that_trains_it() -> None:
    def column(*values: Any) -> Any:
        return np.array(values)

    prompt = Turn(role=TurnRole.PROMPT, ids=column(1, 2), loss_mask=column(False, False))
    own = {"logprobs": column(-1.0, -1.0), "versions": column(3, 3)}
    answer = Turn(role=TurnRole.ASSISTANT, parent=0, start=2, ids=column(3, 4), loss_mask=column(True, True), **own)
    trains, shares, bare = (
        TokenSequence(
            input_ids=column(1, 2, 3, 4),
            loss_mask=column(False, False, trained, trained),
            logprobs=None if version is None else column(0, 0, -2.0, -2.0),
            versions=None if version is None else column(-1, -1, version, version),
            place=((0, 1), 0),
        )
        for trained, version in ((True, 5), (False, 9), (True, None))
    )
    sequences = [trains, shares, bare]
    trajectory = Trajectory(status=EpisodeStatus.ACCEPTED, made_turns=[prompt, answer], sequences=sequences)
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.ACCEPTED, data={}, trajectories=[trajectory])
    answers = [line["turns"][1] for line in dump_lines(group)]
    assert [each["versions"].tolist() for each in answers] == [[5, 5], [3, 3], [3, 3]]
    assert [each["logprobs"].tolist() for each in answers] == [[-2, -2], [-1, -1], [-1, -1]]


def turn_of(texts: Any, role: TurnRole, content: str, **given: Any) -> Turn:
    ids = np.array(texts.encode(content))
    return Turn(role=role, ids=ids, loss_mask=np.full(len(ids), role is TurnRole.ASSISTANT), **given)


def test_each_line_is_of_its_own_sequence_and_the_first_one_of_an_episode_has_its_processes() -> None:
    """And the first one of a group has the row."""
    texts = tokenizer()
    prompt = turn_of(texts, TurnRole.PROMPT, "Why?")
    first = turn_of(texts, TurnRole.ASSISTANT, "So.<|im_end|>", parent=0, start=prompt.end, text="from the server")
    asked = turn_of(texts, TurnRole.ENVIRONMENT, "And?", parent=1, start=first.end)
    last = turn_of(texts, TurnRole.ASSISTANT, "Then.<|im_end|>", parent=2, start=asked.end)
    turns, paths = [prompt, first, asked, last], [(0, 1), (0, 1, 2, 3)]

    def sequence(path: tuple[int, ...]) -> TokenSequence:
        parts = [turns[place] for place in path]
        ids, mask = (np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "loss_mask"))
        versions = np.where(mask, np.arange(len(ids)), -1)
        rewards = np.arange(len(ids)) / 2 if len(path) == 4 else None
        place = (path, path[-1])
        return TokenSequence(
            input_ids=ids,
            loss_mask=mask,
            versions=versions,
            token_rewards=rewards,
            reward=float(len(path)),
            place=place,
        )

    process = ProcessRecord(command=["ls"], returncode=1, timed_out=False, seconds=0.5, stdout="", stderr="no")
    accepted = Trajectory(
        status=EpisodeStatus.ACCEPTED,
        made_turns=turns,
        sequences=[sequence(path) for path in paths],
        processes=[process],
    )
    fork = [prompt, first, turn_of(texts, TurnRole.ASSISTANT, "No.", parent=0, start=prompt.end)]
    failures = Failure(FailureKind.AGENT, "KeyError", "'a'"), Failure(FailureKind.DEADLINE, "", "too late")
    failed, late = (Trajectory(member_idx=1, status=EpisodeStatus.FAILED, failure=failure) for failure in failures)
    failed.made_turns = fork
    group = Group(
        task_id=0, group_id="0", status=EpisodeStatus.ACCEPTED, data={}, trajectories=[accepted, failed, late],
        queued_s=0.25, run_s=1.5,
    )  # fmt: skip
    lines = json.loads(b"[%b]" % b",".join(dump_text(dump_lines(group, texts, row=b"{}", extra={"a": 1})).splitlines()))
    ends = [first.end, last.end, fork[2].end, 0]
    assert [line["seqlen"] for line in lines] == ends
    assert [line["prompt_len"] for line in lines] == [prompt.end] * 3 + [0]
    assert [line["prompt"] for line in lines] == ["Why?"] * 3 + [""]
    answers = ["So.<|im_end|>", "So.<|im_end|>And?Then.<|im_end|>", "No.", ""]
    assert [line["completion"] for line in lines] == answers
    assert [[turn["turn_idx"] for turn in line["turns"]] for line in lines] == [[0, 1], [0, 1, 2, 3], [0, 2], []]
    assert lines[0]["turns"][1]["text"] == "So.<|im_end|>"
    assert [turn["loss_mask"] for turn in lines[1]["turns"]] == [
        [n % 2] * len(turn.ids) for n, turn in enumerate(turns)
    ]
    heads = [prompt.end] * 2 + [None] * 2
    tails = [first.end - 1, last.end - 1, None, None]
    assert [(line["head_version"], line["tail_version"]) for line in lines] == list(zip(heads, tails, strict=True))
    assert [line["reward"] for line in lines] == [2.0, 4.0, None, None]
    assert [line["error_type"] for line in lines] == [None, None, "KeyError", None]
    assert [line["error_kind"] for line in lines] == [None, None, "agent", "deadline"]
    assert [len(line["processes"]) for line in lines] == [1, 0, 0, 0]
    assert [line.get("row", "none") for line in lines] == [{}, "none", "none", "none"]
    assert [line.get("missing") for line in lines] == [["logprobs"]] * 2 + [None] * 2
    assert [line["extra"] for line in lines] == [{"a": 1}] * 4
    assert lines[0]["timings"] == {"queued_s": 0.25, "run_s": 1.5, "finished_at": group.finished_at}
    assert all(turn["logprobs"] == [0.0] * len(turn["ids"]) for turn in lines[1]["turns"][1::2])
    assert lines[2]["turns"][1]["versions"] == [-1] * len(fork[2].ids)
    rewards = [reward for turn in lines[1]["turns"] for reward in turn["rewards"]]
    assert rewards == [n / 2 for n in range(last.end)]
    assert "rewards" not in lines[0]["turns"][1]
    untold = next(dump_lines(group))
    assert (untold["row"], untold["prompt"], untold["turns"][1]["text"]) == (None, None, "from the server")
    assert "extra" not in untold


def writer_of(engine: RemoteInfEngine) -> int:
    """Return the id of the process that writes the engine's dumps."""
    assert engine._dumper is not None
    return engine._dumper._process.pid


@pytest.fixture
def resume_disk(monkeypatch: pytest.MonkeyPatch, stack: ExitStack) -> Iterator[Callable[[], None]]:
    """Stop the writer of the next engine, as a hanging disk does, until this is called or the test ends."""
    pids: list[int] = []

    def start_stopped(*args: Any, **options: Any) -> Any:
        process = start_python(*args, **options)
        os.kill(process.pid, signal.SIGSTOP)
        pids.append(process.pid)
        return process

    def resume() -> None:
        with suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGCONT)

    monkeypatch.setattr(trajectory_dumper, "start_python", start_stopped)
    yield resume
    resume()


def test_while_the_disk_is_slow_no_group_starts_and_the_loop_stays_free(
    start_stub: StartStub,
    start_engine: StartEngine,
    resume_disk: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trajectory_dumper, "pack_group", lambda group: pack_group(group).ljust(2000))
    monkeypatch.setattr(trajectory_dumper, "MAX_QUEUED", 4 * 2000)
    engine = start_engine(start_stub(), dump_to_file=True, max_concurrent_rollouts=1)
    for _ in range(20):
        engine.submit({}, OneTurn, is_eval=True)
    engine.wait(4)
    with pytest.raises(TimeoutError, match="0 of 1 .* too many ended groups wait to be dumped"):
        engine.wait(1, timeout=0.2)  # the loop answers, and nothing else ends
    assert caplog.text.count("rollout waits for the disk: 4 ended groups are not yet dumped") == 1
    resume_disk()
    engine.wait(16)
    engine.destroy()
    assert len(list(tmp_path.rglob("*.jsonl"))) == 20


def test_close_waits_for_a_slow_disk_and_says_so(
    start_stub: StartStub,
    start_engine: StartEngine,
    resume_disk: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}] * 20, OneTurn)
    handler = logging.Handler()
    handler.emit = lambda record: resume_disk()  # type: ignore[method-assign]
    trajectory_dumper.logger.addHandler(handler)
    monkeypatch.setattr(trajectory_dumper, "REPORT_S", 50.0)
    try:
        engine.destroy()
    finally:
        trajectory_dumper.logger.removeHandler(handler)
    assert caplog.text.count("waiting for the disk") == 1
    assert f"waiting for the disk: 20 ended groups are not yet dumped below {tmp_path}" in caplog.text
    assert len(list(tmp_path.rglob("*.jsonl"))) == 20


def test_after_a_flush_the_groups_that_ended_are_files(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_dumper, "GATHER_S", 600.0)  # a flush does not wait for further groups
    monkeypatch.setattr(trajectory_dumper, "FLUSH_S", 600.0)
    engine = start_engine(start_stub(), dump_to_file=True)
    for ended in (3, 6):  # the first waits for the process to start
        engine.rollout_batch([{}] * 3, OneTurn)
        engine.flush_dumps()
        assert len(list(tmp_path.rglob("*.jsonl"))) == ended
    start_engine(start_stub()).flush_dumps()  # has none


def test_a_flush_gives_up_on_a_disk_that_hangs(
    start_stub: StartStub,
    start_engine: StartEngine,
    resume_disk: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_dumper, "FLUSH_S", 0.05)
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}], OneTurn)
    engine.flush_dumps()
    assert not list(tmp_path.rglob("*.jsonl"))
    assert engine._dumper is not None and not engine._dumper.behind


def test_a_stalled_disk_is_an_error_with_the_number_of_missing_groups(
    start_stub: StartStub,
    start_engine: StartEngine,
    resume_disk: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_dumper, "STALLED_S", 0.0)
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}] * 3, OneTurn)
    with pytest.raises(StorageError, match="3 ended groups are not dumped below .*: the disk took none of them in 0 s"):
        engine.destroy()


def test_a_killed_writer_is_an_error_with_the_number_of_missing_groups(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_dumper, "pack_group", lambda group: pack_group(group).ljust(2 << 20))  # > the pipe
    engine = start_engine(start_stub(), dump_to_file=True)
    os.kill(writer_of(engine), signal.SIGKILL)
    with pytest.raises(StorageError, match=f"the process that writes dumps below {tmp_path}/.* was killed: free mem"):
        while True:
            engine.rollout_batch([{}], OneTurn)
    with pytest.raises(StorageError) as closed:
        engine.destroy()
    assert closed.value.__notes__ == [not_dumped(engine, tmp_path)]


def test_a_termination_of_the_whole_job_loses_no_group(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}], OneTurn)
    until(lambda: list(tmp_path.rglob("*.jsonl")))
    os.kill(writer_of(engine), signal.SIGTERM)
    engine.rollout_batch([{}] * 3, OneTurn)
    engine.destroy()
    assert len(list(tmp_path.rglob("*.jsonl"))) == 4


def test_batches_are_cut_at_a_megabyte_and_nothing_is_lost(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    write = TrajectoryDumper._write

    def recorded(self: TrajectoryDumper, files: list[File]) -> None:
        batches.append(len(files))
        write(self, files)

    monkeypatch.setattr(trajectory_dumper, "BATCH_BYTES", 1000)  # two groups
    monkeypatch.setattr(TrajectoryDumper, "_write", recorded)
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}] * 50, OneTurn)
    engine.destroy()
    assert len(list(tmp_path.rglob("*.jsonl"))) == sum(batches) == 50
    assert max(batches) <= 3


def test_a_file_is_one_group_also_if_engines_or_ids_repeat(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    stub = start_stub()
    for life in range(3):
        engine = start_engine(stub, dump_to_file=True)
        engine.rollout_batch([{}] * 2, OneTurn, group_size=2)
        engine.rollout_batch([{}], OneTurn, is_eval=True)
        for name in ("a", "a", str(10**16)):
            assert engine.submit({}, OneTurn, task_id=name, is_eval=True) == name
            engine.wait(1)
        engine.destroy()
        assert next_task_id(tmp_path / "experiment" / "trial") == 3 * life + 3
    files = {
        path.relative_to(tmp_path / "experiment" / "trial"): path.read_bytes() for path in tmp_path.rglob("*.jsonl")
    }
    ids = [[json.loads(line)["task_id"] for line in lines.splitlines()] for lines in files.values()]
    assert sorted(map(str, ids)) == sorted(
        [
            *(f"[{n}, {n}]" for n in (0, 1, 3, 4, 6, 7)),
            *(f"[{n}]" for n in (2, 5, 8)),
            *["['a']"] * 6,
            *[f"['{10**16}']"] * 3,
        ]
    )
    assert {path.name for path in files} >= {"a.jsonl", "a.1.jsonl", "a.5.jsonl"}


def test_a_tokenizer_path_without_a_tokenizer_is_an_error_at_the_start(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="no tokenizer can be loaded from"):
        start_engine(start_stub(), dump_to_file=True, tokenizer_path=str(tmp_path))


def test_what_a_killed_run_left_stays_as_it_is(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    """F48"""
    path = tmp_path / "experiment" / "trial" / "rollout" / "0" / "7.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"whole": 1}\n{"tor')
    engine = start_engine(start_stub(), dump_to_file=True)
    engine.rollout_batch([{}], OneTurn)
    engine.destroy()
    assert path.read_bytes() == b'{"whole": 1}\n{"tor'
    (added,) = lines(tmp_path, "rollout", "0", "8.jsonl")
    assert added["task_id"] == 8


# -- without an engine ---------------------------------------------------------------------------


def config_of(tmp_path: Path, **given: Any) -> InferenceEngineConfig:
    return InferenceEngineConfig(fileroot=str(tmp_path), **given)


def group_of(task_id: int, *turns: Turn, **given: Any) -> Group:
    """Return a group of one failed episode."""
    trajectory = Trajectory(status=EpisodeStatus.FAILED, made_turns=[*turns], **given)
    return Group(task_id=task_id, group_id="0", status=EpisodeStatus.FAILED, data={}, trajectories=[trajectory])


def files_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*.jsonl"))


def open_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_an_orderly_end_leaves_no_descriptor_and_kills_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trajectory_dumper, "STALLED_S", 30.0)
    TrajectoryDumper(config_of(tmp_path)).close()  # what the first one opens stays open
    before = open_files()
    dumper = TrajectoryDumper(config_of(tmp_path))
    held_by_a_child = os.dup(dumper._pipe.fileno())
    dumper.put(group_of(0))
    dumper.close()
    os.close(held_by_a_child)
    assert (dumper._process.wait(0), open_files()) == (0, before)
    assert "could not be dumped" not in caplog.text


def test_groups_gather_until_a_flush_unless_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a thread that has nothing to do sleeps."""
    loops: list[str] = []
    next_batch = TrajectoryDumper._next_batch

    def recorded(self: TrajectoryDumper) -> list[File]:
        batch = next_batch(self)
        loops.append(self._thread.name)
        return batch

    monkeypatch.setattr(TrajectoryDumper, "_next_batch", recorded)
    monkeypatch.setattr(trajectory_dumper, "GATHER_S", 600.0)
    monkeypatch.setattr(trajectory_dumper, "STALLED_S", 20.0)
    monkeypatch.setattr(trajectory_dumper, "BATCH_BYTES", 1)

    def let_time_pass() -> None:
        other = TrajectoryDumper(config_of(tmp_path / "other"))
        other._thread.name = "other"
        other.put(group_of(9))
        other.flush()
        other.close()

    dumper = TrajectoryDumper(config_of(tmp_path / "own"))
    for number in range(2):
        dumper.put(group_of(number))
        let_time_pass()
        assert len(dumper._queue) == 1
        dumper.flush()
        assert len(files_in(tmp_path / "own")) == number + 1
    let_time_pass()
    assert loops.count("areal-lite-dumper") == 2
    monkeypatch.setattr(trajectory_dumper, "MANY", 1)
    dumper.put(group_of(2))
    until(lambda: len(files_in(tmp_path / "own")) == 3)
    monkeypatch.setattr(trajectory_dumper, "MANY", 1024)
    for number in (3, 4):
        dumper.put(group_of(number))
    dumper.close()
    assert len(files_in(tmp_path / "own")) == 5


def test_groups_that_cannot_be_packed_are_counted_and_the_others_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dumper = TrajectoryDumper(config_of(tmp_path))
    for number in range(4):
        extra: dict[str, Any] = {"lock": threading.Lock()} if number in (1, 2) else {}
        dumper.put(group_of(number, reward_extra=extra))
    dumper.close()
    assert files_in(tmp_path) == ["0.jsonl", "3.jsonl"]
    said = [record.message.partition(":")[0] for record in caplog.records]
    assert [message for message in said if "waiting" not in message] == [
        "group 1 could not be dumped; further failures are only counted",
        f"2 ended groups could not be dumped below {tmp_path}/experiment/trial",
    ]


def test_groups_may_start_again_once_half_of_the_queue_is_written(
    tmp_path: Path,
    resume_disk: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trajectory_dumper, "pack_group", lambda group: pack_group(group).ljust(2000))
    monkeypatch.setattr(trajectory_dumper, "MAX_QUEUED", 4 * 2000)
    monkeypatch.setattr(trajectory_dumper, "BATCH_BYTES", 2000)
    changes: list[tuple[bool, int]] = []
    dumper = TrajectoryDumper(config_of(tmp_path), lambda: changes.append((dumper.behind, dumper._left_bytes)))
    for number in range(5):
        dumper.put(group_of(number))
        assert dumper.behind is (number >= 3)
    assert caplog.text.count("rollout waits for the disk: 4 ended groups are not yet dumped") == 1
    assert len(caplog.records) == 1
    resume_disk()
    dumper.close()
    assert changes == [(False, 4000)]


def test_the_first_error_of_the_disk_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_dumper, "BATCH_BYTES", 1)
    (tmp_path / "experiment").write_text("a file where the folder should be")
    dumper = TrajectoryDumper(config_of(tmp_path))
    for number in range(3):
        dumper.put(group_of(number))
    dumper.flush()
    with pytest.raises(StorageError, match=r"rollout/0/0.jsonl .* cannot be written: Not a directory"):
        dumper.close()
    assert dumper.behind


def test_an_interrupt_of_the_end_kills_the_writer_and_says_what_is_missing(
    tmp_path: Path,
    resume_disk: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    dumper = TrajectoryDumper(config_of(tmp_path))
    dumper.put(group_of(0))
    monkeypatch.setattr(dumper, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dumper.close()
    assert "stopped: 1 ended groups are not dumped below" in caplog.text
    until(lambda: dumper._process.wait(0) == -signal.SIGKILL)


@pytest.mark.parametrize(("pace_s", "written"), [(50.0, 3), (1e9, 0)])
def test_the_end_waits_while_the_disk_takes_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pace_s: float, written: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(trajectory_dumper, "time", clock)
    dumper = TrajectoryDumper(config_of(tmp_path))
    thread = dumper._thread
    dumper._ended = 3

    class Disk:
        """A thread that writes a group each ``pace_s`` seconds."""

        def is_alive(self) -> bool:
            return dumper._left > 0

        def join(self, timeout: float) -> None:
            clock.now += timeout
            dumper._written = min(3, int(clock.now / pace_s))

    monkeypatch.setattr(dumper, "_thread", Disk())
    dumper._join()
    assert dumper._written == written
    dumper._ended = dumper._written = 0
    monkeypatch.setattr(dumper, "_thread", thread)
    dumper.close()


def test_a_batch_that_takes_long_is_reported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ticks:
        now = 0.0
        time_ns = staticmethod(time.time_ns)

        def monotonic(self) -> float:
            self.now += 0.06
            return self.now

    reports: list[Report] = []
    monkeypatch.setattr(dump_writer, "time", Ticks())
    batch = [(str(tmp_path), str(number), pack_group(group_of(number))) for number in range(5)]
    dump_writer._write_batch(batch, None, None, reports.append, Chain())
    assert reports == [Report(written=2), Report(written=2), Report(written=1)]
    assert len(files_in(tmp_path)) == 5


def test_a_file_is_whole_or_absent_and_its_folder_may_come_from_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files()
    open_file = os.open

    def open_late(path: str, *options: Any) -> int:
        monkeypatch.setattr(os, "open", open_file)
        Path(path).parent.mkdir()  # by another process
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", open_late)
    assert write_file(str(tmp_path / "0"), "a", b"text") == str(tmp_path / "0" / "a.jsonl")
    with pytest.raises(OSError, match="No such file"):
        write_file(str(tmp_path / "0"), "no/b", b"text")
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"a.jsonl"}
    assert open_files() == before


def test_each_writer_notes_its_files_in_a_chain_of_its_own(tmp_path: Path) -> None:
    noted: list[str] = []
    for number in (0, 1):  # the second is a resumed run, or another engine
        dumper = TrajectoryDumper(config_of(tmp_path))
        for task in (number, 2, 2):
            dumper.put(group_of(task))
        dumper.close()
    folder = tmp_path / "experiment" / "trial" / "rollout" / "0"
    chains = sorted(folder.glob(f"{CHAIN}*"))
    assert len(chains) == 2
    for chain in chains:
        previous = b""
        for line in chain.read_bytes().splitlines(keepends=True):
            note = json.loads(line)
            assert note["previous"] == sha256(previous).hexdigest()
            assert note["sha256"] == sha256((folder / note["file"]).read_bytes()).hexdigest()
            noted.append(note["file"])
            previous = line
    assert sorted(noted) == files_in(tmp_path) == [f"{name}.jsonl" for name in ("0", "1", "2.1", "2.2", "2.3", "2")]


def test_the_writer_makes_text_of_ids_without_torch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", fork_server.RealPopen)
    texts = tokenizer()
    texts.save_pretrained(tmp_path)
    dumper = TrajectoryDumper(config_of(tmp_path, tokenizer_path=str(tmp_path)))
    dumper.put(group_of(0, turn_of(texts, TurnRole.PROMPT, "Why?")))
    dumper.flush()
    loaded = Path(f"/proc/{dumper._process.pid}/maps").read_text()
    dumper.close()
    (line,) = lines(tmp_path, "rollout", "0", "0.jsonl")
    assert line["prompt"] == "Why?"
    assert "libtorch" not in loaded and not capfd.readouterr().err


def test_numbers_of_more_than_15_digits_are_names_that_a_user_chose(tmp_path: Path) -> None:
    folder = tmp_path / "rollout" / "0"
    folder.mkdir(parents=True)
    for name in ("7", "9" * 16, "name"):
        (folder / f"{name}.jsonl").touch()
    assert next_task_id(tmp_path) == 8
    (folder / f"{'8' * 15}.jsonl").touch()
    assert next_task_id(tmp_path) == int("8" * 15) + 1
