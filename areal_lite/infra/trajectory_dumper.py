"""Dumps every ended group as JSONL, off the event loop.

A file is one group, ``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``, with one line
per sequence; docs/trajectories.md has the fields. Guarantees that a file is whole or absent and is never written again,
that the queue is bounded, and that a group which the disk did not take is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import marshal
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal_lite.api.child_process import start_tied
from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.scalars import scope_name
from areal_lite.api.trajectory import Group, TokenSequence, Trajectory, Turn, TurnRole
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import StorageError
from areal_lite.infra import dump_writer

logger = logging.getLogger(__name__)

_JSON = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
SCHEMA = 2
"""Version of the line format."""
MAX_QUEUED = 512
"""Queued groups at which no further group may start; those that run still join the queue."""
GATHER_S = 0.02
"""Seconds in which ended groups gather, unless many wait already: each batch interrupts the event loop."""
BATCH_BYTES = 2**20
"""Text of one batch, beyond one group."""
PIPE_BYTES = 2**20
"""Size of the pipe to the process."""
REPORT_S = 10.0
"""Seconds between the log lines of a :meth:`TrajectoryDumper.close` that waits."""
STALLED_S = 60.0
"""Seconds without a written group after which :meth:`TrajectoryDumper.close` gives up."""
_MAX_DIGITS = 15
"""Longer numbers are names that a user chose."""
_RECORDED = ("logprobs", "versions")
"""Columns that a workflow may leave out."""
File = tuple[str, str, bytes]
"""Folder, name and text of a file."""


class TrajectoryDumper:
    """A thread that makes text of the groups, and a process that writes it (:mod:`areal_lite.infra.dump_writer`).

    Args:
        config: Names the folder and the tokenizer.
        on_change: Called by the thread when ``behind`` has ended or ``error`` is set.
        extra: Written as ``extra`` on every line.

    Raises:
        ConfigError: If ``config.tokenizer_path`` is given and holds no tokenizer.
    """

    def __init__(
        self,
        config: InferenceEngineConfig,
        on_change: Callable[[], object] = lambda: None,
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = config.run_dir
        self.behind = False
        """Whether no group may start: the queue was full and more than half is left, or the disk failed."""
        self.error: StorageError | None = None
        """Why nothing is written any more."""
        self.failures = 0
        """Groups that have no JSON form; they change no outcome."""
        self._ended = self._written = 0
        self._warned = False
        self._on_change = on_change
        self._extra = {} if extra is None else {"extra": dict(extra)}
        self._tokenizer = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
        self._queue: deque[Group] = deque()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._lock = threading.Lock()  # of ``behind``
        reads, writes = os.pipe()
        try:
            command = [sys.executable, "-IS", dump_writer.__file__, str(reads)]
            self._process, self._tie = start_tied(command, pass_fds=[reads], stdout=subprocess.PIPE)
        finally:
            os.close(reads)
        with contextlib.suppress(OSError):  # beyond the user's limit: a batch then wakes both sides for each page
            fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._batches = os.fdopen(writes, "wb")
        self._thread = threading.Thread(target=self._main, name="areal-lite-dumper", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """Queue ``group``; returns at once."""
        self._ended += 1
        self._queue.append(group)
        if not self._wake.is_set():
            self._wake.set()
        if self._left < MAX_QUEUED:
            return
        with self._lock:
            self.behind = self.behind or self._left >= MAX_QUEUED
        if self.behind and not self._warned:
            self._warned = True
            logger.warning(
                "rollout waits for the disk: %d ended groups are not yet dumped below %s", self._left, self.root
            )

    def close(self) -> None:
        """Write what is queued; end thread and process.

        Raises:
            StorageError: If groups were not written, because the disk failed or stalled.
        """
        self._closing.set()
        self._wake.set()
        try:
            self._join()
        except KeyboardInterrupt:
            logger.warning("stopped: %d ended groups are not dumped below %s", self._left, self.root)
            raise
        finally:
            error = self.error
            self._process.kill()  # if it still runs
            os.close(self._tie)
        if self.failures:
            logger.warning("%d ended groups could not be dumped below %s", self.failures, self.root)
        if not self._left:
            return
        missing = f"{self._left} ended groups are not dumped below {self.root}"
        if error is None:
            raise StorageError(f"{missing}: the disk took none of them in {STALLED_S:g} s: is it still mounted?")
        error.add_note(missing)
        raise error

    def _join(self) -> None:
        left, since = self._left, time.monotonic()
        self._thread.join(timeout=1.0)
        while self._thread.is_alive() and time.monotonic() < since + STALLED_S:
            logger.warning("waiting for the disk: %d ended groups are not yet dumped below %s", self._left, self.root)
            self._thread.join(timeout=REPORT_S)
            if self._left < left:
                left, since = self._left, time.monotonic()

    @property
    def _left(self) -> int:
        return self._ended - self._written - self.failures

    def _main(self) -> None:
        while not self._closing.is_set() or self._queue:
            self._wake.wait()
            self._wake.clear()
            if len(self._queue) < MAX_QUEUED // 4:
                self._closing.wait(GATHER_S)
            if files := self._next_batch():
                self._write(files)
            if self._queue:
                self._wake.set()
            with self._lock:
                caught_up = self.behind and self._left <= MAX_QUEUED // 2
                self.behind = self.error is not None or (self.behind and not caught_up)
            if caught_up or self.error is not None:
                self._on_change()
        self._end_process()

    def _next_batch(self) -> list[File]:
        """Take queued groups; return folder, name and text of their files."""
        files: list[File] = []
        size = 0
        while self._queue and size < BATCH_BYTES:
            group = self._queue.popleft()
            if self.error is not None:
                continue
            try:
                records = dump_lines(group, self._tokenizer)
                text = b"".join(orjson.dumps(line | self._extra, option=_JSON) for line in records)
            except Exception:  # a group without a JSON form must not end the run
                self.failures += 1
                if self.failures == 1:
                    logger.exception("episode %s could not be dumped; further failures are only counted", group.task_id)
                continue
            version = group.start_version if group.tail_version is None else group.tail_version
            files.append((f"{self.root}/{scope_name(group.is_eval)}/{version}", str(group.task_id), text))
            size += len(text)
        return files

    def _write(self, files: list[File]) -> None:
        """Have the process write the files; set ``error`` if it cannot."""
        batch, reports = marshal.dumps(files), self._process.stdout
        assert reports is not None
        before = self._written
        try:
            self._batches.write(len(batch).to_bytes(8, "little"))
            self._batches.write(batch)
            self._batches.flush()
            while (done := self._written - before) < len(files):
                report = int(reports.readline())
                if report < 0:
                    folder, name, text = files[done]
                    self.error = StorageError(
                        f"the dump {folder}/{name}.jsonl ({len(text)} bytes) cannot be written: "
                        f"{os.strerror(-report)}: free disk space or fix the folder's permissions, or set "
                        "rollout.dump_to_file: false"
                    )
                    return
                self._written += report
        except (BrokenPipeError, ValueError):
            self.error = StorageError(
                f"the process that writes dumps below {self.root} was killed: free memory, or set "
                "rollout.dump_to_file: false"
            )

    def _end_process(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._process, self._batches:
            self._batches.write(bytes(8))


def next_task_id(root: Path) -> int:
    """Return the task id after those of all dumps below ``root``."""
    names = (path.name.partition(".")[0] for path in root.glob("*rollout/*/*.jsonl"))
    return max((int(name) for name in names if name.isdecimal() and len(name) <= _MAX_DIGITS), default=-1) + 1


def dump_lines(group: Group, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield one line per sequence, and one per episode that left none, by ``member_idx``; orjson writes them."""
    timings = {
        "queued_s": round(group.queued_s, 6),
        "run_s": round(group.run_s, 6),
        "finished_at": group.finished_at,
    }
    lines: Iterator[tuple[Trajectory, TokenSequence | None, bool]]
    lines = ((t, s, i == 0) for t in group.trajectories for i, s in enumerate(t.sequences or (None,)))
    for sample_idx, (trajectory, sequence, is_first) in enumerate(lines):
        if sequence is not None:
            path: Sequence[int] = sequence.path
        else:  # the last thing that happened
            path = trajectory.path_to(len(trajectory.turns) - 1) if trajectory.turns else ()
        turns = [trajectory.turns[place] for place in path]
        seqlen = turns[-1].end if turns else 0
        answers = [turn.start for turn in turns if turn.role is TurnRole.ASSISTANT]
        prompt_len = answers[0] if answers else seqlen
        ids = [] if tokenizer is None else [token for turn in turns for token in turn.ids.tolist()]
        versions = None if sequence is None else sequence.trained_versions()
        failure = trajectory.failure
        line: dict[str, Any] = {
            "schema": SCHEMA,
            "task_id": group.task_id,
            "group_id": group.group_id,
            "sample_idx": sample_idx,
            "member_idx": trajectory.member_idx,
            "status": trajectory.status,
            "error": group.rejection if failure is None else failure.text,
            "error_kind": None if failure is None else failure.kind,
            "error_type": None if failure is None else failure.type or None,
            "seqlen": seqlen,
            "prompt_len": prompt_len,
            "start_version": group.start_version,
            "head_version": versions[0] if versions else None,
            "tail_version": versions[1] if versions else None,
            "reward": None if sequence is None else sequence.reward,
            "prompt": _decode(tokenizer, ids[:prompt_len]),
            "completion": _decode(tokenizer, ids[prompt_len:]),
            "turns": [_turn(turn, place, sequence, tokenizer) for turn, place in zip(turns, path, strict=True)],
            "counts": trajectory.counts,
            "reward_extra": trajectory.reward_extra,
            "processes": [asdict(each) for each in trajectory.processes] if is_first else [],
            "timings": timings,
        }
        if sample_idx == 0:
            line["row"] = _row(group.data)
        if sequence is not None and (missing := [n for n in _RECORDED if getattr(sequence, n) is None]):
            line["missing"] = missing
        yield line


