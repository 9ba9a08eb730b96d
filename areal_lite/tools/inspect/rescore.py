"""``areal-lite rescore``: what another reward function gives to dumped episodes, against their rewards.

Guarantees that nothing is written, that a failed reward is a failure and never a 0, and that a function which takes the
dataset row gets the dumped one.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_lite.api import episode_context
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.config.dotted_path import load_object
from areal_lite.config.loader import load_recorded
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import EpisodeError
from areal_lite.files.safe_text import printable
from areal_lite.tools.foreign_files import open_inside
from areal_lite.tools.inspect.dumps import Dumps, dataset_row
from areal_lite.tools.inspect.episode_text import json_line, print_note
from areal_lite.tools.inspect.last_answer import UNREADABLE, Answer, last_answer, run_tokenizer
from areal_lite.tools.inspect.terminal import add_selection

Record = Mapping[str, Any]
ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids")
"""Positional arguments of a reward function; the row's other columns are passed by name."""
MAX_VALUES = 10
"""Most distinct rewards of a confusion table."""
_AT_ONCE = 256


@dataclass(slots=True)
class Rescored:
    """Old and new rewards."""

    pairs: list[tuple[float | None, float]] = field(default_factory=list)
    """Old reward, None if the dump has none, and new one."""
    errors: Counter[str] = field(default_factory=Counter)
    """Calls of the reward function that failed, by cause."""
    skipped: int = 0
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Scores dumped episodes with another reward function; changes nothing. See docs/verify.md."
    add_selection(parser)
    add = parser.add_argument
    add("--reward", required=True, metavar="PKG.FN", help="fn(prompt, completion, prompt_ids, completion_ids, **row)")
    add("--json", action="store_true", help="one JSON object per episode")


def run(options: argparse.Namespace) -> int:
    result = Rescored()
    with Dumps.open(options.path) as dumps:
        for record, new in scored(dumps, options.reward, result, filter=" ".join(options.filter)):
            _keep(result, record, new, json=options.json)
        result.notes += dumps.notes()
    for note in result.notes:
        print_note(note)
    if result.errors and not result.pairs:
        raise EpisodeError(f"{options.reward} failed for every episode: {_causes(result)}")
    if not options.json:
        _print(result, Console(highlight=False))
    return 0


def scored(
    dumps: Dumps, reward: str, result: Rescored, *, filter: str = ""
) -> Iterator[tuple[Record, float | Exception]]:
    """Yield each dumped line with its new reward, or with what the reward function raised."""
    takes_row = _takes_row(load_object(reward, where="--reward"))
    score = AsyncRewardWrapper(reward)
    keys = {run: _reward_key(root) for run, root in dumps.runs.items()}
    tokenizers = {run: run_tokenizer(root) for run, root in dumps.runs.items()}
    missing = [run for run, tokenizer in tokenizers.items() if tokenizer is None]
    result.notes += [f"{run}: the run's tokenizer is not here, so answers show their special tokens" for run in missing]
    records = dumps.records(dumps.rows(filter))

    async def one(record: Record, answer: Answer, row: Mapping[str, Any]) -> float | Exception:
        episode_context.enter(EpisodeContext(reward_key=keys[record["run"]]))
        named = {name: value for name, value in row.items() if name not in (*ARGUMENTS, "raw_prompt_ids")}
        try:
            new = await score(answer.prompt, answer.completion, answer.prompt_ids, answer.completion_ids, **named)
            return math.fsum(new) if isinstance(new, list) else new
        except Exception as error:  # of the user's function
            return error

    async def all_of(calls: Iterable[tuple[Record, Answer, Mapping[str, Any]]]) -> list[float | Exception]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*call)) for call in calls]
        return [task.result() for task in tasks]

    with asyncio.Runner() as runner:
        while chunk := list(itertools.islice(records, _AT_ONCE)):
            answers = [last_answer(record, tokenizers[record["run"]]) for record in chunk]
            result.skipped += answers.count(None)
            calls = [
                (record, answer, dataset_row(dumps, record) if takes_row else {})
                for record, answer in zip(chunk, answers, strict=True)
                if answer is not None
            ]
            yield from zip((record for record, *_ in calls), runner.run(all_of(calls)), strict=True)


def _keep(result: Rescored, record: Record, new: float | Exception, *, json: bool) -> None:
    old, error = record.get("reward"), None
    if isinstance(new, Exception):
        error = f"{type(new).__name__}: {new}"
        result.errors[error] += 1
    else:
        result.pairs.append((old, new))
    if json:
        origin = {name: record.get(name) for name in ("run", "id", "task_id", "group_id", "member_idx", "status")}
        print(json_line(origin | {"old": old, "new": None if error else new, "error": error}))


def _takes_row(function: Any) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return True
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    return len(parameters) > len(ARGUMENTS) or any(parameter.kind in named for parameter in parameters)


def _reward_key(root: Path) -> str | None:
    """Return ``rollout.rewards.key`` of a run; None if its config cannot be read."""
    with suppress(*UNREADABLE):
        return load_recorded(root, open_inside, root=RunConfig).rollout.rewards.key
    return None


def _print(result: Rescored, console: Console) -> None:
    pairs = [(old, new) for old, new in result.pairs if old is not None]
    new_only = len(result.pairs) - len(pairs)
    counts = Counter(pairs)
    olds, news = ({pair[side] for pair in counts} for side in (0, 1))
    if pairs and max(len(olds), len(news)) <= MAX_VALUES:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in ("old \\ new", *(f"{new:g}" for new in sorted(news))):
            table.add_column(name, justify="right")
        for old in sorted(olds):
            table.add_row(f"{old:g}", *(str(counts[old, new]) for new in sorted(news)))
        console.print(table)
    elif pairs:
        console.print(f"correlation {_correlation(pairs)}")
    if pairs:
        old_mean, new_mean = (statistics.fmean(side) for side in zip(*pairs, strict=True))
        changed = sum(old != new for old, new in pairs)
        console.print(f"mean {old_mean:.3f} -> {new_mean:.3f}; {changed} of {len(pairs)} rewards changed")
    if new_only:
        mean = statistics.fmean(new for old, new in result.pairs if old is None)
        console.print(f"{new_only} episodes without a reward get {mean:.3f} on average")
    if result.skipped:
        console.print(f"{result.skipped} lines have no answer to score")
    if result.errors:
        console.print(f"{result.errors.total()} rewards failed: {printable(_causes(result))}", markup=False)
    if not result.pairs:
        console.print("nothing to score")


def _correlation(pairs: list[tuple[float, float]]) -> str:
    try:
        value = statistics.correlation(*(list(side) for side in zip(*pairs, strict=True)))
    except statistics.StatisticsError:  # of one pair, or of equal values
        value = math.nan
    return "unknown: all values of one side are equal" if math.isnan(value) else f"{value:.3f}"


def _causes(result: Rescored) -> str:
    return "; ".join(f"{count} x {cause}" for cause, count in result.errors.most_common(3))
