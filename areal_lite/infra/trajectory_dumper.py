"""Writes every finished episode as JSONL, off the event loop, and never changes an outcome.

One file per task, ``{fileroot}/{experiment}/{trial}/[rollout|eval-rollout]/{version}/{task_id}.jsonl``,
one line per sample; the line's fields are in docs/trajectories.md. Structure comes from the recorded
model calls, matched to the sequence token by token; only tokens that no call explains are told apart
by the loss mask.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import orjson

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.episode import EpisodeResult, MemberRecord
from areal_lite.api.io_struct import ModelResponse
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.infra.workflow_context import scope_name

logger = logging.getLogger(__name__)

_JSON = orjson.OPT_APPEND_NEWLINE
SCHEMA = 1
"""Version of the line format."""


class TrajectoryDumper:
    """A writer thread with a queue in front.

    Raises:
        ConfigError: If ``config.tokenizer_path`` is given and holds no tokenizer.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.root = config.run_dir
        self.failures = 0
        """Results that could not be written."""
        self._tokenizer = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
        self._queue: queue.SimpleQueue[EpisodeResult | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="areal-lite-dumper", daemon=True)
        self._thread.start()

    def put(self, result: EpisodeResult) -> None:
        """Queue ``result``; returns at once."""
        self._queue.put(result)

    def close(self) -> None:
        """Write what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join(timeout=30)

    def path_of(self, result: EpisodeResult) -> str:
        """Return the file a result is written to."""
        version = result.start_version if result.tail_version is None else result.tail_version
        return f"{self.root}/{scope_name(result.is_eval)}/{version}/{result.task_id}.jsonl"

    def _main(self) -> None:
        while (result := self._queue.get()) is not None:
            try:
                self._write(result)
            except Exception:  # an observer's fault must not reach the run
                self.failures += 1
                if self.failures == 1:
                    logger.exception(
                        "episode %s could not be dumped; further failures are only counted", result.task_id
                    )

    def _write(self, result: EpisodeResult) -> None:
        path = self.path_of(result)
        lines = b"".join(orjson.dumps(line, option=_JSON) for line in dump_lines(result, self._tokenizer))
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
    """Remove what a killed run left of its last line, or the next one would be glued to it."""
    end = os.pread(descriptor, size, 0).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)


def dump_lines(result: EpisodeResult, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield one JSON-ready line per sample of ``result``, failed and rejected members included."""
    rows = _rows(result)
    timings = {
        "queued_s": round(result.queued_s, 6),
        "run_s": round(result.run_s, 6),
        "finished_at": result.finished_at,
    }
    for sample_idx, (member, has_row) in enumerate(_samples(result)):
        # A member that gave no row has its own end; a member with rows shares the group's.
        sequence = next(rows) if has_row else _called_sequence(member)
        ids, mask = sequence.ids, sequence.mask
        turns = _turns(sequence, member.turns, tokenizer)
        try:
            prompt_len = mask.index(1)
        except ValueError:  # nothing is trained: up to what was sampled first
            prompt_len = next((turn["start"] for turn in turns if turn["role"] == "assistant"), len(ids))
        only_row = has_row and len(result.members) == member.num_rows == 1
        versions = (result.head_version, result.tail_version) if only_row else sequence.trained_versions()
        yield {
            "schema": SCHEMA,
            "task_id": result.task_id,
            "group_id": result.group_id,
            "sample_idx": sample_idx,
            "member_idx": member.sample_idx,
            "status": result.status if has_row else (member.status or result.status),
            "error": result.error if has_row else (member.error or result.error),
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "start_version": result.start_version,
            "head_version": versions[0],
            "tail_version": versions[1],
            "reward": sequence.reward,
            "prompt": _decode(tokenizer, ids[:prompt_len]),
            "completion": _decode(tokenizer, ids[prompt_len:]),
            "turns": turns,
            "timings": timings,
        }


