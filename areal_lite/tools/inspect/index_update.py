"""Bring the index of dumps up to date with the files.

The invariant: in every committed state, the rows of a file are exactly those of its first ``indexed`` bytes, and a
folder has an ``mtime`` only after all dumps that it held at that time were indexed. A process that is killed loses one
open transaction, and the next update continues from the committed state.

Two processes may update one index. The state of a file is read, and its next chunk added, under SQLite's write lock,
so both never add the same line. The lock is given up after each chunk: a reader that only wants the first page waits
for one chunk of the other process, not for a million lines.
"""

import errno
import os
import sqlite3
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO
import orjson
from areal_lite.tools.foreign_files import lines_of, open_inside
from areal_lite.tools.inspect.episode_row import COLUMNS, FACTS, SCOPES, ShapeError, row_of
from areal_lite.tools.inspect.filters import is_utf8
from areal_lite.tools.inspect.training_facts import fact_files, fact_means

UNREADABLE = "unreadable"
_CHUNK_LINES = 4000
_CHUNK_BYTES = 32 << 20
"""Memory of an update is bounded by one chunk and one line."""
_SETTLED_NS = 2_000_000_000
"""A folder that changed less than this before it was listed may have changed again unseen."""
_GUARD = 256
"""Bytes before the indexed end of a file that must be unchanged for the file to count as grown."""
_SEARCHED = 64
"""Versions before a step whose lines it may have trained: more than any useful staleness bound."""
_INSERT = f"INSERT INTO episodes VALUES (NULL{', ?' * (len(COLUMNS) + 5)})"  # nosec B608 # our columns, bound values
_FORGET = "DELETE FROM files WHERE path = ?"  # and with it the rows that refer to it
_FORGET_FACTS = f"UPDATE episodes SET {' = NULL, '.join(FACTS)} = NULL WHERE trained_step = ?"  # nosec B608 # our columns, bound values
_REWARD, _EPISODE = COLUMNS.index("reward"), itemgetter(*map(COLUMNS.index, ("group", "task", "member")))
_NEW = (None, -1, 0, 0, 0, 0, 0)
"""State of a file that the index does not know: id, size, mtime, inode, indexed, lines, guard."""
Problem = tuple[int, int, str, str]
Progress = Callable[[int], object]


