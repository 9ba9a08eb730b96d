"""``areal-lite rescore``: what another reward function gives to dumped episodes, against their rewards.

Guarantees that nothing is written, that a failed reward is a failure and never a 0, and that a dataset row is passed
only if it is certainly the episode's: dumps do not hold rows, so they are found by the tokens of their prompt.
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

from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import UntrustedError, load_object
from areal_lite.config.loader import load_config, load_recorded
from areal_lite.config.run_config import RunConfig
from areal_lite.data.packer.data_packer import UnpreparedRow
from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.files.safe_text import printable
from areal_lite.tools.argument_types import add_trust
from areal_lite.tools.foreign_files import open_inside
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_text import json_line, print_note
from areal_lite.tools.inspect.last_answer import CONFIG, UNREADABLE, Answer, last_answer, run_tokenizer
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
    add("--dataset", type=Path, metavar="CONFIG", help="config with the dataset rows (default: RUN/config.yaml)")
    add("--json", action="store_true", help="one JSON object per episode")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    rows = {"dataset": options.dataset, "trust_config": options.trust_config}
    rescore(options.path, options.reward, filter=" ".join(options.filter), json=options.json, **rows)
    return 0


def rescore(path: Path, reward: str, *, filter: str = "", json: bool = False, **rows: Any) -> Rescored:
    """Print old against new rewards, or with ``json`` one object per episode; ``rows`` as for :func:`scored`."""
    result = Rescored()
    with Dumps.open(path) as dumps:
        for record, new in scored(dumps, reward, result, filter=filter, **rows):
            _keep(result, record, new, json=json)
        result.notes += dumps.notes()
    for note in result.notes:
        print_note(note)
    if result.errors and not result.pairs:
        raise EpisodeError(f"{reward} failed for every episode: {_causes(result)}")
    if not json:
        _print(result, Console(highlight=False))
    return result


def scored(
    dumps: Dumps,
    reward: str,
    result: Rescored,
    *,
    filter: str = "",
    dataset: Path | None = None,
    trust_config: bool = False,
) -> Iterator[tuple[Record, float | Exception]]:
    """Yield each dumped line with its new reward, or with what the reward function raised. Rows for a function that
    takes one are those of the config ``dataset``, or with ``trust_config`` of the run's own."""
    takes_row = _takes_row(load_object(reward, where="--reward"))
    score = AsyncRewardWrapper(reward)
    runs = {name: _Run(root, dataset, trust_config=trust_config) for name, root in dumps.runs.items()}
    result.notes += [note for run in runs.values() for note in run.notes]
    records = _answered(dumps.records(dumps.rows(filter)), runs, result)
    with asyncio.Runner() as runner:
        while chunk := list(itertools.islice(records, _AT_ONCE)):
            calls = []
            for record, answer in chunk:
                row = runs[record["run"]].row_of(record) if takes_row else {}
                named = {name: value for name, value in row.items() if name not in ARGUMENTS}
                calls.append(((answer.prompt, answer.completion, answer.prompt_ids, answer.completion_ids), named))
            yield from zip((record for record, _ in chunk), runner.run(_all(score, calls)), strict=True)


async def _all(score: AsyncRewardWrapper, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
    async def one(arguments: tuple[Any, ...], row: dict[str, Any]) -> float | Exception:
        try:
            reward = await score(*arguments, **row)
            return math.fsum(reward) if isinstance(reward, list) else reward
        except Exception as error:  # of the user's function
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*call)) for call in calls]
    return [task.result() for task in tasks]


def _answered(records: Iterable[Record], runs: Mapping[str, _Run], result: Rescored) -> Iterator[tuple[Record, Answer]]:
    for record in records:
        if (answer := last_answer(record, runs[record["run"]].tokenizer)) is None:
            result.skipped += 1
        else:
            yield record, answer


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


# -- rows


class _Run:
    """The tokenizer of a run, and its dataset rows by the tokens of their prompt."""

    def __init__(self, root: Path, dataset: Path | None, *, trust_config: bool) -> None:
        self._config_path = dataset or root / CONFIG
        self._trusted = trust_config or dataset is not None
        self._config: RunConfig | None = None
        with suppress(*(UNREADABLE if dataset is None else ())):
            self._config = load_recorded(root, open_inside, root=RunConfig) if dataset is None else load_config(dataset)
        self._rows: dict[str, dict[tuple[int, ...], list[Any]]] = {}
        self.tokenizer = run_tokenizer(root)
        self.notes: list[str] = []
        if self.tokenizer is None:
            self.notes.append(f"{root.name}: the run's tokenizer is not here, so answers show their special tokens")

    def row_of(self, record: Record) -> Mapping[str, Any]:
        fix = (
            "give the function exactly the parameters prompt, completions, prompt_ids and completion_ids if it needs "
            "no row, or name the config of the run with --dataset"
        )
        if self._config is not None and not self._trusted:
            raise UntrustedError("the function takes dataset rows, which dumps do not hold (--dataset names a config)")
        if self._config is None or self.tokenizer is None:
            what = f"{self._config_path} cannot be read" if self._config is None else "the run's tokenizer is not here"
            raise ConfigError(f"dumps do not hold dataset rows, and {what}: {fix}")
        name = "eval_dataset" if record["scope"] == "eval-rollout" else "train_dataset"
        if name not in self._rows:
            self._rows[name] = _rows_by_prompt(self._config, getattr(self._config, name), self.tokenizer)
        prompt = tuple(id for turn in record["turns"] for id in turn["ids"])[: record["prompt_len"]]
        rows = self._rows[name].get(prompt, [])
        if len(rows) != 1:
            what = "none" if not rows else "several, with different values,"
            raise ConfigError(
                f"dumps do not hold dataset rows, and of those of {name} in {self._config_path} {what} begin with the "
                f"prompt of {record['run']} {record['id']}: {fix}, or leave the episode out with a filter"
            )
        return rows[0]  # type: ignore[no-any-return]


def _rows_by_prompt(config: RunConfig, rows: DatasetConfig | None, tokenizer: Any) -> dict[tuple[int, ...], list[Any]]:
    """Return the different rows behind each prompt, rendered by the chat template as workflows do."""
    from areal_lite.runs.run_data import workflow_rows

    found: dict[tuple[int, ...], list[Any]] = {}
    for row in [] if rows is None else workflow_rows(config, rows, is_train=False):
        row = _prepared(row)
        prepared = row.pop("raw_prompt_ids", None)  # a reward function does not get it
        of_row = _prompts(row, config, tokenizer) if prepared is None else [prepared]
        for prompt in {tuple(ids) for ids in of_row}:
            same = found.setdefault(prompt, [])
            if row not in same:
                same.append(row)
    return found


def _prepared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row as workflows get it; without the forms of its prompt if these cannot be made."""
    if isinstance(row, UnpreparedRow):
        with suppress(ValueError):
            return row.prepared()
    return dict(row)


def _prompts(row: Mapping[str, Any], config: RunConfig, tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of each prompt that the row may have led to."""
    system = config.workflow_kwargs.get("system_prompt")
    before = [{"role": "system", "content": system}] if system else []
    for key in ("messages", config.train_dataset.prompt_key, "prompt", "question"):
        content = row.get(key)
        if isinstance(content, str):
            messages: list[Any] = [*before, {"role": "user", "content": content}]
        elif isinstance(content, list) and content and isinstance(content[0], Mapping):
            messages = list(content)
        else:
            continue
        for thinks in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **thinks)
            yield tokenizer.encode(text, add_special_tokens=False)


# -- text


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