@dataclass(slots=True)
class _Sequence:
    """One row without its padding: ids and mask as lists, other columns when asked for."""

    ids: list[int]
    mask: list[int]
    reward: float | None = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    row: int = 0
    keep: Any = None
    """Where tokens are, if there is padding."""

    def column(self, key: str, default: float) -> list[Any]:
        """Return a per-token column, ``default`` everywhere where the workflow gave none."""
        if key not in self.tensors:
            return [default] * len(self.ids)
        values = self.tensors[key].numpy()[self.row]
        return (values if self.keep is None else values[self.keep]).tolist()  # type: ignore[no-any-return]

    def trained_versions(self) -> tuple[int | None, int | None]:
        """Return (oldest, newest) version of the trained tokens."""
        trained = set(compress(self.column("versions", -1), self.mask)) - {-1}
        return min(trained, default=None), max(trained, default=None)


def _samples(result: EpisodeResult) -> Iterator[tuple[MemberRecord, bool]]:
    rows_left = 0 if result.trajectory is None else int(result.trajectory["input_ids"].shape[0])
    for member in result.members:
        count = min(member.num_rows, rows_left)
        for _ in range(count):
            yield member, True
        rows_left -= count
        if count == 0:
            yield member, False
    for _ in range(rows_left):  # a workflow of groups of its own, unknown to the record
        yield result.members[-1], True


def _rows(result: EpisodeResult) -> Iterator[_Sequence]:
    """Yield the rows of the trajectory without their padding."""
    tensors = result.trajectory
    if tensors is None:
        return
    attention = tensors["attention_mask"].numpy()
    padded = not attention.all()
    ids, rewards = tensors["input_ids"].tolist(), result.rewards
    masks = tensors["loss_mask"].tolist() if "loss_mask" in tensors else [[0] * len(row) for row in ids]
    for row, (row_ids, mask) in enumerate(zip(ids, masks, strict=True)):
        keep = attention[row] != 0 if padded else None
        if keep is not None:
            row_ids, mask = list(compress(row_ids, keep)), list(compress(mask, keep))
        if type(mask[0]) is bool:
            mask = list(map(int, mask))
        yield _Sequence(row_ids, mask, rewards[row] if rewards else None, tensors, row, keep)


def _called_sequence(member: MemberRecord) -> _Sequence:
    """Return the sequence of a member that gave no row: its last model call, nothing trained."""
    ids = [t for turn in member.turns[-1:] for t in turn.input_tokens + turn.output_tokens]
    return _Sequence(ids, [0] * len(ids))


def _turns(sequence: _Sequence, calls: Sequence[ModelResponse], tokenizer: Any) -> list[dict[str, Any]]:
    """Return the spans of a sequence in order: prompt, assistant, environment, assistant, ..."""
    ids = sequence.ids
    turns: list[dict[str, Any]] = []

    def add(role: str, start: int, end: int, **more: Any) -> None:
        turns.append(
            {
                "role": role,
                "start": start,
                "ids": ids[start:end],
                "text": _decode(tokenizer, ids[start:end]),
                "loss_mask": sequence.mask[start:end],
                **more,
            }
        )

    def add_unexplained(start: int, end: int) -> None:
        while start < end:
            trained = sequence.mask[start]
            try:
                stop = sequence.mask.index(1 - trained, start, end)
            except ValueError:
                stop = end
            if trained:
                logprobs, versions = sequence.column("logprobs", 0.0), sequence.column("versions", -1)
                add("assistant", start, stop, logprobs=logprobs[start:stop], versions=versions[start:stop])
            else:
                add("environment" if turns else "prompt", start, stop)
            start = stop

    at = 0
    for call in sorted(calls, key=lambda c: c.input_len):
        start, end = call.input_len, call.input_len + call.output_len
        if start < at or ids[:start] != call.input_tokens or ids[start:end] != call.output_tokens:
            continue  # a call of another branch
        add_unexplained(at, start)
        add(
            "assistant",
            start,
            end,
            logprobs=call.output_logprobs,
            versions=call.output_versions,
            stop_reason=call.stop_reason,
            started=call.started,
            latency_s=call.latency,
        )
        at = end
    add_unexplained(at, len(ids))
    return turns


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
