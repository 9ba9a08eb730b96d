"""Dumped lines of made-up episodes, and a filter's meaning in plain Python."""

from __future__ import annotations
import json
import re
from pathlib import Path
from typing import Any
from areal_lite.tools.inspect.filters import Both, Expr, Kind, Not, Term

Line = dict[str, Any]


def turn(role: str, text: str | None = "hi", tokens: int = 2, **values: Any) -> dict[str, Any]:
    mask = [int(role == "assistant")] * tokens
    line = {"role": role, "turn_idx": 0, "parent_idx": None, "start": 0, "ids": list(range(tokens))}
    line |= {"text": text, "loss_mask": mask}
    if role == "assistant":
        line |= {"logprobs": [-0.5] * tokens, "versions": [3] * tokens, "stop_reason": "stop", "agent": None}
    return line | values


def line(task: int | str = 7, sample: int = 0, **values: Any) -> Line:
    """Return a line of schema 2."""
    return {
        "schema": 2,
        "task_id": task,
        "group_id": str(task),
        "sample_idx": sample,
        "member_idx": sample,
        "status": "accepted",
        "error": None,
        "error_kind": None,
        "error_type": None,
        "seqlen": 4,
        "prompt_len": 2,
        "start_version": 3,
        "head_version": 3,
        "tail_version": 3,
        "reward": 0.5,
        "prompt": "2+2?",
        "completion": "4",
        "turns": [turn("prompt", "2+2?"), turn("assistant", "It is 4")],
        "counts": {},
        "processes": [],
        "timings": {"queued_s": 0.0, "run_s": 1.5, "finished_at": 100.0 + sample},
    } | values


def failed(task: int | str = 7, sample: int = 0, **values: Any) -> Line:
    error = "Traceback (most recent call last):\n  File x\nTimeoutError: too slow\n"
    cause = {"error": error, "error_kind": "agent", "error_type": "TimeoutError"}
    return line(task, sample, status="failed", reward=None, head_version=None, tail_version=None, **cause) | values


def schema_1(task: int | str = 7, sample: int = 0, **values: Any) -> Line:
    old = line(task, sample)
    for name in ("error_kind", "error_type", "counts", "processes"):
        del old[name]
    for each in old["turns"]:
        for name in ("turn_idx", "parent_idx", "agent"):
            each.pop(name, None)
    return old | {"schema": 1} | values


def write(path: Path, *lines: Line, tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines) + tail)
    return path


def holds(expr: Expr, record: Line, *, scope: str | None, version: int, file: str, run: str) -> bool:
    """Return whether a filter holds for a raw line, without an index."""
    place = {"scope": scope, "version": version, "file": file, "run": run}
    if isinstance(expr, Not):
        return not holds(expr.part, record, **place)
    if isinstance(expr, Both):
        return (any if expr.either else all)(holds(part, record, **place) for part in expr.parts)
    return _term_holds(expr, record, place)


def _term_holds(term: Term, record: Line, place: dict[str, Any]) -> bool:
    if term.op.startswith("!"):
        return not _term_holds(Term(term.key, term.op[1:], term.value), record, place)
    value = values_of(term.key.name, record, place)
    if term.value is None:
        return value is None or value == []
    if value is None:
        return False
    if term.key.kind is Kind.NUMBER:
        wanted = float(term.value)
        return {"=": value == wanted, "<": value < wanted, "<=": value <= wanted}.get(
            term.op, value > wanted if term.op == ">" else value >= wanted
        )
    texts = [str(each) for each in (value if isinstance(value, list) else [value])]
    if term.op == "=":
        return str(term.value) in texts
    return any(re.search(str(term.value), text) for text in texts)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _repetition(answers: list[list[int]]) -> float | None:
    again = [ids[at : at + 4] in [ids[n : n + 4] for n in range(at)] for ids in answers for at in range(len(ids) - 3)]
    return _mean(list(map(float, again)))


def values_of(name: str, record: Line, place: dict[str, Any]) -> Any:
    turns = record["turns"]
    special = {
        "reward": lambda: record["reward"] if record.get("episode_reward") is None else record["episode_reward"],
        "sequence_reward": lambda: record["reward"],
        "tokens": lambda: record["seqlen"],
        "trained": lambda: sum(sum(each["loss_mask"]) for each in turns),
        "turns": lambda: len(turns),
        "calls": lambda: sum(each["role"] == "assistant" for each in turns),
        "text": lambda: [each["text"] for each in turns if each["text"] is not None],
        "stop": lambda: [each["stop_reason"] for each in turns if each.get("stop_reason")],
        "agent": lambda: [each["agent"] for each in turns if each.get("agent")],
        "source": lambda: (record.get("row") or {}).get("data_source"),
        "finished": lambda: record["timings"]["finished_at"],
        "run_s": lambda: record["timings"]["run_s"],
        "queued_s": lambda: record["timings"]["queued_s"],
        "took_s": lambda: None,  # the drawn turns have no times
        "logprob": lambda: _mean([v for each in turns for v in each.get("logprobs") or [] if v is not None]),
        "repetition": lambda: _repetition([each["ids"] for each in turns if each["role"] == "assistant"]),
        "tool_calls": lambda: record.get("counts", {}).get("tool_calls"),
        **dict.fromkeys(("trained_step", "advantage", "entropy", "clipped"), lambda: None),
    }
    if name in place:
        return place[name]
    if name in special:
        return special[name]()
    dumped = {"start": "start_version", "head": "head_version", "tail": "tail_version", "task": "task_id"}
    dumped |= {"group": "group_id", "member": "member_idx", "sample": "sample_idx"}
    return record.get(dumped.get(name, name))
