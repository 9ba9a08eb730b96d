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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.episode import EpisodeResult, MemberRecord
from areal_lite.api.io_struct import ModelResponse
from areal_lite.data.tokenizer import load_tokenizer
from areal_lite.infra.workflow_context import scope_name

logger = logging.getLogger(__name__)

SCHEMA = 1
"""Version of the line format."""


class TrajectoryDumper:
    """A writer thread with a queue in front.

    Raises:
        ConfigError: If ``config.tokenizer_path`` is given and holds no tokenizer.
    """

    def __init__(self, config: InferenceEngineConfig) -> None:
        self.root = Path(config.fileroot) / config.experiment_name / config.trial_name
        self.failures = 0
        """Results that could not be written."""
        self._tokenizer = None if config.tokenizer_path is None else load_tokenizer(config.tokenizer_path)
        self._folders: set[Path] = set()
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

    def path_of(self, result: EpisodeResult) -> Path:
        """Return the file a result is written to."""
        version = result.start_version if result.tail_version is None else result.tail_version
        return self.root / scope_name(result.is_eval) / str(version) / f"{result.task_id}.jsonl"

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
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        data = b"".join(orjson.dumps(line) + b"\n" for line in dump_lines(result, self._tokenizer))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def dump_lines(result: EpisodeResult, tokenizer: Any = None) -> Iterator[dict[str, Any]]:
    """Yield one JSON-ready line per sample of ``result``, failed and rejected members included."""
    row = 0
    for sample_idx, (member, has_row) in enumerate(_samples(result)):
        sequence = _row_sequence(result, row) if has_row else _called_sequence(member)
        row += has_row
        ids, mask, logprobs, versions, reward = sequence
        trained = [v for v, m in zip(versions, mask, strict=True) if m and v >= 0]
        turns = _turns(ids, mask, logprobs, versions, member.turns, tokenizer)
        sampled_from = next((turn["start"] for turn in turns if turn["role"] == "assistant"), len(ids))
        prompt_len = mask.index(1) if 1 in mask else sampled_from
        # A member that gave no row has its own end; a member with rows shares the group's.
        status = result.status if has_row else (member.status or result.status)
        yield {
            "schema": SCHEMA,
            "task_id": result.task_id,
            "group_id": result.group_id,
            "sample_idx": sample_idx,
            "member_idx": member.sample_idx,
            "status": status,
            "error": result.error if has_row else (member.error or result.error),
            "seqlen": len(ids),
            "prompt_len": prompt_len,
            "head_version": min(trained, default=None),
            "tail_version": max(trained, default=None),
            "reward": reward,
            "prompt": _decode(tokenizer, ids[:prompt_len]),
            "completion": _decode(tokenizer, ids[prompt_len:]),
            "turns": turns,
            "timings": {
                "queued_s": round(result.queued_s, 6),
                "run_s": round(result.run_s, 6),
                "finished_at": result.finished_at,
            },
            "start_version": result.start_version,
        }


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


_Sequence = tuple[list[int], list[int], list[float], list[int], float | None]


def _row_sequence(result: EpisodeResult, row: int) -> _Sequence:
    assert result.trajectory is not None
    tensors = result.trajectory
    keep = tensors["attention_mask"][row].bool()

    def column(key: str, default: float) -> list[Any]:
        if key not in tensors:
            return [default] * int(keep.sum())
        return tensors[key][row][keep].tolist()  # type: ignore[no-any-return]

    mask = [int(m) for m in column("loss_mask", 0)]
    reward = float(tensors["rewards"][row]) if "rewards" in tensors else None
    return column("input_ids", 0), mask, column("logprobs", 0.0), column("versions", -1), reward


def _called_sequence(member: MemberRecord) -> _Sequence:
    """Return the sequence of a member that gave no row: its last model call, nothing trained."""
    if not member.turns:
        return [], [], [], [], None
    last = member.turns[-1]
    ids = last.input_tokens + last.output_tokens
    return ids, [0] * len(ids), [0.0] * len(ids), [-1] * len(ids), None


def _turns(
    ids: list[int],
    mask: list[int],
    logprobs: list[float],
    versions: list[int],
    calls: Sequence[ModelResponse],
    tokenizer: Any,
) -> list[dict[str, Any]]:
    """Return the spans of a sequence in order: prompt, assistant, environment, assistant, ..."""
    call_at: list[int] = [-2 if m else -1 for m in mask]  # -1 context, -2 trained but no call explains it
    logprobs, versions = list(logprobs), list(versions)
    for index, call in enumerate(calls):
        start, end = call.input_len, call.input_len + call.output_len
        if ids[:start] == call.input_tokens and ids[start:end] == call.output_tokens:
            call_at[start:end] = [index] * call.output_len
            logprobs[start:end] = call.output_logprobs
            versions[start:end] = call.output_versions
    turns: list[dict[str, Any]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end < len(ids) and call_at[end] == call_at[start]:
            continue
        turn: dict[str, Any] = {
            "role": "assistant" if call_at[start] != -1 else "environment" if turns else "prompt",
            "start": start,
            "ids": ids[start:end],
            "text": _decode(tokenizer, ids[start:end]),
            "loss_mask": mask[start:end],
        }
        if call_at[start] != -1:
            turn |= {"logprobs": logprobs[start:end], "versions": versions[start:end]}
        if call_at[start] >= 0:
            call = calls[call_at[start]]
            turn |= {"stop_reason": call.stop_reason, "started": call.started, "latency_s": call.latency}
        turns.append(turn)
        start = end
    return turns


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False)
