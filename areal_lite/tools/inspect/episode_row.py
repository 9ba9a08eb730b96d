"""From one line of a dump to one row of the index; a line of another shape is an error that says where.

Reads schemas 1 and 2. A missing field is None, so that dumps of older versions are read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

SCOPES = ("rollout", "eval-rollout")
"""Folders of a run that hold dumps."""
FACTS = ("trained_step", "advantage", "entropy", "clipped")
"""Columns that :mod:`.index_update` fills from the training facts."""
COLUMNS = (
    *("reward", "status", "tokens", "turns", "version", "trained", "error_kind", "error_type", "stop"),
    *("finished", "run_s", "calls", "task", "group", "scope", "agent", "head", "tail", "start", "member", "sample"),
    *("prompt_len", "queued_s", "took_s", "logprob", "repetition", "tool_calls", *FACTS, "error", "numbers"),
)
"""The columns of a row that come from its line and its folder, those first that filters use most: they cost least.
``stop`` and ``agent`` are JSON lists."""
Row = tuple[Any, ...]


class ShapeError(ValueError):
    """A line that is not one of a dump."""


def row_of(record: Any, scope: str | None, version: int | None) -> Row:
    """Return the values of :data:`COLUMNS`."""
    if not isinstance(record, dict):
        raise ShapeError(f"not an object but {_type(record)}")
    turns = record.get("turns")
    if not isinstance(turns, list):
        raise ShapeError(f"turns is {_type(turns)}, not a list" if "turns" in record else "it has no turns")
    trained, calls = 0, []
    stops: dict[str, None] = {}
    agents: dict[str, None] = {}
    for index, turn in enumerate(turns):
        try:
            trained += _check_turn(turn)
        except ShapeError as error:
            raise ShapeError(f"turn {index}: {error}") from None
        if turn.get("role") == "assistant":
            calls.append(turn)
        for values, name in ((stops, "stop_reason"), (agents, "agent")):
            if (value := turn.get(name)) is not None:
                values[value] = None
    timings, numbers = _value(record, "timings", dict, "an object") or {}, _numbers(record)
    for process in _list(record, "processes"):
        _check_process(process)
    tail = _integer(record, "tail_version")
    start = _integer(record, "start_version")
    if version is None:
        version = start if tail is None else tail
    return (
        *(_number(record, "reward"), _text(record, "status"), _integer(record, "seqlen"), len(turns), version, trained),
        *(_text(record, "error_kind"), _text(record, "error_type"), _json(stops)),
        *(_number(timings, "finished_at"), _number(timings, "run_s"), len(calls), _id(record, "task_id")),
        *(_id(record, "group_id"), scope, _json(agents), _integer(record, "head_version"), tail, start),
        *(_integer(record, "member_idx"), _integer(record, "sample_idx"), _integer(record, "prompt_len")),
        *(_number(timings, "queued_s"), *_of_calls(calls), numbers.get("counts/tool_calls"), *(None for _ in FACTS)),
        *(_text(record, "error"), orjson.dumps(numbers).decode()),
    )


def _of_calls(calls: list[dict[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Return the seconds from the first call to the end of the last, the mean log-prob, and the share of repetition."""
    ends = [(begin, begin + (each.get("latency_s") or 0.0)) for each in calls if (begin := _number(each, "started"))]
    logprobs = [value for each in calls for value in each.get("logprobs") or () if value is not None]
    count = again = 0
    for ids in (each.get("ids") or [] for each in calls):
        count += (size := max(0, len(ids) - 3))
        again += size - len(set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False)))
    return (
        max(end for _, end in ends) - min(begin for begin, _ in ends) if ends else None,
        sum(logprobs) / len(logprobs) if logprobs else None,
        again / count if count else None,
    )


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the counts and the parts of the reward, by the names that filters give them."""
    extra, counts = (_value(record, name, dict, "an object") or {} for name in ("reward_extra", "counts"))
    found = {f"reward/{name}": value for name, value in extra.items()}
    found |= {name if name.startswith("reward/") else f"counts/{name}": value for name, value in counts.items()}
    return {name: value for name, value in found.items() if type(value) in _NUMBERS}


_TURN_TEXTS = ("role", "text", "stop_reason", "agent", "server")
_NUMBERS = {int, float}
_TURN_COLUMNS = {"ids": _NUMBERS, "loss_mask": _NUMBERS, "logprobs": {*_NUMBERS, type(None)}, "versions": _NUMBERS}
"""Types of the entries; a log-prob of null was not recorded."""


def _check_turn(turn: Any) -> int:
    """Check what readers of a turn rely on, and return its trained tokens; written for speed."""
    if type(turn) is not dict:
        raise ShapeError(f"not an object but {_type(turn)}")
    get = turn.get
    for name in _TURN_TEXTS:
        if (value := get(name)) is not None and type(value) is not str:
            raise ShapeError(f"{name} is {_type(value)}, not text")
    for name, types in _TURN_COLUMNS.items():
        if value := get(name):
            if type(value) is not list:
                raise ShapeError(f"{name} is {_type(value)}, not a list")
            if not types.issuperset(map(type, value)):
                raise ShapeError(f"{name} has an entry that is not a number")
    _number(turn, "latency_s")
    mask = get("loss_mask") or ()
    trained = sum(mask)
    if not 0 <= trained <= len(mask):
        raise ShapeError("loss_mask has an entry that is neither 0 nor 1")
    return int(trained)


def _check_process(process: Any) -> None:
    if not isinstance(process, dict):
        raise ShapeError(f"an entry of processes is {_type(process)}, not an object")
    _list(process, "command")
    _number(process, "seconds")
    _text(process, "stdout")
    _text(process, "stderr")


def _list(record: Mapping[str, Any], name: str) -> list[Any]:
    value: list[Any] | None = _value(record, name, list, "a list")
    return [] if value is None else value


def _text(record: Mapping[str, Any], name: str) -> str | None:
    text: str | None = _value(record, name, str, "text")
    return text


def _number(record: Mapping[str, Any], name: str) -> float | None:
    if type(value := record.get(name)) is float:
        return value
    return _integer(record, name, "a number")


def _integer(record: Mapping[str, Any], name: str, what: str = "an integer") -> int | None:
    value = record.get(name)
    if value is None or (type(value) is int and -(2**63) <= value < 2**63):
        return value
    raise ShapeError(f"{name} is {_type(value)}, not {what} of 64 bits")


def _id(record: Mapping[str, Any], name: str) -> int | str | None:
    value: int | str | None = _value(record, name, int | str, "an integer or text")
    return str(value) if isinstance(value, int) and not -(2**63) <= value < 2**63 else value


def _value(record: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    value = record.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    raise ShapeError(f"{name} is {_type(value)}, not {what}")


def _json(values: Mapping[str, None]) -> str | None:
    """Return a list with each value on a line of its own, so that SQL finds a value without reading JSON."""
    lines = "\n,\n".join(orjson.dumps(value).decode() for value in values)
    return f"[\n{lines}\n]" if values else None


_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}


def _type(value: Any) -> str:
    return _NAMES.get(type(value), f"the number {value}")


def text_found(record: Mapping[str, Any], pattern: re.Pattern[str]) -> bool:
    """Return True if the text of any turn matches ``pattern``."""
    return any(turn["text"] is not None and pattern.search(turn["text"]) for turn in record["turns"] if "text" in turn)


def cause(error: str | None, error_type: str | None) -> str | None:
    """Return the line of an error that names the exception, otherwise the last one that says something."""
    lines = [line.strip()[:300] for line in (error or "").splitlines() if line.strip()]
    named = [line for line in lines if error_type and line.startswith(error_type)]
    return [error_type, *lines, *named][-1]
