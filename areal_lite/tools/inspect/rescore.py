"""``areal-lite rescore``: what another reward function gives to dumped episodes, against their rewards.

Guarantees that nothing is written, a failed reward never counts as 0, and a function's dataset row is the dumped one.
"""

import argparse
import asyncio
import inspect
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
Scored = float | Exception | None
ARGUMENTS = ("prompt", "completion", "prompt_ids", "completion_ids")
"""Positional arguments of a reward function; the row's other columns are passed by name."""
MAX_VALUES = 10
"""Most distinct rewards of a confusion table."""
_AT_ONCE = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Scores dumped episodes with another reward function; changes nothing. See docs/verify.md."
    add_selection(parser)
    add = parser.add_argument
    add("--reward", required=True, metavar="PKG.FN", help="fn(prompt, completion, prompt_ids, completion_ids, **row)")
    add("--json", action="store_true", help="one JSON object per episode")


def run(options: argparse.Namespace) -> int:
    pairs: list[tuple[float | None, float]] = []
    errors, skipped, notes = Counter[str](), 0, list[str]()
    with Dumps.open(options.path) as dumps:
        for record, new in scored(dumps, options.reward, notes, filter=" ".join(options.filter)):
            old, error = record.get("reward"), None
            if new is None:
                skipped += 1
                continue
            if isinstance(new, Exception):
                error = f"{type(new).__name__}: {new}"
                errors[error] += 1
            else:
                pairs.append((old, new))
            if options.json:
                names = ("run", "id", "task_id", "group_id", "member_idx", "status")
                origin = {name: record.get(name) for name in names}
                print(json_line(origin | {"old": old, "new": None if error else new, "error": error}))
        notes += dumps.notes()
    for note in notes:
        print_note(note)
    causes = "; ".join(f"{count} x {cause}" for cause, count in errors.most_common(3))
    if errors and not pairs:
        raise EpisodeError(f"{options.reward} failed for every episode: {causes}")
    if not options.json:
        console = Console(highlight=False)
        _print(pairs, console)
        if skipped:
            console.print(f"{skipped} lines have no answer to score")
        if errors:
            console.print(f"{errors.total()} rewards failed: {printable(causes)}", markup=False)
        if not pairs:
            console.print("nothing to score")
    return 0


def scored(dumps: Dumps, reward: str, notes: list[str], *, filter: str = "") -> Iterator[tuple[Record, Scored]]:
    """Yield each dumped line with its new reward, what the reward function raised, or None without an answer."""
    takes_row = _takes_row(load_object(reward, where="--reward"))
    score = AsyncRewardWrapper(reward)
    keys = {run: _reward_key(root) for run, root in dumps.runs.items()}
    tokenizers = {run: run_tokenizer(root) for run, root in dumps.runs.items()}
    missing = [run for run, tokenizer in tokenizers.items() if tokenizer is None]
    notes += [f"{run}: the run's tokenizer is not here, so answers show their special tokens" for run in missing]
    records = dumps.records(dumps.rows(filter))

    async def one(record: Record, answer: Answer | None, row: Mapping[str, Any]) -> Scored:
        if answer is None:
            return None
        episode_context.enter(EpisodeContext(reward_key=keys[record["run"]]))
        named = {name: value for name, value in row.items() if name not in (*ARGUMENTS, "raw_prompt_ids")}
        try:
            new = await score(answer.prompt, answer.completion, answer.prompt_ids, answer.completion_ids, **named)
            return math.fsum(new) if isinstance(new, list) else new
        except Exception as error:  # of the user's function
            return error

    async def all_of(calls: Iterable[tuple[Record, Answer | None, Mapping[str, Any]]]) -> list[Scored]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*call)) for call in calls]
        return [task.result() for task in tasks]

    with asyncio.Runner() as runner:
        while chunk := list(itertools.islice(records, _AT_ONCE)):
            answers = [last_answer(record, tokenizers[record["run"]]) for record in chunk]
            calls = [
                (record, answer, dataset_row(dumps, record) if takes_row and answer else {})
                for record, answer in zip(chunk, answers, strict=True)
            ]
            yield from zip(chunk, runner.run(all_of(calls)), strict=True)


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


def _print(rewards: list[tuple[float | None, float]], console: Console) -> None:
    """Print how the new rewards of ``(old, new)`` compare with the old ones, which may be None."""
    pairs = [(old, new) for old, new in rewards if old is not None]
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
    if first := [new for old, new in rewards if old is None]:
        console.print(f"{len(first)} episodes without a reward get {statistics.fmean(first):.3f} on average")


def _correlation(pairs: list[tuple[float, float]]) -> str:
    try:
        value = statistics.correlation(*(list(side) for side in zip(*pairs, strict=True)))
    except statistics.StatisticsError:  # of one pair, or of equal values
        value = math.nan
    return "unknown: all values of one side are equal" if math.isnan(value) else f"{value:.3f}"
