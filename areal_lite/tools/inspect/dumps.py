"""The dumps of one or several runs: pages of filtered episodes, single episodes, groups, summaries, problems.

Everything that reads dumps goes through :class:`Dumps`. It reads through the index (:mod:`.dump_index`), so a million
episodes open in a second, and takes episodes themselves from the JSON lines.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.dump_index import DumpIndex, is_run, is_utf8
from areal_lite.tools.inspect.episode_row import COLUMNS, SCOPES, TEXTS, cause, row_of
from areal_lite.tools.inspect.filters import KEYS, SORT_KEYS, Expr, Term, needs_text, parse, to_sql

Row = dict[str, Any]
"""A dumped line without its turns, under the names of the filter keys (``docs/trajectories.md``), with ``run``, ``id``
(``FILE:LINE`` below the run's folder), ``file``, ``line``, ``offset``, ``length``, ``stop`` and ``agent`` as lists, and
``cause`` instead of the error: the line of it that says most."""
_ORDER = "e.version, e.task, e.sample, e.id"
_DEFAULT = "version"
_FIRST_SORTED = 2000
"""Rows that a text search sorts before it looks at the first."""
_MOST = 2**60
_DEPTH = 4
"""Levels of folders below a path at which runs are found."""


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of one page."""

    rows: list[Row]
    total: int | None
    """Rows on all pages; None if counting took longer than the page's budget."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run, or the part of one that the user named."""

    place: tuple[Path, str, bool]
    """Its folder, the part, and whether the folder is a run's."""
    index: DumpIndex
    condition: str
    """SQL that holds for the rows of the part."""
    parameters: tuple[int | str, ...]

    def problem_counts(self) -> tuple[dict[str, int], int]:
        """Return the problems by kind, and the number of unfinished files."""
        sql = f"SELECT kind, count(*) FROM problems AS e WHERE {self.condition} GROUP BY 1"
        with self.index.connection() as connection:
            counts = dict(connection.execute(sql, self.parameters).fetchall())
            return counts, int(connection.execute("SELECT coalesce(sum(unfinished), 0) FROM folders").fetchone()[0])


class Dumps:
    """Opened dumps. Thread-safe; a context manager. Filters and sort keys are those of :mod:`.filters`.

    Every method raises ConfigError for a wrong filter, sort key, run or id, and for a dump that is gone.

    Example:
        >>> with Dumps.open("runs/demo") as dumps:
        ...     for row in dumps.page("status=failed version>=4", sort="-tokens", limit=20).rows:
        ...         print(row["id"], row["cause"])
    """

    def __init__(self, paths: Sequence[Path], on_progress: Callable[[int], object]) -> None:
        self._paths, self._on_progress = paths, on_progress
        self._runs: dict[str, _Run] = {}
        self._summaries: dict[str, tuple[Any, dict[str, Any]]] = {}

    @classmethod
    def open(
        cls,
        *paths: str | Path,
        may_be_empty: bool = False,
        on_progress: Callable[[int], object] = lambda lines: None,
    ) -> Dumps:
        """Return the dumps of ``paths``, indexed up to now.

        Args:
            paths: Folders of runs, folders above runs, folders of dumps below a run or anywhere, or files.
            may_be_empty: Whether dumps may come later, from a run that has just begun.
            on_progress: Called with the number of lines that were read, every some thousand lines of an update.

        Raises:
            ConfigError: If a path does not exist or has no dumps.
        """
        dumps = cls(list(map(Path, paths)), on_progress)
        try:
            dumps.refresh(budget_s=0.3)
            if not may_be_empty and not dumps.problems(limit=1) and not dumps.count():
                raise ConfigError(
                    f"{', '.join(map(str, paths))}: no dumped episodes here: with rollout.dump_to_file a run writes "
                    "them to RUN_DIR/rollout, and those of the held-out rows to RUN_DIR/eval-rollout"
                )
        except BaseException:
            dumps.close()
            raise
        return dumps

    def close(self) -> None:
        """Close the indexes."""
        for run in self._runs.values():
            run.index.close()

    def __enter__(self) -> Dumps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runs(self) -> dict[str, Path]:
        """Folder, or file, of each run by its name."""
        return {name: run.index.root for name, run in self._runs.items()}

    def refresh(self, *, budget_s: float = 0.02) -> int:
        """Read what was dumped since the last call, by new runs too, and return how many lines that were.

        Costs a look at every folder of versions, and ``budget_s`` seconds at most to see whether old files changed.
        """
        self._find_runs()
        return sum(run.index.refresh(budget_s=budget_s) for run in self._runs.values())

    def page(
        self,
        filter: str = "",
        *,
        sort: str = _DEFAULT,
        offset: int = 0,
        limit: int = 50,
        count_s: float = 0.15,
    ) -> Page:
        """Return rows ``offset`` to ``offset + limit`` of those that match, and how many match.

        Args:
            sort: A key of ``SORT_KEYS``, with ``-`` before it for descending; missing values come last. Without it
                rows come by version, task and sample. Equal values come in the order in which they were indexed.
            count_s: Seconds that counting may take for each run, beyond the page itself.
        """
        rows = list(self.rows(filter, sort=sort, offset=offset, limit=limit))
        if len(rows) < limit and (rows or not offset):
            return Page(rows, offset + len(rows))
        return Page(rows, self.count(filter, budget_s=count_s))

    def count(self, filter: str = "", *, budget_s: float | None = None) -> int | None:
        """Return how many rows match; None if that takes longer than ``budget_s`` seconds for a run."""
        expr, total = parse(filter), 0
        for run in self._runs.values():
            count = self._count(run, expr, budget_s)
            if count is None:
                return None
            total += count
        return total

    def rows(
        self, filter: str = "", *, sort: str = _DEFAULT, offset: int = 0, limit: int | None = None
    ) -> Iterator[Row]:
        """Yield the rows that match, each as soon as it is found; memory stays flat."""
        expr, order = parse(filter), _sort(sort)
        offset, limit = min(max(0, offset), _MOST), None if limit is None else min(limit, _MOST)
        end = None if limit is None else offset + limit
        if order is None:  # run after run
            yield from self._chained(expr, offset, limit)
            return
        parts = [self._select(name, run, expr, order.sql, end) for name, run in self._runs.items()]
        key, down = order.key, order.descending
        merged = heapq.merge(*parts, key=lambda row: _rank(row[key], down), reverse=down)
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.callback(part.close)
            for place, row in enumerate(merged):
                if end is not None and place >= end:
                    return
                if place >= offset:
                    yield row

    def sample(self, size: int, seed: int = 0, filter: str = "") -> list[Row]:
        """Return ``size`` random rows of those that match, the same for the same seed and dumps, in order."""
        expr = parse(filter)
        totals = [self._count(run, expr, None) or 0 for run in self._runs.values()]
        places = sorted(random.Random(seed).sample(range(sum(totals)), min(size, sum(totals))))
        rows: list[Row] = []
        begin = 0
        for (name, run), total in zip(self._runs.items(), totals, strict=True):
            wanted = [place - begin for place in places if begin <= place < begin + total]
            begin += total
            sql, parameters = self._where(run, expr)
            with run.index.connection() as connection:
                ids = connection.execute(f"SELECT e.id FROM episodes AS e {sql} ORDER BY {_ORDER}", parameters)
                chosen: list[tuple[int]] = []
                at = 0
                for place in wanted:
                    chosen += itertools.islice(ids, place - at, place - at + 1)
                    at = place + 1
                ids.close()
                for id in chosen:
                    rows += _fetch(name, run.index, connection, "episodes", "WHERE e.id = ?", list(id))
        return rows

    def record(self, run: str, id: str) -> dict[str, Any]:
        """Return the dumped line ``id`` as it was written, and its ``run``, ``id``, ``scope`` and ``version``."""
        return self._record(*self._find(run, id))

    def records(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield the record of each row; rows that are gone meanwhile are left out."""
        for row in rows:
            with contextlib.suppress(ConfigError):
                yield self._record(row, self._runs[row["run"]].index)

    def episode(self, run: str, id: str) -> list[dict[str, Any]]:
        """Return the records of all sequences of the episode that the line ``id`` belongs to, by ``sample_idx``."""
        row, index = self._find(run, id)
        with index.connection() as connection:
            tail = f"WHERE e.file = {_FILE_ID} AND e.member IS ? ORDER BY e.line"
            rows = list(_fetch(run, index, connection, "episodes", tail, [*_split(row["file"]), row["member"]]))
        return [self._record(each, index) for each in rows]

    def group(self, run: str, group: str) -> list[Row]:
        """Return the rows of all episodes with the group id ``group``, by version, task and sample."""
        term = Term(KEYS["group"], "=", group)
        return list(self._select(run, self._run(run), term, _ORDER, None)) if is_utf8(group) else []

    def groups(
        self, filter: str = "", *, offset: int = 0, limit: int = 50, descending: bool = False
    ) -> list[dict[str, Any]]:
        """Return the groups with a row that matches, over its matching rows, by run, version and group.

        Keys: run, scope, version, group, task, lines, episodes, reward (mean of the rows), reward_min, reward_max,
        finished, status (counts by status).
        """
        expr, found = parse(filter), []
        offset, limit = min(max(0, offset), _MOST), min(limit, _MOST)
        left = offset + limit
        for name, run in self._runs.items():
            sql, parameters = self._where(run, expr)
            way = "DESC" if descending else "ASC"
            columns = "".join(f", {column}" for column in _GROUP.values())
            select = (
                f"SELECT e.scope, group_concat(e.status) {columns} FROM episodes AS e {sql} "
                f'GROUP BY e.version, e.task, e."group", e.scope ORDER BY e.version {way}, e.task {way} LIMIT ?'
            )
            with run.index.connection() as connection:
                texts = _Texts(connection)
                for scope, statuses, *values in connection.execute(select, [*parameters, left]).fetchall():
                    status = Counter(texts[int(each)] for each in (statuses or "").split(",") if each)
                    facts = dict(zip(_GROUP, values, strict=True))
                    found.append({"run": name, "scope": texts[scope], **facts, "status": dict(status)})
            left = max(0, offset + limit - len(found))
        return found[offset : offset + limit]

    def summary(self, filter: str = "") -> list[dict[str, Any]]:
        """Return the figures of each run.

        Keys: run, path, index (path), lines, groups, reward (mean), status (counts), versions, failures, problems
        (counts by kind), unfinished (files that a writer is at, or was killed at), notes. ``versions`` are dicts with
        scope, version, lines, groups, reward (mean), rewards (lines with one), tokens (mean), status (counts).
        ``failures``, most frequent first, have error_kind, error_type, count, and status, run, id, cause and error
        (its text) of one example; rejected episodes are there too.
        """
        expr = parse(filter)
        summaries = []
        for name, run in self._runs.items():
            with run.index.connection() as connection:
                state = (filter, connection.execute("SELECT count(*), max(id) FROM episodes").fetchone())
            known, summary = self._summaries.get(name, (None, {}))
            if known != state:
                summary = self._summary(name, run, expr)
                self._summaries[name] = state, summary
            problems, unfinished = run.problem_counts()
            summaries.append(
                {**summary, "problems": problems, "unfinished": unfinished, "notes": list(run.index.notes)}
            )
        return summaries

    def problems(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return what could not be read: dicts with run, file, line, offset, kind and message.

        Kinds: ``not JSON``, ``wrong shape``, ``unfinished line`` (a writer is at it, or was killed), ``unreadable``.
        """
        found: list[dict[str, Any]] = []
        keys = ("run", "file", "line", "offset", "kind", "message")
        for name, run in self._runs.items():
            with run.index.connection() as connection:
                rows = connection.execute(
                    f"SELECT e.file, e.line, e.offset, e.kind, e.message FROM problems AS e WHERE {run.condition} "
                    "ORDER BY e.file, e.line LIMIT ?",
                    (*run.parameters, min(limit, _MOST) - len(found)),
                )
                for file, *rest in rows.fetchall():
                    path = run.index.file_path(connection, file)
                    found.append(dict(zip(keys, (name, path, *rest), strict=True)))
        return found

    def notes(self) -> list[str]:
        """Return what a user should know: lines that could not be read, files of a killed run, where an index is."""
        found = []
        for name, run in self._runs.items():
            found += run.index.notes
            counts, unfinished = run.problem_counts()
            if counts:
                kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
                found.append(f"{name}: {sum(counts.values())} lines or files could not be read ({kinds})")
            if unfinished:
                found.append(f"{name}: {unfinished} unfinished files: a run is writing, or was killed while it wrote")
        return found

    def path_of(self, record: Mapping[str, Any]) -> Path:
        """Return the file of a row or record."""
        return self._runs[record["run"]].index.full_path(record["id"].rpartition(":")[0])

    def _find_runs(self) -> None:
        """Open the runs below the paths that are not open, and close those that are gone."""
        if self._runs and not all(path.exists() for path in self._paths):
            return
        found = list(dict.fromkeys(place for path in self._paths for place in _places(path)))
        known = {run.place: (name, run) for name, run in self._runs.items()}
        runs: dict[str, _Run] = {}
        for name, (root, part) in zip(_names(found), found, strict=True):
            place = (root, part, is_run(root))
            if place in known:
                name, run = known.pop(place)
            else:
                name = _full_name(root, part) if name in self._runs else name
                run = _Run(place, DumpIndex(root, name, self._on_progress), *_part_condition(part))
            runs[name] = run
        self._runs = runs  # replaced, because other threads iterate over it
        for _, run in known.values():
            run.index.close()

    # -- one run

    def _run(self, name: str) -> _Run:
        if name not in self._runs:
            raise ConfigError(f"no run {name!r} is open; there are: {', '.join(self._runs)}")
        return self._runs[name]

    def _where(self, run: _Run, expr: Expr) -> tuple[str, list[Any]]:
        condition, parameters = to_sql(expr)
        return f"WHERE {run.condition} AND {condition}", [*run.parameters, *parameters]

    def _count(self, run: _Run, expr: Expr, budget_s: float | None) -> int | None:
        sql, parameters = self._where(run, expr)
        with run.index.connection() as connection:
            if budget_s is not None:
                deadline = time.monotonic() + budget_s
                connection.set_progress_handler(lambda: time.monotonic() > deadline, 20_000)
            try:
                return int(connection.execute(f"SELECT count(*) FROM episodes AS e {sql}", parameters).fetchone()[0])
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                return None
            finally:
                connection.set_progress_handler(None, 0)

    def _chained(self, expr: Expr, offset: int, limit: int | None) -> Iterator[Row]:
        for name, run in self._runs.items():
            if limit == 0:
                return
            skipped = 0
            if offset and len(self._runs) > 1:
                skipped = min(offset, self._count(run, expr, None) or 0)
                offset -= skipped
            else:
                skipped, offset = offset, 0
            for row in self._select(name, run, expr, _ORDER, limit, offset=skipped):
                yield row
                if limit is not None:
                    limit -= 1

    def _select(
        self, name: str, run: _Run, expr: Expr, order: str, limit: int | None, *, offset: int = 0
    ) -> Generator[Row, None, None]:
        sql, parameters = self._where(run, expr)
        with run.index.connection() as connection:
            if order == _ORDER or not needs_text(expr):
                tail = f"{sql} ORDER BY {order} LIMIT ? OFFSET ?"
                yield from _fetch(name, run.index, connection, "episodes", tail, [*parameters, _limit(limit), offset])
                return
            # Sorted before they are searched, in growing parts, so that the first match comes at once.
            (left,) = connection.execute("SELECT count(*) FROM episodes").fetchone()
            begin, size = 0, _FIRST_SORTED
            while begin < left and limit != 0:
                sorted_part = f"(SELECT e.id AS place FROM episodes AS e ORDER BY {order} LIMIT {size} OFFSET {begin})"
                part, tail = f"{sorted_part} CROSS JOIN episodes", f"ON e.id = place {sql} LIMIT ?"
                for row in _fetch(name, run.index, connection, part, tail, [*parameters, _limit(limit)]):
                    yield row
                    limit = None if limit is None else limit - 1
                begin, size = begin + size, size * 10

    def _find(self, run: str, id: str) -> tuple[Row, DumpIndex]:
        part = self._run(run)
        path, _, line = id.rpartition(":")
        if not (path and is_utf8(path) and line.isdecimal() and len(line) < 16):
            raise ConfigError(f"{id!r} is not an episode's id: ids are FILE:LINE, such as rollout/4/134.jsonl:1")
        with part.index.connection() as connection:
            tail = f"WHERE e.file = {_FILE_ID} AND e.line = ?"
            rows = list(_fetch(run, part.index, connection, "episodes", tail, [*_split(path), int(line)]))
        if not rows:
            raise ConfigError(f"run {run} has no episode {id!r}; areal-lite inspect lists the ids")
        return rows[0], part.index

    def _record(self, row: Row, index: DumpIndex) -> dict[str, Any]:
        try:
            record = orjson.loads(index.read_line(row["file"], row["offset"], row["length"]))
            row_of(record, row["scope"], row["version"])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{row['id']} of run {row['run']} has changed since it was indexed: {error}") from None
        return {**record, **{name: row[name] for name in ("run", "id", "scope", "version")}}

    def _summary(self, name: str, run: _Run, expr: Expr) -> dict[str, Any]:
        sql, parameters = self._where(run, expr)
        versions: dict[tuple[Any, Any], dict[str, Any]] = {}
        statuses: Counter[str] = Counter()
        with run.index.connection() as connection:
            texts = _Texts(connection)
            columns = "count(*), total(e.reward), count(e.reward), total(e.tokens), count(e.tokens)"
            select = (
                f"SELECT e.version, e.scope, e.status, {columns} FROM episodes AS e NOT INDEXED {sql} GROUP BY 1, 2, 3"
            )
            for version, scope, status, lines, *sums in connection.execute(select, parameters).fetchall():
                each = versions.setdefault((version, scope), {"lines": 0, "groups": 0, "sums": [0.0] * 4, "status": {}})
                each["lines"] += lines
                each["sums"] = [total + part for total, part in zip(each["sums"], sums, strict=True)]
                each["status"][texts[status]] = lines
                statuses[texts[status] or "none"] += lines
            for scope in {scope for _, scope in versions}:  # one by one the index suffices
                select = (
                    f"SELECT e.version, count(DISTINCT e.task) FROM episodes AS e {sql} AND e.scope IS ? GROUP BY 1"
                )
                for version, groups in connection.execute(select, [*parameters, scope]).fetchall():
                    if (version, scope) in versions:
                        versions[version, scope]["groups"] = groups
            failures = []
            for kind, type_, count, first in connection.execute(
                f"SELECT e.error_kind, e.error_type, count(*), min(e.id) FROM episodes AS e {sql} "
                "AND (e.error IS NOT NULL OR e.error_kind IS NOT NULL) GROUP BY 1, 2 ORDER BY 3 DESC",
                parameters,
            ).fetchall():
                row = next(_fetch(name, run.index, connection, "episodes", "WHERE e.id = ?", [first]), None)
                error = connection.execute(
                    "SELECT text FROM episodes JOIN texts ON texts.id = error WHERE episodes.id = ?", (first,)
                ).fetchone()
                example = {key: row and row[key] for key in ("status", "run", "id", "cause")}
                facts = {"error_kind": texts[kind], "error_type": texts[type_], "count": count}
                failures.append({**facts, **example, "error": error and error[0]})
            listed = []
            for (version, scope), each in sorted(versions.items(), key=lambda item: tuple(map(_rank, item[0]))):
                reward, rewards, tokens, tokened = each.pop("sums")
                means = {"reward": reward / rewards if rewards else None, "rewards": int(rewards)}
                means["tokens"] = tokens / tokened if tokened else None
                listed.append({"scope": texts[scope], "version": version, **each, **means, "total_reward": reward})
        total, rewards = sum(each.pop("total_reward") for each in listed), sum(each["rewards"] for each in listed)
        return {
            **{"run": name, "path": str(run.index.root), "index": str(run.index.path)},
            **{key: sum(each[key] for each in listed) for key in ("lines", "groups")},
            **{"reward": total / rewards if rewards else None, "status": dict(statuses)},
            **{"versions": listed, "failures": failures},
        }


_GROUP = {
    **{"version": "e.version", "group": 'e."group"', "task": "min(e.task)", "lines": "count(*)"},
    **{"episodes": "count(DISTINCT e.member)", "reward": "avg(e.reward)", "reward_min": "min(e.reward)"},
    **{"reward_max": "max(e.reward)", "finished": "max(e.finished)"},
}
"""SQL of the figures of a group."""
_FILE_ID = "(SELECT files.id FROM files JOIN folders ON folders.id = folder WHERE folders.path = ? AND name = ?)"
_COLUMNS = ("id", *COLUMNS, "file", "line", "offset", "length")
_SELECT = ", ".join(f'e."{name}"' for name in _COLUMNS)
_TEXT_NAMES = tuple(name for name in TEXTS if name not in ("stop", "agent", "error"))
_MAX_TEXTS = 10_000


class _Texts:
    """Texts by their number in the table ``texts``; keeps the last ones."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._known: dict[int | None, str | None] = {None: None}

    def __getitem__(self, place: int | None) -> str | None:
        if place not in self._known:
            if len(self._known) > _MAX_TEXTS:
                self._known = {None: None}
            found = self._connection.execute("SELECT text FROM texts WHERE id = ?", (place,)).fetchone()
            self._known[place] = found and found[0]
        return self._known[place]


def _fetch(
    name: str, index: DumpIndex, connection: sqlite3.Connection, table: str, tail: str, parameters: list[Any]
) -> Iterator[Row]:
    """Yield the selected rows as dicts."""
    texts, file, path = _Texts(connection), None, None
    cursor = connection.execute(f"SELECT {_SELECT} FROM {table} AS e {tail}", parameters)
    try:
        for values in cursor:
            row: Row = {"run": name, **dict(zip(_COLUMNS, values, strict=True))}
            if row["file"] != file:
                file, path = row["file"], index.file_path(connection, row["file"])
            if path is None:  # forgotten meanwhile
                continue
            row["id"], row["file"] = f"{path}:{row['line']}", path
            for key in _TEXT_NAMES:
                row[key] = texts[row[key]]
            for key in ("stop", "agent"):
                row[key] = orjson.loads(texts[row[key]] or "[]")
            row["cause"] = cause(texts[row.pop("error")], row["error_type"])
            yield row
    finally:
        cursor.close()


def _limit(limit: int | None) -> int:
    return -1 if limit is None else limit


@dataclass(frozen=True, slots=True)
class _Sort:
    key: str
    descending: bool
    sql: str


def _sort(sort: str) -> _Sort | None:
    """Return a sort key; None for the default order."""
    names = {KEYS[name].alias or name: name for name in SORT_KEYS} | {name: name for name in SORT_KEYS}
    key = names.get(sort.removeprefix("-"))
    if sort in ("version", ""):
        return None
    if key is None:
        keys = ", ".join(SORT_KEYS)
        raise ConfigError(f"cannot sort by {sort!r}; use one of {keys}, with - before it for descending")
    way = "DESC" if sort[0] == "-" else "ASC"
    return _Sort(key, sort[0] == "-", f'e."{key}" {way} NULLS LAST, e.id')


def _rank(value: Any, descending: bool = False) -> tuple[bool, bool, Any]:
    """Return what sorts as SQLite does, missing values last."""
    return ((value is None) != descending, isinstance(value, str), value if value is not None else 0)


def _split(path: str) -> tuple[str, str]:
    folder, _, name = path.rpartition("/")
    return folder, name


# -- from paths to runs


def _places(path: Path) -> list[tuple[Path, str]]:
    """Return folder or file of each run below ``path``, and the part of the run that ``path`` names."""
    if not path.exists():
        raise ConfigError(f"{path}: No such file or directory: give a file or folder that a run wrote")
    full = path.resolve()
    scopes = [place for place, name in enumerate(full.parts) if name in SCOPES]
    if scopes and (full.is_dir() or len(full.parts) > scopes[-1] + 1):
        return [(Path(*full.parts[: scopes[-1]]), "/".join(full.parts[scopes[-1] :]))]
    runs = list(_runs_below(full, _DEPTH)) if full.is_dir() else []
    return [(run, "") for run in sorted(runs, key=_by_number)] or [(full, "")]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            for name in names:
                yield from _runs_below(folder / name, depth - 1)


def _by_number(path: Path) -> list[tuple[int, str]]:
    return [(len(part) if part.isdigit() else 0, part) for part in path.parts]


def _names(places: Sequence[tuple[Path, str]]) -> list[str]:
    """Return a short name for each run, or its path where two would be the same."""
    short = ["/".join([*root.parts[-2:], *([part] if part else [])]) for root, part in places]
    return [
        name if short.count(name) == 1 else _full_name(root, part)
        for name, (root, part) in zip(short, places, strict=True)
    ]


def _full_name(root: Path, part: str) -> str:
    return "/".join([str(root), *([part] if part else [])])


def _part_condition(part: str) -> tuple[str, tuple[int | str, ...]]:
    """Return the SQL that holds for the dumps of a part of a run."""
    if not part:
        return "1", ()
    files = "SELECT files.id FROM files JOIN folders ON folders.id = folder WHERE"
    if part.endswith(".jsonl"):
        return f"e.file = {_FILE_ID}", _split(part)
    return f"e.file IN ({files} path = ? OR substr(path, 1, ?) = ?)", (part, len(part) + 1, f"{part}/")
