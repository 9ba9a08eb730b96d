"""The dumps of one or several runs: pages of filtered episodes, single episodes, groups, summaries, problems.

Everything that reads dumps goes through :class:`Dumps`. It reads through the index (:mod:`.dump_index`), so a million
episodes open in a second, and takes episodes themselves from the JSON lines.
"""

import contextlib
import heapq
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.dump_index import DumpIndex
from areal_lite.tools.inspect.episode_row import SCOPES
from areal_lite.tools.inspect.filters import KEYS, Both, Expr, Not, Term, is_utf8, parse, parse_sort
from areal_lite.tools.inspect.index_update import Progress, is_run, is_scope
from areal_lite.tools.inspect.run_dumps import MOST, NEWEST, ORDER, Row, RunDumps, rank

_DEFAULT, _NEWEST = "version", "newest"
_EVALUATION = Term(KEYS["scope"], "=", SCOPES[1])
_DEPTH = 4
"""Levels of folders below a path at which runs are found."""


class Page(NamedTuple):
    rows: list[Row]
    total: int | None
    """Rows on all pages; None if counting took longer than the page's budget."""


class Dumps(contextlib.AbstractContextManager["Dumps"]):
    """Opened dumps. Thread-safe; a context manager. Filters and sort keys are those of :mod:`.filters`.

    Every method raises ConfigError for a wrong filter, sort key, run or id, and for a dump that is gone.

    Example:
        >>> with Dumps.open("runs/demo") as dumps:
        ...     for row in dumps.page("status=failed version>=4", sort="-tokens", limit=20).rows:
        ...         print(row["id"], row["cause"])
    """

    def __init__(self, paths: Sequence[Path], on_progress: Progress) -> None:
        self._paths, self._on_progress = paths, on_progress
        self._runs: dict[tuple[Path, str, bool], RunDumps] = {}
        """Keyed by folder or file, the named part of it, and True for a run's folder."""

    @classmethod
    def open(cls, *paths: str | Path, may_be_empty: bool = False, on_progress: Progress = lambda lines: None) -> Self:
        """Return the dumps of ``paths``, indexed up to now.

        Args:
            paths: Folders of runs, folders above runs, folders of dumps below a run or anywhere, or files.
            may_be_empty: Accept a run that has just begun and has no dumps yet.
            on_progress: Called with the number of lines that were read, every some thousand lines of an update.

        Raises:
            ConfigError: If a path does not exist or has no dumps."""
        dumps = cls(list(map(Path, paths)), on_progress)
        try:
            dumps.refresh(budget_s=0.3)
            if not (may_be_empty or dumps.problems(limit=1) or dumps.count()):
                raise ConfigError(
                    f"{', '.join(map(str, paths))}: no dumped episodes here: with rollout.dump_to_file a run writes "
                    "them to RUN_DIR/rollout, and those of the held-out rows to RUN_DIR/eval-rollout"
                )
        except BaseException:
            dumps.close()
            raise
        return dumps

    def close(self) -> None:
        for run in self._runs.values():
            run.index.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def runs(self) -> dict[str, Path]:
        """Folder, or file, of each run by its name."""
        return {run.name: run.index.root for run in self._runs.values()}

    def refresh(self, *, budget_s: float = 0.02) -> int:
        """Read what was dumped since the last call, by new runs too, and return how many lines that were.
        Costs a look at every folder of versions, and ``budget_s`` seconds at most to see whether old files changed."""
        self._find_runs()
        return sum(run.index.refresh(budget_s=budget_s) for run in self._runs.values())

    def page(
        self, filter: str = "", *, sort: str = _DEFAULT, offset: int = 0, limit: int = 50, count_s: float = 0.15
    ) -> Page:
        """Return rows ``offset`` to ``offset + limit`` of those that match, and how many match.

        Args:
            sort: A key of ``SORT_KEYS``, ``reward/NAME`` or ``counts/NAME``, with ``-`` before it for descending;
                missing values come last. Without it rows come by version, task and sample; ``newest`` is training
                from the newest version on, then evaluation. Equal values come in the order in which they were indexed.
            count_s: Seconds that counting may take for each run, beyond the page itself."""
        rows = list(self.rows(filter, sort=sort, offset=offset, limit=limit))
        if len(rows) < limit and (rows or not offset):
            return Page(rows, offset + len(rows))
        return Page(rows, self.count(filter, budget_s=count_s))

    def count(self, filter: str = "", *, budget_s: float | None = None) -> int | None:
        """Return how many rows match; None if that takes longer than ``budget_s`` seconds for a run."""
        expr = parse(filter)
        counts = [run.count(expr, budget_s) for run in self._runs.values()]
        return None if None in counts else sum(count or 0 for count in counts)

    def rows(
        self, filter: str = "", *, sort: str = _DEFAULT, offset: int = 0, limit: int | None = None
    ) -> Iterator[Row]:
        """Yield the rows that match, each as soon as it is found; memory stays flat."""
        expr, order = parse(filter), None if sort in ("", _DEFAULT, _NEWEST) else parse_sort(sort)
        offset, limit = min(max(0, offset), MOST), MOST if limit is None else min(limit, MOST)
        runs = list(self._runs.values())
        if order is None:  # run after run
            scopes: tuple[Expr, ...] = (Not(_EVALUATION), _EVALUATION) if sort == _NEWEST else (Both(()),)
            places = [(Both((expr, scope)), run) for scope in scopes for run in runs]
            for place, (part, run) in enumerate(places, 1):
                if limit == 0:
                    return
                skipped = offset if place == len(places) or not offset else min(offset, run.count(part) or 0)
                offset -= skipped
                for row in run.select(part, NEWEST if sort == _NEWEST else ORDER, limit, offset=skipped):
                    yield row
                    limit -= 1
            return
        key, down, sql = order
        end = offset + limit
        with contextlib.ExitStack() as stack:
            parts = [stack.enter_context(contextlib.closing(run.select(expr, sql, end))) for run in runs]
            value = (lambda row: row["numbers"].get(key)) if "/" in key else itemgetter(key)
            merged = heapq.merge(*parts, key=lambda row: rank(value(row), down), reverse=down)
            yield from itertools.islice(merged, offset, end)

    def sample(self, size: int, seed: int = 0, filter: str = "") -> list[Row]:
        """Return ``size`` random rows of those that match, the same for the same seed and dumps, in order."""
        expr = parse(filter)
        found = [(run, id) for run in self._runs.values() for id in run.ids(expr)]
        chosen = sorted(random.Random(seed).sample(range(len(found)), min(size, len(found))))
        rows = (run.row(id) for run, id in map(found.__getitem__, chosen))
        return [row for row in rows if row is not None]

    def record(self, run: str, id: str) -> dict[str, Any]:
        """Return the dumped line ``id`` as it was written, and its ``run``, ``id``, ``scope`` and ``version``."""
        part = self.run(run)
        return part.record(part.find(id))

    def records(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        """Yield the record of each row; rows that are gone meanwhile are left out."""
        for row in rows:
            with contextlib.suppress(ConfigError):
                yield self.run(row["run"]).record(row)

    def episode(self, run: str, id: str) -> list[dict[str, Any]]:
        """Return the records of all sequences of the episode that the line ``id`` belongs to, by ``sample_idx``."""
        part = self.run(run)
        return [part.record(row) for row in part.episode(part.find(id))]

    def group(self, run: str, group: str) -> list[Row]:
        """Return the rows of all episodes with the group id ``group``, by version, task and sample."""
        return list(self.run(run).select(Term(KEYS["group"], "=", group))) if is_utf8(group) else []

    def groups(self, filter: str = "", *, offset: int = 0, limit: int = 50) -> list[dict[str, Any]]:
        """Return the groups with matching rows, over these rows, by run, version and group. Keys: run, scope, version,
        group, task, lines, episodes, reward (mean), reward_min, reward_max, finished, status (counts by status)."""
        expr = parse(filter)
        offset, limit = min(max(0, offset), MOST), min(limit, MOST)
        found: list[dict[str, Any]] = []
        for run in self._runs.values():
            found += run.groups(expr, max(0, offset + limit - len(found)))
        return found[offset : offset + limit]

    def summary(self, filter: str = "") -> list[dict[str, Any]]:
        """Return the figures of each run.

        Keys: run, path, index (path), lines, groups, reward (mean), status (counts), versions, failures, problems
        (counts by kind), unfinished (files that a writer is at, or was killed at), notes. ``versions`` are dicts with
        scope, version, lines, groups, reward (mean), rewards (episodes with one), tokens (mean), status (counts).
        ``failures``, most frequent first, have error_kind, error_type, count, and status, run, id, cause and error
        (its text) of one example; rejected episodes are there too."""
        return [run.summary(filter) for run in self._runs.values()]

    def problems(self, *, limit: int = 1000) -> list[dict[str, Any]]:
        """Return what could not be read: dicts with run, file, line, offset, kind and message; a folder has no file.
        Kinds: ``not JSON``, ``wrong shape``, ``unfinished line`` (a writer is at it, or was killed), ``unreadable``."""
        found: list[dict[str, Any]] = []
        for run in self._runs.values():
            found += run.problems(min(limit, MOST) - len(found))
        return found

    def notes(self) -> list[str]:
        """Return what a user should know: lines that could not be read, files of a killed run, where an index is."""
        found = []
        for run in self._runs.values():
            name, (counts, unfinished) = run.name, run.problem_counts()
            found += [*run.index.notes, *run.index.unread]
            if counts:
                kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
                found.append(f"{name}: {sum(counts.values())} lines or files could not be read ({kinds})")
            if unfinished:
                found.append(f"{name}: {unfinished} unfinished files: a run is writing, or was killed while it wrote")
        return found

    def _find_runs(self) -> None:
        """Open the runs below the paths that are not open, and close those that are gone."""
        if self._runs and not all(path.exists() for path in self._paths):
            return
        found = list(dict.fromkeys(each for path in self._paths for each in _runs_at(path)))
        taken = self.runs
        runs: dict[tuple[Path, str, bool], RunDumps] = {}
        for name, (root, part) in zip(_names(found), found, strict=True):
            key = (root, part, is_run(root))
            if (run := self._runs.get(key)) is None:
                run = RunDumps(DumpIndex(root, str(root / part) if name in taken else name, self._on_progress), part)
            runs[key] = run
        before, self._runs = self._runs, runs  # replaced, because other threads iterate over it
        for key in before.keys() - runs.keys():
            before[key].index.close()

    def run(self, name: str) -> RunDumps:
        """Return the dumps of one run by its name."""
        for run in self._runs.values():
            if run.name == name:
                return run
        raise ConfigError(f"no run {name!r} is open; there are: {', '.join(self.runs)}")


def dataset_row(dumps: Dumps, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dataset row of a record of ``dumps``: a dump has it on its first line; raises ConfigError."""
    file = record["id"].rpartition(":")[0]
    row = (record if "row" in record else dumps.record(record["run"], f"{file}:1")).get("row")
    if not isinstance(row, dict):
        raise ConfigError(
            f"{record['run']} {file} has no dataset row, which an agent needs, and a reward function unless it takes "
            "exactly prompt, completion, prompt_ids and completion_ids: the row has no JSON form, or an older version "
            "wrote the dump. Choose another episode"
        )
    return row


# -- from paths to runs


def _runs_at(path: Path) -> list[tuple[Path, str]]:
    """Return folder or file of each run below ``path``, and the part of the run that ``path`` names."""
    if not path.exists():
        raise ConfigError(f"{path}: No such file or directory: give a file or folder that a run wrote")
    full = path.resolve()
    scopes = [index for index in range(len(full.parts)) if is_scope(Path(*full.parts[: index + 1]))]
    if scopes and (full.is_dir() or len(full.parts) > scopes[-1] + 1):
        return [(Path(*full.parts[: scopes[-1]]), "/".join(full.parts[scopes[-1] :]))]
    runs = list(_runs_below(full, _DEPTH)) if full.is_dir() else []
    runs.sort(key=lambda run: [(len(part) if part.isdigit() else 0, part) for part in run.parts])  # 9 before 10
    return [(run, "") for run in runs] or [(full, "")]


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif depth:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for name in [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]:
                yield from _runs_below(folder / name, depth - 1)


def _names(runs: Sequence[tuple[Path, str]]) -> list[str]:
    """Return a short name for each run, or its path where two would be the same."""
    short = ["/".join((*root.parts[-2:], *Path(part).parts)) for root, part in runs]
    full = [str(root / part) for root, part in runs]
    return [name if short.count(name) == 1 else path for name, path in zip(short, full, strict=True)]