def _row(data: Mapping[str, Any]) -> Any:
    """Return the row for orjson; None if it has no JSON form."""
    try:
        return orjson.Fragment(orjson.dumps(dict(data), option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError:
        return None


def _turn(turn: Turn, place: int, sequence: TokenSequence | None, tokenizer: Any) -> dict[str, Any]:
    loss_mask, logprobs, versions = turn.loss_mask, turn.logprobs, turn.versions
    if sequence is not None:  # a turn that several sequences share trains in one of them, with that one's columns
        here = slice(turn.start, turn.end)
        loss_mask = sequence.loss_mask[here]
        if 1 in loss_mask.tobytes():
            logprobs = logprobs if sequence.logprobs is None else sequence.logprobs[here]
            versions = versions if sequence.versions is None else sequence.versions[here]
    line = {
        "role": turn.role,
        "turn_idx": place,
        "parent_idx": turn.parent,
        "start": turn.start,
        "ids": np.ascontiguousarray(turn.ids),
        "text": turn.text if tokenizer is None else _decode(tokenizer, turn.ids.tolist()),
        "loss_mask": _mask(loss_mask.tobytes()),
    }
    if turn.role is TurnRole.ASSISTANT:
        count = len(turn.ids)
        line["logprobs"] = [0.0] * count if logprobs is None else logprobs.astype(np.float64)
        line["versions"] = [-1] * count if versions is None else np.ascontiguousarray(versions)
        line["stop_reason"], line["started"], line["latency_s"] = turn.stop_reason, turn.started, turn.latency_s
        line["agent"], line["server"] = turn.agent, turn.server
    if sequence is not None and sequence.token_rewards is not None:
        line["rewards"] = sequence.token_rewards[turn.start : turn.end].astype(np.float64)
    return line


def _mask(mask: bytes) -> Any:
    """Return a loss mask for orjson, ready-made if all entries are equal, as in most turns."""
    if 0 in mask and 1 in mask:
        return np.frombuffer(mask, np.int8)
    return orjson.Fragment(b"[%b]" % (b"%d," % (1 in mask) * len(mask))[:-1])


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
