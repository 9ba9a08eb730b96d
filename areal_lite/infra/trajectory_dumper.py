"""Writes every ended group as JSONL, off the event loop.

A file is one group, ``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``, with one line
per sequence; docs/trajectories.md has the fields. Guarantees that a file is whole or absent and is never written again,
that the queue is bounded, and that a group which the disk did not take is an error.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.scalars import scope_name
from areal_lite.api.trajectory import Group, TokenSequence, Trajectory, TurnRole
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import StorageError

logger = logging.getLogger(__name__)

_JSON = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
SCHEMA = 2
"""Version of the line format."""
MAX_QUEUED = 512
"""Queued groups at which no further group may start; those that run still join the queue."""
REPORT_S = 10.0
"""Seconds between the log lines of a :meth:`TrajectoryDumper.close` that waits."""
STALLED_S = 60.0
"""Seconds without a written group after which :meth:`TrajectoryDumper.close` gives up."""
_MAX_DIGITS = 15
"""Longer numbers are names that a user chose."""
_RECORDED = ("logprobs", "versions")
"""Columns that a workflow may leave out."""
_numbers = itertools.count()


class TrajectoryDumper:
    """A writer thread with a queue in front.

    Args:
        config: Names the folder and the tokenizer.
        on_change: Called by the writer thread when ``behind`` has ended or ``error`` is set.
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
        self._unfinished = f".unfinished-{os.getpid()}-{next(_numbers)}"
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the queue's length and ``behind``
        self._thread = threading.Thread(target=self._main, name="areal-lite-dumper", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """Queue ``group``; returns at once."""
        self._ended += 1
        with self._lock:
            self._queue.put(group)
            self.behind = self.behind or self._queue.qsize() >= MAX_QUEUED
        if self.behind and not self._warned:
            self._warned = True
            logger.warning(
                "rollout waits for the disk: %d ended groups are not yet dumped below %s", self._left, self.root
            )

    def close(self) -> None:
        """Write what is queued and end the thread.

        Raises:
            StorageError: If groups were not written, because the disk failed or stalled.
        """
        self._queue.put(None)
        try:
            self._join()
        except KeyboardInterrupt:
            logger.warning("stopped: %d ended groups are not dumped below %s", self._left, self.root)
            raise
        if self.failures:
            logger.warning("%d ended groups could not be dumped below %s", self.failures, self.root)
        if not self._left:
            return
        missing = f"{self._left} ended groups are not dumped below {self.root}"
        if self.error is None:
            raise StorageError(f"{missing}: the disk took none of them in {STALLED_S:g} s: is it still mounted?")
        self.error.add_note(missing)
        raise self.error

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
        while (group := self._queue.get()) is not None:
            if self.error is not None:
                continue
            self._dump(group)
            with self._lock:
                caught_up = self.behind and self._queue.qsize() <= MAX_QUEUED // 2
                self.behind = self.error is not None or (self.behind and not caught_up)
            if caught_up or self.error is not None:
                self._on_change()

    def _dump(self, group: Group) -> None:
        try:
            records = dump_lines(group, self._tokenizer)
            lines = b"".join(orjson.dumps(line | self._extra, option=_JSON) for line in records)
        except Exception:  # a group without a JSON form must not end the run
            self.failures += 1
            if self.failures == 1:
                logger.exception("episode %s could not be dumped; further failures are only counted", group.task_id)
            return
        version = group.start_version if group.tail_version is None else group.tail_version
        folder = f"{self.root}/{scope_name(group.is_eval)}/{version}"
        try:
            self._write(folder, str(group.task_id), lines)
            self._written += 1
        except OSError as error:
            with contextlib.suppress(OSError):
                Path(folder, self._unfinished).unlink()
            self.error = StorageError(
                f"the dump {folder}/{group.task_id}.jsonl ({len(lines)} bytes) cannot be written: {error.strerror}: "
                "free disk space or fix the folder's permissions, or set rollout.dump_to_file: false"
            )

    def _write(self, folder: str, name: str, lines: bytes) -> None:
        unfinished = f"{folder}/{self._unfinished}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            descriptor = os.open(unfinished, flags, 0o644)
        except FileNotFoundError:
            Path(folder).mkdir(parents=True, exist_ok=True)
            descriptor = os.open(unfinished, flags, 0o644)
        try:
            while lines:  # a write may be short
                lines = lines[os.write(descriptor, lines) :]
        finally:
            os.close(descriptor)
        path, numbers = f"{folder}/{name}.jsonl", itertools.count(1)
        while os.access(path, os.F_OK):  # the user has given an id twice
            path = f"{folder}/{name}.{next(numbers)}.jsonl"
        os.rename(unfinished, path)  # noqa: PTH104 -- a Path costs more than the call


def next_task_id(root: Path) -> int:
    """Return the task id after those of all dumps below ``root``."""
    names = (path.name.partition(".")[0] for path in root.glob("*rollout/*/*.jsonl"))
    return max((int(name) for name in names if name.isdecimal() and len(name) <= _MAX_DIGITS), default=-1) + 1


def dump_lines(group: Group, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield one line per sequence, and one per episode that left none, by ``member_idx``.

    Columns of tokens are arrays, which orjson writes as lists of numbers without making each a Python object.
    """
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
        turns = [_turn(trajectory, place, sequence, tokenizer) for place in path]
        seqlen = sum(len(turn["ids"]) for turn in turns)
        ids = [] if tokenizer is None else [token for turn in turns for token in turn["ids"].tolist()]
        prompt_len = trajectory.prompt_len(path)
        versions = sequence.trained_versions() if sequence is not None else None
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
            "turns": turns,
            "counts": trajectory.counts,
            "processes": [asdict(each) for each in trajectory.processes] if is_first else [],
            "timings": timings,
        }
        if sample_idx == 0:
            line["row"] = _row(group.data)
        if sequence is not None and (missing := [n for n in _RECORDED if getattr(sequence, n) is None]):
            line["missing"] = missing
        yield line


def _row(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the row; None if it has no JSON form."""
    try:
        orjson.dumps(row := dict(data), option=_JSON)
    except TypeError:
        return None
    return row


def _turn(trajectory: Trajectory, place: int, sequence: TokenSequence | None, tokenizer: Any) -> dict[str, Any]:
    turn = trajectory.turns[place]
    ids = np.ascontiguousarray(turn.ids)
    mask, logprobs, versions = turn.loss_mask, turn.logprobs, turn.versions
    if sequence is not None:  # a turn that several sequences share trains in one of them, with that one's columns
        here = slice(turn.start, turn.end)
        mask = sequence.loss_mask[here]
        if mask.any():
            logprobs = logprobs if sequence.logprobs is None else sequence.logprobs[here]
            versions = versions if sequence.versions is None else sequence.versions[here]
    line = {
        "role": turn.role,
        "turn_idx": place,
        "parent_idx": turn.parent,
        "start": turn.start,
        "ids": ids,
        "text": turn.text if tokenizer is None else _decode(tokenizer, ids.tolist()),
        "loss_mask": np.ascontiguousarray(mask, np.int8),
    }
    if turn.role is not TurnRole.ASSISTANT:
        return line
    return line | {
        "logprobs": [0.0] * len(ids) if logprobs is None else np.ascontiguousarray(logprobs, np.float64),
        "versions": [-1] * len(ids) if versions is None else np.ascontiguousarray(versions),
        "stop_reason": turn.stop_reason,
        "started": turn.started,
        "latency_s": turn.latency_s,
        "agent": turn.agent,
    }


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
