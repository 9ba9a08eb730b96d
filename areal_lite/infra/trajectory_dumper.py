"""Writes every finished episode as JSONL, off the event loop, and never changes an outcome.

One file per task, ``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``,
one line per sequence; the line's fields are in docs/trajectories.md.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.scalars import scope_name
from areal_lite.api.trajectory import Group, TokenSequence, Trajectory, TurnRole
from areal_lite.data.chat.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

_JSON = orjson.OPT_APPEND_NEWLINE
SCHEMA = 2
"""Version of the line format."""


class TrajectoryDumper:
    """A writer thread with a queue in front.

    Raises:
        ConfigError: If ``config.tokenizer_path`` is given and holds no tokenizer.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.root = config.run_dir
        self.failures = 0
        """Groups that could not be written."""
        self._tokenizer = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
        self._queue: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="areal-lite-dumper", daemon=True)
        self._thread.start()

    def put(self, group: Group) -> None:
        """Queue ``group``; returns at once."""
        self._queue.put(group)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=30)

    def path_of(self, group: Group) -> str:
        """Return the file a group is written to."""
        version = group.start_version if group.tail_version is None else group.tail_version
        return f"{self.root}/{scope_name(group.is_eval)}/{version}/{group.task_id}.jsonl"

    def _main(self) -> None:
        while (group := self._queue.get()) is not None:
            try:
                self._write(group)
            except Exception:  # a failed dump must not fail the run
                self.failures += 1
                if self.failures == 1:
                    logger.exception("episode %s could not be dumped; further failures are only counted", group.task_id)

    def _write(self, group: Group) -> None:
        path = self.path_of(group)
        lines = b"".join(orjson.dumps(line, option=_JSON) for line in dump_lines(group, self._tokenizer))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        try:
            descriptor = os.open(path, flags, 0o644)
        except FileNotFoundError:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, flags, 0o644)
        try:
            if size := os.lseek(descriptor, 0, os.SEEK_END):
                _cut_torn_line(descriptor, size)
            while lines:  # a write may be short
                lines = lines[os.write(descriptor, lines) :]
        finally:
            os.close(descriptor)


def _cut_torn_line(descriptor: int, size: int) -> None:
    """Remove the unfinished last line of a killed run, so that the next line starts at a line break."""
    end = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)


def dump_lines(group: Group, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield one JSON-ready line per sequence, and one per episode that left none, by ``member_idx``."""
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
        ids = [token for turn in turns for token in turn["ids"]]
        prompt_len = trajectory.prompt_len(path)
        versions = sequence.trained_versions() if sequence is not None else None
        failure = trajectory.failure
        yield {
            "schema": SCHEMA,
            "task_id": group.task_id,
            "group_id": group.group_id,
            "sample_idx": sample_idx,
            "member_idx": trajectory.member_idx,
            "status": trajectory.status,
            "error": group.rejection if failure is None else failure.text,
            "error_kind": None if failure is None else failure.kind,
            "error_type": None if failure is None else failure.type or None,
            "seqlen": len(ids),
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


def _turn(trajectory: Trajectory, place: int, sequence: TokenSequence | None, tokenizer: Any) -> dict[str, Any]:
    turn = trajectory.turns[place]
    ids: list[int] = turn.ids.tolist()
    # A turn that several sequences share trains in one of them.
    mask = turn.loss_mask if sequence is None else sequence.loss_mask[turn.start : turn.end]
    line = {
        "role": turn.role,
        "turn_idx": place,
        "parent_idx": turn.parent,
        "start": turn.start,
        "ids": ids,
        "text": turn.text if tokenizer is None else _decode(tokenizer, ids),
        "loss_mask": mask.astype(np.int8).tolist(),
    }
    if turn.role is not TurnRole.ASSISTANT:
        return line
    return line | {
        "logprobs": [0.0] * len(ids) if turn.logprobs is None else turn.logprobs.tolist(),
        "versions": [-1] * len(ids) if turn.versions is None else turn.versions.tolist(),
        "stop_reason": turn.stop_reason,
        "started": turn.started,
        "latency_s": turn.latency_s,
        "agent": turn.agent,
    }


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
