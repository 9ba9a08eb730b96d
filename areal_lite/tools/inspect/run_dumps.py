"""The dumps of one run: rows that match a filter, groups, figures and single episodes, read through its index."""

import sqlite3
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any
import orjson
from areal_lite.errors import ConfigError
from areal_lite.tools.foreign_files import open_inside
from areal_lite.tools.inspect.dump_index import DumpIndex
from areal_lite.tools.inspect.episode_row import COLUMNS, cause, row_of
from areal_lite.tools.inspect.filters import PATH, Expr, is_utf8, needs_text, parse, to_sql
from areal_lite.tools.inspect.index_update import UNREADABLE

Row = dict[str, Any]
"""A dumped line without its turns, under the names of the filter keys (``docs/trajectories.md``), with ``run``, ``id``
(``FILE:LINE`` below the run's folder), ``file``, ``line``, ``offset``, ``length``, ``stop`` and ``agent`` as lists, and
``cause`` instead of the error: the line of it that says most. ``numbers`` are counts and parts of the reward."""
ORDER = "e.version, e.task, e.sample, e.id"
NEWEST = "e.version DESC, e.task DESC, e.sample, e.id"
"""SQL of the orders for which the index has an SQLite index."""
MOST = 2**60
"""More rows than there are."""
_FIRST_SORTED = 2000
"""Rows that a text search sorts before it looks at the first."""
_REWARD = "sum(e.reward * e.weight) / sum(e.weight)"  # over episodes, which may have several lines
_GROUP = {
    **{"version": "e.version", "group": 'e."group"', "task": "min(e.task)", "lines": "count(*)"},
    **{"episodes": "count(DISTINCT e.member)", "reward": _REWARD, "reward_min": "min(e.reward)"},
    **{"reward_max": "max(e.reward)", "finished": "max(e.finished)"},
}
_VERSION = {
    **{"scope": "e.scope", "version": "e.version", "lines": "count(*)", "groups": "count(DISTINCT e.task)"},
    **{"reward": _REWARD, "rewards": "round(total(e.weight), 3)", "tokens": "avg(e.tokens)"},
}
_FILE_ID = "(SELECT id FROM files WHERE path = ?)"
_COLUMNS = ("id", *COLUMNS, "file", "line", "offset", "length", "weight")
_SELECT = ", ".join(PATH if name == "file" else f'e."{name}"' for name in _COLUMNS)


