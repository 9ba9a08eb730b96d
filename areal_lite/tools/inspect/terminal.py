"""``areal-lite inspect``: runs, versions, groups, episodes and turns of dumps in the terminal, or as JSON lines, with
the unprintable characters of a model's text escaped."""

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from areal_lite.errors import ConfigError
from areal_lite.files.safe_text import printable
from areal_lite.tools.argument_types import positive_integer
from areal_lite.tools.inspect.dumped_images import image_marker
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_text import STATUS_STYLE, episode_text, json_line, print_note, stdout_console
from areal_lite.tools.inspect.run_dumps import Row
from areal_lite.tools.inspect.token_table import Token, decoder, first_text_difference, first_token_difference, tokens
from areal_lite.tools.inspect.training_facts import with_facts

_COLUMNS: dict[str, tuple[str, ...]] = {
    "runs": ("run", "versions", "groups", "lines", "reward", "status", "problems"),
    "groups": ("scope", "version", "group", "task", "episodes", "reward", "reward_min", "reward_max", "status"),
    "episodes": ("id", "status", "reward", "tokens", "trained", "turns", "version", "stop", "cause"),
    "problems": ("run", "file", "line", "offset", "kind", "message"),
}
_UNSET = {"filter": "", "sort": "version", "sample": None, "offset": 0, "limit": None}
_PART = {"filter", "offset", "limit"}
_SELECTS = {"runs": _PART, "versions": {"filter"}, "groups": _PART, "problems": {"limit"}}
"""What selects among the lines of a level; all of ``_UNSET`` where it is missing."""
_CONTEXT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows runs, versions, groups, episodes or turns of dumps. docs/trajectories.md has the filter keys."
    )
    add_selection(parser)
    add = parser.add_argument
    add("--by", choices=("runs", "versions", "groups", "episodes", "turns", "problems"), help="what to list")
    add("--sort", default="version", metavar="KEY", help="a filter key, with - before it for descending")
    add("--limit", type=positive_integer, metavar="N", help="at most N (default: 50, of turns 10; with --json all)")
    add("--offset", type=int, default=0, metavar="N", help="leave out the first N")
    add("--sample", type=positive_integer, metavar="N", help="N random episodes")
    add("--seed", type=int, default=0, metavar="S", help="seed of --sample")
    add("--json", action="store_true", help="one JSON object per line: of an episode its dumped line with run and id")
    add("--diff", nargs=2, metavar="ID", help="where two episodes begin to differ; an ID is FILE:LINE, as listed")
    add("--diagnose", action="store_true", help="why the reward does not rise: figures, what they mean, what to change")
    add("--tokens", metavar="ID", help="each token of an episode: id, text, whether it trains, log-prob, version")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the folder or file of dumps, and the filter that selects episodes of it."""
    add, example = parser.add_argument, "such as 'reward<0.5 status=failed text~\"not sure\"' (quote < and >)"
    add("path", type=Path, metavar="RUN", help="a run's folder, a folder of runs, a folder of dumps, or a dump")
    add("filter", nargs="*", metavar="FILTER", help=example)


def run(options: argparse.Namespace) -> int:
    inspect(options)
    return 0


def inspect(options: argparse.Namespace, *, console: Console | None = None) -> int:
    """Print what ``options`` ask for, and return the number of lines, rows or tokens."""
    console = console or stdout_console(highlight=False)
    options.filter = " ".join(options.filter)
    with Dumps.open(options.path, on_progress=_Progress()) as dumps:
        shown = _print(dumps, _level(dumps, options), options, console)
        for note in dumps.notes():
            print_note(note)
    if not shown:
        print_note("nothing matches")
    return shown


def _level(dumps: Dumps, options: argparse.Namespace) -> str:
    lists = options.filter.strip() or options.sort != "version" or options.sample is not None or options.json
    if options.by is not None:
        given = {name for name, unset in _UNSET.items() if getattr(options, name) != unset}
        if without := given - _SELECTS.get(options.by, given):
            raise ConfigError(
                f"--by {options.by} has no {' and no '.join(sorted(without))}: remove it, or use another --by"
            )
        return str(options.by)
    if lists or options.offset or options.limit is not None:
        return "episodes"
    return "runs" if len(dumps.runs) > 1 else "turns" if options.path.is_file() else "versions"


def _print(dumps: Dumps, level: str, options: argparse.Namespace, console: Console) -> int:
    if options.tokens is not None:
        return _print_tokens(dumps, options.tokens, options, console)
    if options.diff is not None:
        return _print_difference(dumps, options.diff, options, console)
    if options.diagnose:
        return _print_diagnosis(dumps, options, console)
    if options.json:
        rows: Iterable[Any] = _rows(dumps, level, options, sys.maxsize)
        if level == "versions":
            rows = ({"run": run["run"], **each} for run in rows for each in run["versions"])
        elif level in ("episodes", "turns"):
            rows = dumps.records(rows)
        return _print_json(rows)
    pager = console.pager(styles=bool(shutil.which("less"))) if console.is_terminal and sys.stdin.isatty() else None
    os.environ.setdefault("LESS", "-FRX")
    with pager or contextlib.nullcontext():
        if level == "turns":
            shown = 0
            for record in dumps.records(_rows(dumps, level, options, 10)):
                shown += 1
                console.print(Text(printable(f"{record['run']} {record['id']}"), "dim"), soft_wrap=True)
                for text in episode_text(record, dumps.runs[record["run"]]):
                    console.print(text, soft_wrap=True)
            return shown
        if level == "versions":
            return _print_versions(dumps, options, console)
        listed = list(_rows(dumps, level, options, 50))
        console.print(_listing(dumps, level, listed, options.sort))
        if level == "episodes" and listed and options.sample is None:
            total = dumps.count(options.filter, budget_s=1.0)
            if total != len(listed):
                known = "more" if total is None else total
                console.print(Text(f"{len(listed)} of {known}; --limit, --offset and --sort show others", "dim"))
    return len(listed)


def _rows(dumps: Dumps, level: str, options: argparse.Namespace, default_limit: int) -> Iterable[Row]:
    """Return what a level lists; of episodes and turns the rows of the index."""
    limit = options.limit or default_limit
    if level == "groups":
        return dumps.groups(options.filter, offset=options.offset, limit=limit)
    if level == "problems":
        return dumps.problems(limit=limit)
    if level in ("runs", "versions"):
        return dumps.summary(options.filter)[options.offset :][: options.limit]
    if options.sample is not None:
        return dumps.sample(options.sample, options.seed, options.filter)
    return dumps.rows(options.filter, sort=options.sort, offset=options.offset, limit=limit)


def _print_json(objects: Iterable[Mapping[str, Any]]) -> int:
    shown = 0
    for shown, each in enumerate(objects, 1):  # noqa: B007 -- the last number is the count
        print(json_line(each))
    return shown


# -- tables


def _listing(dumps: Dumps, level: str, rows: list[Row], sort: str) -> Table:
    columns = _COLUMNS[level]
    if level == "episodes":
        if len(dumps.runs) > 1:
            columns = ("run", *columns)
        asked = sort.lstrip("-")
        if rows and asked in rows[0] and asked not in columns:
            columns = (*columns[:-1], asked, columns[-1])
    elif level == "runs":
        rows = [{**row, "versions": _range(row["versions"])} for row in rows]
    return _table(rows, columns)


def _table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        numeric = name in ("reward", "reward_min", "reward_max", "tokens", "trained", "turns", "lines", "groups")
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=name == "id")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in columns))
    return table


def _cell(name: str, value: Any) -> Text:
    if value is None:
        return Text("-", "dim")
    if isinstance(value, dict):
        value = ", ".join(f"{count} {kind}" for kind, count in value.items()) or "-"
    elif isinstance(value, list):
        value = ",".join(map(str, value))
    elif isinstance(value, float):
        is_time = name == "finished" and 0 <= value < 2**33
        value = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if is_time else f"{value:.3f}"
    return Text(printable(str(value)), STATUS_STYLE.get(str(value), "") if name == "status" else "")


def _range(versions: Sequence[Mapping[str, Any]]) -> str:
    known = [each["version"] for each in versions if each["version"] is not None]
    return f"{min(known)}..{max(known)}" if known else "-"


def _print_versions(dumps: Dumps, options: argparse.Namespace, console: Console) -> int:
    shown = 0
    for run in dumps.summary(options.filter):
        console.print(Text(printable(f"{run['run']}: {run['lines']} lines in {run['groups']} groups"), "bold"))
        console.print(_table(run["versions"], ("scope", "version", "groups", "lines", "reward", "tokens", "status")))
        shown += len(run["versions"])
        for failure in run["failures"]:
            name = ": ".join(filter(None, (failure["error_kind"] or failure["status"], failure["error_type"])))
            console.print(Text(printable(f"\n{failure['count']} x {name}, such as {failure['id']}"), "red"))
            console.print(Text(printable(str(failure["error"] or "").rstrip())), soft_wrap=True)
    if shown:
        console.print(Text("\nepisodes: add a filter, such as status=failed or reward<0.5; groups: --by groups", "dim"))
    return shown


def _print_diagnosis(dumps: Dumps, options: argparse.Namespace, console: Console) -> int:
    from areal_lite.tools.diagnose.episodes import read_run
    from areal_lite.tools.diagnose.findings import diagnose

    shown = 0
    for run in dumps.runs:
        findings = diagnose(*read_run(dumps, run, options.filter))
        shown += len(findings)
        if options.json:
            _print_json({"run": run, **each} for each in findings)
            continue
        alarms = [each for each in findings if each["severity"] != "ok"]
        console.print(Text(printable(f"{run}: {len(alarms)} of {len(findings)} figures are suspicious"), "bold"))
        for each in alarms:
            beyond = f"{each['figure']:.3g}, {'below' if each['below'] else 'above'} {each['limit']:g}"
            console.print(Text(f"\n{each['severity']} {each['name']}: {beyond}", "red"))
            console.print(f"{each['meaning']}.\nTo do: {each['fix']}: {', '.join(each['keys'])}", soft_wrap=True)
        others = ", ".join(f"{each['name']} {each['figure']:.3g}" for each in findings[len(alarms) :])
        console.print(Text(f"\nno alarm: {others or '-'}", "dim"), soft_wrap=True)
    return shown


# -- single episodes


def _record(dumps: Dumps, id: str) -> dict[str, Any]:
    errors = []
    for run in dumps.runs:
        try:
            return dumps.record(run, id.removeprefix(f"{run} ").removeprefix(f"{run}/"))
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _print_tokens(dumps: Dumps, id: str, options: argparse.Namespace, console: Console) -> int:
    record = _record(dumps, id)
    root = dumps.runs[record["run"]]
    if (decode := decoder(root)) is None:
        print_note("no text of tokens: the run's tokenizer is not on this machine")
    rows = list(tokens(with_facts(root, record), decode))
    if options.json:
        return _print_json(map(_flat, rows))
    known = dict.fromkeys(name for token in rows for name in token.facts)
    columns = ("index", "turn", "role", "id", "text", "mask", "logprob", "version", *known)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name in ("role", "text") else "right")
    for token in rows:
        values = _flat(token) | {"text": None if token.text is None else repr(token.text)}
        if token.image is not None:
            if token.index > token.image.offset:
                continue
            values |= {"id": None, "text": image_marker(token.image, root)}
        values = {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in values.items()}
        table.add_row(*(_cell(name, values.get(name)) for name in columns), style="cyan" if token.mask else "")
    console.print(table)
    return len(rows)


def _flat(token: Token) -> dict[str, Any]:
    values = asdict(token) | {"image": token.image and token.image.sha256}
    facts = values.pop("facts")
    return {**values, **facts}


def _print_difference(dumps: Dumps, pair: tuple[str, str], options: argparse.Namespace, console: Console) -> int:
    first, second = (_record(dumps, id) for id in pair)
    where, text = first_token_difference(first, second), first_text_difference(first, second)
    if options.json:
        sides = () if where is None else zip(("first", "second"), where[1:], strict=True)
        differ = where and {"index": where[0], **{name: each and _flat(each) for name, each in sides}}
        rewards = [first.get("reward"), second.get("reward")]
        ids = {"first": first["id"], "second": second["id"]}
        return _print_json([ids | {"rewards": rewards, "token": differ, "text": text and text[0]}])
    if first.get("group_id") != second.get("group_id"):
        print_note("the episodes are of different groups")
    heads = (Column(Text(printable(name)), overflow="fold") for name in ("", first["id"], second["id"]))
    table = Table(*heads, box=None, header_style="bold", pad_edge=False)
    for name in ("group_id", "member_idx", "status", "reward", "seqlen", "head_version", "tail_version", "error_kind"):
        table.add_row(name, *(_cell(name, record.get(name)) for record in (first, second)))
    console.print(table)
    if where is None:
        console.print("the token ids are equal")
    else:
        console.print(Text(f"token {where[0]} is the first that differs:", "bold"))
        for record, token in ((first, where[1]), (second, where[2])):
            said = "ended"
            if token is not None:
                shown = f"id {token.id}" if token.image is None else f"image {token.image.sha256[:12]}"
                said = f"{shown}, turn {token.turn}, {token.role}, log-prob {token.logprob}"
            console.print(Text(printable(f"  {record['id']}: {said}")), soft_wrap=True)
    if text is None:
        console.print("the texts are equal")
    else:
        index, *texts = text
        console.print(Text(f"character {index} is the first that differs:", "bold"))
        for record, whole in zip((first, second), texts, strict=True):
            before, after = repr(whole[max(0, index - _CONTEXT) : index]), repr(whole[index : index + _CONTEXT])
            line = Text.assemble(printable(f"  {record['id']}: {before} "), (printable(after), "bold cyan"))
            console.print(line, soft_wrap=True)
    return 1


class _Progress:
    """Says once that an index is made, if that takes longer than a second, and then how far it is."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 1.0

    def __call__(self, lines: int) -> None:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + 5.0
            print_note(f"indexing the dumps: {lines} lines so far; the next time they open at once")