class IndexUpdate:
    """One update of the index of the dumps below ``root``; :meth:`run` must be called once."""

    def __init__(self, connection: sqlite3.Connection, root: Path, note: Callable[[str], None], progress: Progress):
        self._connection, self._root, self._is_run = connection, root, is_run(root)
        self._note, self._progress = note, progress
        self._is_file = not root.is_dir()
        self._uncommitted = 0
        self.lines = 0

    def run(self, recheck_from: int, budget_s: float) -> int:
        """Index new dumps, then look for ``budget_s`` seconds at known files with an id of at most ``recheck_from``."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            newest = self._connection.execute("SELECT coalesce(max(id), 0) FROM files").fetchone()[0]
            facts = fact_files(self._root)  # listed before the lines, which are written before them
            self._find_new(is_first=not newest)
            self._add_facts(facts)
            recheck_from = recheck_from or newest
            deadline = time.monotonic() + budget_s
            while recheck_from and time.monotonic() < deadline:
                select = "SELECT id, path FROM files WHERE id <= ? ORDER BY id DESC LIMIT 200"
                known = self._connection.execute(select, (recheck_from,)).fetchall()
                for _, path in known:
                    self._read_file(path)
                recheck_from = known[-1][0] - 1 if known else 0
            self._connection.execute("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise
        return recheck_from

    # -- folders

    def _find_new(self, *, is_first: bool) -> None:
        if self._is_file:
            if is_first:
                self._read_file(self._root.name)
            return
        known = dict(self._connection.execute("SELECT path, mtime FROM folders").fetchall())
        below: dict[str, list[str]] = {}
        for path in known:
            if path:
                below.setdefault(_folder(path), []).append(path)
        seen = set()
        queue = list(SCOPES) if self._is_run else [""]
        while queue:
            path = queue.pop()
            try:
                queue += self._list_if_changed(path, known.get(path), below.get(path, []))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._note(f"{self._root / path}: {error.strerror}")
                queue += below.get(path, [])
            seen.add(path)
        for path in known.keys() - seen:
            self._connection.execute("DELETE FROM files WHERE folder = ?", (path,))
            self._connection.execute("DELETE FROM folders WHERE path = ?", (path,))

    def _list_if_changed(self, path: str, mtime: int | None, subfolders: list[str]) -> list[str]:
        """Index the new dumps of a folder, drop those that are gone, and return the paths of its subfolders."""
        full = self._root / path
        status = full.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a link or no folder, which is not followed")
        if (found := status.st_mtime_ns) == mtime:
            return subfolders
        listed_at = time.time_ns()
        subfolders, dumps, unfinished = _list_folder(full, path)
        if odd := [each for each in (*subfolders, *dumps) if not is_utf8(each)]:
            self._note(f"{full}: {len(odd)} names are not UTF-8; rename these files to read them")
            subfolders, dumps = ([each for each in paths if is_utf8(each)] for paths in (subfolders, dumps))
        old = {file for (file,) in self._connection.execute("SELECT path FROM files WHERE folder = ?", (path,))}
        self._connection.executemany(_FORGET, [(file,) for file in old.difference(dumps)])
        for file in sorted(set(dumps) - old):
            self._read_file(file)
        settled = found if listed_at - found > _SETTLED_NS else None
        self._connection.execute("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", (path, settled, unfinished))
        # A folder that is known to be listed must have its subfolders known, or a killed update would lose them.
        new = "INSERT OR IGNORE INTO folders VALUES (?, NULL, 0)"
        self._connection.executemany(new, [(subfolder,) for subfolder in subfolders])
        return subfolders

    # -- training facts

    def _add_facts(self, files: dict[int, Path]) -> None:
        """Give the lines that new files of training facts name the means of their tokens."""
        known = dict(self._connection.execute("SELECT step, mtime FROM facts").fetchall())
        states = {step: path.lstat().st_mtime_ns for step, path in files.items()}
        new = [step for step, state in states.items() if state != known.get(step)]
        if not new:
            return
        select = "SELECT task, sample, id FROM episodes WHERE version >= ? AND scope = ? ORDER BY id"
        trained = self._connection.execute(select, (new[0] - _SEARCHED, SCOPES[0])).fetchall()
        ids = {(str(task), sample): id for task, sample, id in trained}
        update = f"UPDATE episodes SET {', '.join(f'{name} = ?' for name in FACTS)} WHERE id = ?"  # nosec B608 # our columns, bound values
        self._connection.executemany(_FORGET_FACTS, [(step,) for step in new])  # a resumed run replaced some
        for step in new:
            means = fact_means(files[step], self._root)
            self._connection.executemany(update, [(step, *each, ids[key]) for key, each in means if key in ids])
            self._connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (step, states[step]))

    # -- files

    def _read_file(self, path: str) -> None:
        has_more = True
        while has_more:
            # Another process may add the next chunk while this one has no lock, so the state is read again.
            has_more = self._read_chunk(path)
            self._uncommitted += 1
            if self._uncommitted >= _CHUNK_LINES:
                self._connection.execute("COMMIT")
                self._uncommitted = 0
                self._progress(self.lines)
                self._connection.execute("BEGIN IMMEDIATE")

    def _read_chunk(self, path: str) -> bool:
        """Index the next chunk of a file; return True if the file may have more."""
        select = "SELECT id, size, mtime, inode, indexed, lines, guard FROM files WHERE path = ?"
        id, size, mtime, inode, indexed, lines, guard = self._connection.execute(select, (path,)).fetchone() or _NEW
        full = self._root if self._is_file else self._root / path
        try:
            status = os.stat(full)  # noqa: PTH116 -- Path.stat costs twice as much
            if (status.st_size, status.st_mtime_ns) == (size, mtime):
                return False
            with open_inside(full, self._root) as file:
                grown = indexed > 0 and size < status.st_size and inode == status.st_ino
                if not grown or zlib.crc32(_before(file, indexed)) != guard:
                    self._connection.execute(_FORGET, (path,))
                    id, indexed, lines = None, 0, 0
                chunk = _Chunk(file, indexed, lines, _folder(path), is_loose=not self._is_run)
        except FileNotFoundError:
            self._connection.execute(_FORGET, (path,))
            return False
        except OSError as error:
            id = self._save_state(id, path, (-1, 0, 0, indexed, lines, guard))
            self._add(id, indexed, [], [(lines + 1, indexed, UNREADABLE, error.strerror or str(error))])
            return False
        # A smaller size than the file's makes the next call continue here.
        size = chunk.offset if chunk.is_cut else status.st_size
        state = (size, status.st_mtime_ns, status.st_ino, chunk.offset, chunk.line, zlib.crc32(chunk.tail))
        self._add(self._save_state(id, path, state), indexed, chunk.rows, chunk.problems)
        self.lines += chunk.line - lines
        self._uncommitted += len(chunk.rows) + len(chunk.problems)
        return chunk.is_cut

    def _save_state(self, id: int | None, path: str, state: tuple[int, ...]) -> int:
        if id is None:
            insert = "INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"
            return self._connection.execute(insert, (path, _folder(path), *state)).lastrowid or 0
        update = "UPDATE files SET size = ?, mtime = ?, inode = ?, indexed = ?, lines = ?, guard = ? WHERE id = ?"
        self._connection.execute(update, (*state, id))
        return id

    def _add(self, file: int, begin: int, rows: list[tuple[Any, ...]], problems: list[Problem]) -> None:
        if begin or problems:
            self._connection.execute("DELETE FROM problems WHERE file = ? AND offset >= ?", (file, begin))
        rewarded = [None if row[_REWARD] is None else _EPISODE(row) for row in rows]
        lines = Counter(rewarded)
        weights = [None if each is None else 1 / lines[each] for each in rewarded]
        self._connection.executemany(_INSERT, [(*row, each, file) for row, each in zip(rows, weights, strict=True)])
        insert = "INSERT INTO problems VALUES (?, ?, ?, ?, ?)"
        self._connection.executemany(insert, [(file, *each) for each in problems])


class _Chunk:
    """Rows and problems of the lines of ``file`` from ``offset`` on, at most about one chunk."""

    def __init__(self, file: BinaryIO, offset: int, line: int, folder: str, *, is_loose: bool) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.problems: list[Problem] = []
        self.is_cut = False
        """True if the chunk ends before the file may."""
        self.tail = _before(file, offset)
        self.offset, self.line, self._is_loose = offset, line, is_loose
        scope, _, version = folder.partition("/")
        self._scope = scope if scope in SCOPES else None
        self._version = int(version) if self._scope and version.isdecimal() and len(version) <= 15 else None
        try:
            for text in lines_of(file):
                if self.offset - offset >= _CHUNK_BYTES or len(self.rows) >= _CHUNK_LINES:
                    self.is_cut = True
                    return
                if text.strip() and not self._read(text):
                    return
                self.offset, self.line = self.offset + len(text), self.line + 1
                self.tail = (self.tail + text[-_GUARD:])[-_GUARD:]
        except OSError as error:  # an endless line; those before it are read
            self.problems.append((self.line + 1, self.offset, UNREADABLE, error.strerror or str(error)))

    def _read(self, text: bytes) -> bool:
        """Add the row of a line; return False for an unfinished line."""
        try:
            record = orjson.loads(text)
            if not self._is_loose or not isinstance(record, dict) or "turns" in record:
                source = self.rows[-1][COLUMNS.index("source")] if self.rows else None
                row = row_of(record, self._scope, self._version, source)
                self.rows.append((*row, self.line + 1, self.offset, len(text)))
        except orjson.JSONDecodeError as error:
            kind = "not JSON" if text.endswith(b"\n") else "unfinished line"
            self.problems.append((self.line + 1, self.offset, kind, str(error)))
            return kind == "not JSON"
        except ShapeError as error:
            self.problems.append((self.line + 1, self.offset, "wrong shape", str(error)))
        return True


def is_run(folder: Path) -> bool:
    """Return True if ``folder`` is a run's: it has dumps, or the lock of a run that has none yet."""
    return any(is_scope(folder / scope) for scope in SCOPES) or (folder / ".lock").is_file()


def is_scope(folder: Path) -> bool:
    """Return True if ``folder`` has the dumps of a run by version, and is not one of runs that is named so."""
    return folder.name in SCOPES and any(folder.glob("[0-9]*/"))


def _before(file: BinaryIO, offset: int) -> bytes:
    """Return the last bytes before ``offset``, and leave ``file`` there."""
    start = max(0, offset - _GUARD)
    file.seek(start)
    return file.read(offset - start)


def _list_folder(folder: Path, path: str) -> tuple[list[str], list[str], int]:
    subfolders, dumps, unfinished = [], [], 0
    prefix = f"{path}/" if path else ""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                dumps.append(prefix + entry.name)
            elif entry.name.startswith(".unfinished-"):
                unfinished += 1
            elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                subfolders.append(prefix + entry.name)
    return subfolders, dumps, unfinished


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