class RunDumps:
    """The dumps of a run, or of the part of it that the user named. Thread-safe, as its index is."""

    def __init__(self, index: DumpIndex, part: str) -> None:
        self.index, self.name = index, index.name
        self._condition, self._parameters = "1", tuple[int | str, ...]()
        if part:  # a folder or a file
            self._condition = "e.file IN (SELECT id FROM files WHERE substr(path || '/', 1, ?) = ?)"
            self._parameters = (len(part) + 1, f"{part}/")
        self._summary: tuple[Any, dict[str, Any]] = (None, {})

    def count(self, expr: Expr, budget_s: float | None = None) -> int | None:
        """Return how many rows match; None if that takes longer than ``budget_s`` seconds."""
        sql, parameters = self._where(expr)
        with self.index.connection() as connection:
            if budget_s is not None:
                deadline = time.monotonic() + budget_s
                connection.set_progress_handler(lambda: time.monotonic() > deadline, 20_000)
            try:
                return int(connection.execute(f"SELECT count(*) FROM episodes AS e {sql}", parameters).fetchone()[0])  # nosec B608 # our columns, bound values
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                return None
            finally:
                connection.set_progress_handler(None, 0)

    def select(self, expr: Expr, order: str = ORDER, limit: int = MOST, *, offset: int = 0) -> Generator[Row]:
        """Yield the rows that match; with ``text`` in the filter, ``offset`` needs the default order."""
        sql, parameters = self._where(expr)
        if order in (ORDER, NEWEST) or not needs_text(expr):
            yield from self._rows(f"{sql} ORDER BY {order} LIMIT ? OFFSET ?", [*parameters, limit, offset])
            return
        # Sorted before they are searched, in growing parts, so that the first match comes at once.
        ((total,),) = self.index.query("SELECT count(*) FROM episodes")
        begin, size = 0, _FIRST_SORTED
        while begin < total and limit:
            sorted_part = f"(SELECT e.id AS sorted FROM episodes AS e ORDER BY {order} LIMIT {size} OFFSET {begin})"  # nosec B608 # our columns, bound values
            tail = f"ON e.id = sorted {sql} LIMIT ?"
            for row in self._rows(tail, [*parameters, limit], f"{sorted_part} CROSS JOIN episodes"):
                yield row
                limit -= 1
            begin, size = begin + size, size * 10

    def ids(self, expr: Expr) -> list[int]:
        """Return the index's ids of the rows that match, in the default order."""
        sql, parameters = self._where(expr)
        return [id for (id,) in self.index.query(f"SELECT e.id FROM episodes AS e {sql} ORDER BY {ORDER}", parameters)]  # nosec B608 # our columns, bound values

    def row(self, id: int) -> Row | None:
        """Return the row with an id of the index; None if it was forgotten meanwhile."""
        return next(self._rows("WHERE e.id = ?", [id]), None)

    def find(self, id: str) -> Row:
        path, _, line = id.rpartition(":")
        if not (path and is_utf8(path) and line.isdecimal() and len(line) < 16):
            raise ConfigError(f"{id!r} is not an episode's id: ids are FILE:LINE, such as rollout/4/134.jsonl:1")
        if not (rows := list(self._rows(f"WHERE e.file = {_FILE_ID} AND e.line = ?", [path, int(line)]))):
            raise ConfigError(f"run {self.name} has no episode {id!r}; areal-lite inspect lists the ids")
        return rows[0]

    def episode(self, row: Row) -> list[Row]:
        tail = f"WHERE e.file = {_FILE_ID} AND e.member IS ? ORDER BY e.line"
        return list(self._rows(tail, [row["file"], row["member"]]))

    def record(self, row: Row) -> dict[str, Any]:
        """Return the dumped line of a row as it was written, with its ``run``, ``id``, ``scope`` and ``version``."""
        try:
            with open_inside(self.index.full_path(row["file"]), self.index.root) as file:
                file.seek(row["offset"])
                record = orjson.loads(file.read(row["length"]))
            row_of(record, row["scope"], row["version"])
        except (OSError, ValueError) as error:
            raise ConfigError(f"{row['id']} of run {row['run']} has changed since it was indexed: {error}") from None
        trained = {"trained_step": step} if (step := row["trained_step"]) is not None else {}
        return {**record, **{name: row[name] for name in ("run", "id", "scope", "version")}, **trained}

    def groups(self, expr: Expr, limit: int) -> list[dict[str, Any]]:
        """Return the first groups with a row that matches; :meth:`.Dumps.groups` has the keys."""
        sql, parameters = self._where(expr)
        columns = "".join(f", {column}" for column in _GROUP.values())
        select = (
            f"SELECT e.scope, json_group_array(e.status) {columns} FROM episodes AS e {sql} "  # nosec B608 # our columns, bound values
            f'GROUP BY e.version, e.task, e."group", e.scope ORDER BY e.version, e.task LIMIT ?'
        )
        found = []
        for scope, statuses, *values in self.index.query(select, [*parameters, limit]):
            status = Counter(each for each in orjson.loads(statuses) if each is not None)
            facts = dict(zip(_GROUP, values, strict=True))
            found.append({"run": self.name, "scope": scope, **facts, "status": dict(status)})
        return found

    def problems(self, limit: int) -> list[dict[str, Any]]:
        keys = ("run", "file", "line", "offset", "kind", "message")
        sql = (
            f"SELECT {PATH}, e.line, e.offset, e.kind, e.message FROM problems AS e WHERE {self._condition} "  # nosec B608 # our columns, bound values
            "ORDER BY e.file, e.line LIMIT ?"
        )
        found = self.index.query(sql, (*self._parameters, limit))
        found += [(None, None, None, UNREADABLE, text) for text in self.index.unread[: limit - len(found)]]
        return [dict(zip(keys, (self.name, *each), strict=True)) for each in found]

    def problem_counts(self) -> tuple[dict[str, int], int]:
        """Return the problems by kind, and the number of unfinished files."""
        sql = f"SELECT kind, count(*) FROM problems AS e WHERE {self._condition} GROUP BY 1"  # nosec B608 # our columns, bound values
        ((unfinished,),) = self.index.query("SELECT coalesce(sum(unfinished), 0) FROM folders")
        return dict(self.index.query(sql, self._parameters)), unfinished

    def summary(self, filter: str) -> dict[str, Any]:
        """Return the run's figures; :meth:`.Dumps.summary` has the keys."""
        state = (filter, self.index.query("SELECT count(*), max(id), (SELECT total(mtime) FROM facts) FROM episodes"))
        known, figures = self._summary
        if known != state:
            where = self._where(parse(filter))
            versions = self._versions(*where)
            figures = {**_total(versions), "versions": versions, "failures": self._failures(*where)}
            self._summary = state, figures
        problems, unfinished = self.problem_counts()
        return {
            **{"run": self.name, "path": str(self.index.root), "index": str(self.index.path)},
            **figures,
            **{"problems": problems, "unfinished": unfinished, "notes": [*self.index.notes, *self.index.unread]},
        }

    def _versions(self, sql: str, parameters: list[Any]) -> list[dict[str, Any]]:
        select = (
            f"SELECT json_group_array(e.status), {', '.join(_VERSION.values())} FROM episodes AS e NOT INDEXED {sql} "  # nosec B608 # our columns, bound values
            "GROUP BY e.version, e.scope"
        )
        found = []
        for statuses, *values in self.index.query(select, parameters):
            status = Counter(each or "none" for each in orjson.loads(statuses))
            found.append({**dict(zip(_VERSION, values, strict=True)), "status": dict(sorted(status.items()))})
        return sorted(found, key=lambda each: (rank(each["version"]), rank(each["scope"])))

    def _failures(self, sql: str, parameters: list[Any]) -> list[dict[str, Any]]:
        failures = []
        select = (
            f"SELECT e.error_kind, e.error_type, count(*), e.error, min(e.id) FROM episodes AS e {sql} "  # nosec B608 # our columns, bound values
            "AND (e.error IS NOT NULL OR e.error_kind IS NOT NULL) GROUP BY 1, 2 ORDER BY 3 DESC"
        )
        for kind, type_, count, error, first in self.index.query(select, parameters):
            row = self.row(first)  # SQLite takes error from it, too
            example = {key: row and row[key] for key in ("status", "run", "id", "cause")}
            failures.append({"error_kind": kind, "error_type": type_, "count": count, **example, "error": error})
        return failures

    def _where(self, expr: Expr) -> tuple[str, list[Any]]:
        condition, parameters = to_sql(expr)
        return f"WHERE {self._condition} AND {condition}", [*self._parameters, *parameters]

    def _rows(self, tail: str, parameters: list[Any], table: str = "episodes") -> Iterator[Row]:
        sql = f"SELECT {_SELECT} FROM {table} AS e {tail}"  # nosec B608 # our columns, bound values
        with self.index.connection() as connection, closing(connection.execute(sql, parameters)) as cursor:
            for values in cursor:
                row: Row = {"run": self.name, **dict(zip(_COLUMNS, values, strict=True))}
                if row["file"] is None:  # forgotten meanwhile
                    continue
                row["id"] = f"{row['file']}:{row['line']}"
                row |= {key: orjson.loads(row[key] or "[]") for key in ("stop", "agent", "numbers")}
                row["cause"] = cause(row.pop("error"), row["error_type"])
                yield row


def _total(versions: list[dict[str, Any]]) -> dict[str, Any]:
    statuses = sum((Counter(each["status"]) for each in versions), Counter[str]())
    rewards = sum(each["rewards"] for each in versions)
    total = sum(each["reward"] * each["rewards"] for each in versions if each["rewards"])
    counts = {key: sum(each[key] for each in versions) for key in ("lines", "groups")}
    return {**counts, "reward": total / rewards if rewards else None, "status": dict(statuses)}


def rank(value: Any, descending: bool = False) -> tuple[bool, bool, Any]:
    """Return a sort key that orders as SQLite does, missing values last."""
    return ((value is None) != descending, isinstance(value, str), value if value is not None else 0)
