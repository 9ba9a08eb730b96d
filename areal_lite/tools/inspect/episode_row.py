"""From a line of a dump to a row of the index; another shape is an error that says where, a missing field is None."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
import orjson
from pydantic import Field, Strict, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

SCOPES = ("rollout", "eval-rollout")
"""Folders of a run that hold dumps."""
FACTS = ("trained_step", "advantage", "entropy", "clipped")
"""Columns that :mod:`.index_update` fills from the training facts."""
COLUMNS = (
    *("reward", "status", "tokens", "turns", "version", "trained", "error_kind", "error_type", "stop"),
    *("finished", "run_s", "calls", "task", "group", "scope", "agent", "head", "tail", "start", "member", "sample"),
    *("prompt_len", "queued_s", "took_s", "logprob", "repetition", "tool_calls", *FACTS, "error", "numbers", "source"),
    "sequence_reward",
)
"""The columns of a row that come from its line and its folder, those first that filters use most: they cost least.
``stop`` and ``agent`` are JSON lists."""
Row = tuple[Any, ...]
_LONG = 2**63
_Integer = Annotated[int, Strict(), Field(ge=-_LONG, lt=_LONG)]
_Mask = Annotated[float, Strict(), Field(ge=0, le=1)]


class ShapeError(ValueError):
    """A line that is not one of a dump."""


@dataclass(kw_only=True, slots=True)
class _Turn:
    role: StrictStr | None = None
    text: StrictStr | None = None
    stop_reason: StrictStr | None = None
    agent: StrictStr | None = None
    server: StrictStr | None = None
    started: StrictFloat | None = None
    latency_s: StrictFloat | None = None
    ids: Annotated[list[StrictInt], Field(fail_fast=True)] | None = None
    loss_mask: Annotated[list[_Mask], Field(fail_fast=True)] | None = None
    logprobs: Annotated[list[StrictFloat | None], Field(fail_fast=True)] | None = None
    versions: Annotated[list[StrictInt], Field(fail_fast=True)] | None = None


@dataclass(kw_only=True, slots=True)
class _Process:
    command: list[Any] | None = None
    seconds: StrictFloat | None = None
    stdout: StrictStr | None = None
    stderr: StrictStr | None = None


@dataclass(kw_only=True, slots=True)
class _Timings:
    finished_at: StrictFloat | None = None
    run_s: StrictFloat | None = None
    queued_s: StrictFloat | None = None


@dataclass(kw_only=True, slots=True)
class _Line:
    """What readers of a dump rely on."""

    turns: Annotated[list[_Turn], Field(fail_fast=True)]
    processes: Annotated[list[_Process], Field(fail_fast=True)] | None = None
    timings: _Timings | None = None
    reward: StrictFloat | None = None
    episode_reward: StrictFloat | None = None
    reward_extra: dict[str, Any] | None = None
    counts: dict[str, Any] | None = None
    status: StrictStr | None = None
    error: StrictStr | None = None
    error_kind: StrictStr | None = None
    error_type: StrictStr | None = None
    task_id: StrictInt | StrictStr | None = None
    group_id: StrictInt | StrictStr | None = None
    seqlen: _Integer | None = None
    prompt_len: _Integer | None = None
    head_version: _Integer | None = None
    tail_version: _Integer | None = None
    start_version: _Integer | None = None
    member_idx: _Integer | None = None
    sample_idx: _Integer | None = None


_LINE = TypeAdapter(_Line)


def row_of(record: Any, scope: str | None, version: int | None, source: str | None = None) -> Row:
    """Return the values of :data:`COLUMNS`; ``source`` is the last one in the file, for a line without its row."""
    try:
        line = _LINE.validate_python(record)
    except ValidationError as error:
        raise ShapeError(_first(error)) from None
    if "row" in record:
        found = record["row"].get("data_source") if isinstance(record["row"], dict) else None
        source = found if isinstance(found, str) else None
    calls = [turn for turn in line.turns if turn.role == "assistant"]
    timings, numbers = line.timings or _Timings(), _numbers(line)
    if version is None:
        version = line.start_version if line.tail_version is None else line.tail_version
    trained = int(sum(sum(turn.loss_mask or ()) for turn in line.turns))
    reward = line.reward if line.episode_reward is None else line.episode_reward
    return (
        *(reward, line.status, line.seqlen, len(line.turns), version, trained, line.error_kind, line.error_type),
        *(_json(turn.stop_reason for turn in line.turns), timings.finished_at, timings.run_s, len(calls)),
        *(_id(line.task_id), _id(line.group_id), scope, _json(turn.agent for turn in line.turns)),
        *(line.head_version, line.tail_version, line.start_version, line.member_idx, line.sample_idx, line.prompt_len),
        *(timings.queued_s, *_of_calls(calls), numbers.get("counts/tool_calls"), *(None for _ in FACTS), line.error),
        *(orjson.dumps(numbers).decode(), source, line.reward),
    )


def _first(error: ValidationError) -> str:
    """Return the first fault of a line: its place, its value and the rule."""
    fault = error.errors(include_url=False)[0]
    value = "" if fault["type"] == "missing" else f"{fault['input']!r:.80}: "
    place = ".".join(map(str, fault["loc"]))
    return f"{place}: {value}{fault['msg'].replace('Input should', 'it must')}".removeprefix(": ")


def _of_calls(calls: list[_Turn]) -> tuple[float | None, float | None, float | None]:
    """Return the seconds from the first call to the end of the last, the mean log-prob, and the share of repetition."""
    ends = [(each.started, each.started + (each.latency_s or 0.0)) for each in calls if each.started]
    logprobs = [value for each in calls for value in each.logprobs or () if value is not None]
    count = again = 0
    for ids in (each.ids or [] for each in calls):
        count += (size := max(0, len(ids) - 3))
        again += size - len(set(zip(ids, ids[1:], ids[2:], ids[3:], strict=False)))
    return (
        max(end for _, end in ends) - min(begin for begin, _ in ends) if ends else None,
        sum(logprobs) / len(logprobs) if logprobs else None,
        again / count if count else None,
    )


def _numbers(line: _Line) -> dict[str, float]:
    """Return the counts and the parts of the reward, by the names that filters give them."""
    found = {f"reward/{name}": value for name, value in (line.reward_extra or {}).items()}
    counts = (line.counts or {}).items()
    found |= {name if name.startswith("reward/") else f"counts/{name}": value for name, value in counts}
    return {name: value for name, value in found.items() if type(value) in (int, float)}


def _id(value: int | str | None) -> int | str | None:
    return str(value) if isinstance(value, int) and not -_LONG <= value < _LONG else value


def _json(values: Iterable[str | None]) -> str | None:
    """Return a list with each value on a line of its own, so that SQL finds a value without reading JSON."""
    lines = "\n,\n".join(orjson.dumps(value).decode() for value in dict.fromkeys(values) if value is not None)
    return f"[\n{lines}\n]" if lines else None


def text_found(record: Mapping[str, Any], pattern: re.Pattern[str]) -> bool:
    """Return True if the text of any turn matches ``pattern``."""
    return any(turn["text"] is not None and pattern.search(turn["text"]) for turn in record["turns"] if "text" in turn)


def cause(error: str | None, error_type: str | None) -> str | None:
    """Return the line of an error that names the exception, otherwise the last one that says something."""
    lines = [line.strip()[:300] for line in (error or "").splitlines() if line.strip()]
    return [error_type, *lines, *[line for line in lines if error_type and line.startswith(error_type)]][-1]
