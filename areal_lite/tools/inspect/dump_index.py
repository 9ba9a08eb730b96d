"""The index of one run's dumps: an SQLite file with a row per dumped line.

The JSON lines stay the truth: :meth:`DumpIndex.refresh` reads what is new or has grown, and an index that is damaged,
of another version or deleted is built again. A line that cannot be read is a row of the table ``problems``, never an
exception. An unfinished last line is read again when its file grows. Processes may share an index: each chunk of a
file is added in a transaction, by the process that comes first.

Readers build the index, not the dumper: a row costs 22 us of CPU beside the 36 us of dumping a line (192 tokens), in a
thread that shares the interpreter with all episodes. A reader spends about 69 us a line, parsing included, once. Full
text is searched in the dumps, line by line in the order asked for, at 15 us a line: the first matches come at once, and
an FTS5 trigram index would first have to read everything, take as much disk as the text, and still not answer regular
expressions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import orjson

from areal_lite.errors import ConfigError, StorageError
from areal_lite.tools.inspect.episode_row import COLUMNS, SCOPES, TEXTS, ShapeError, row_of, text_found
from areal_lite.tools.inspect.filters import is_literal, text_hash

INDEX_NAME = "index.sqlite"
"""In the run's folder; elsewhere, and for a folder that cannot be written, it is in the user's cache."""
_SCHEMA = 2
_CHUNK_LINES = 4000
_CHUNK_BYTES = 32 << 20
"""Memory of an update is bounded by one chunk and one line."""
_SETTLED_NS = 2_000_000_000
"""A folder that changed less than this before it was listed may have changed again unseen."""
_GUARD = 256
"""Bytes before the indexed end of a file that must be unchanged for the file to count as grown."""
_RECHECK_S = 0.02
"""Time of a refresh for looking at files in folders that have not changed."""
_BUSY_S = 30.0

_CREATE = f"""
CREATE TABLE folders(id INTEGER PRIMARY KEY, path TEXT UNIQUE, parent INTEGER, mtime INTEGER, unfinished INTEGER);
CREATE TABLE files(id INTEGER PRIMARY KEY, folder INTEGER, name TEXT, size INTEGER, mtime INTEGER, inode INTEGER,
    indexed INTEGER, lines INTEGER, guard INTEGER, UNIQUE(folder, name));
CREATE TABLE texts(id INTEGER PRIMARY KEY, field TEXT, hash INTEGER, text TEXT);
CREATE INDEX texts_hash ON texts(field, hash);
CREATE TABLE episodes(id INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(f'"{name}"' for name in COLUMNS)},
    file INTEGER, line INTEGER, offset INTEGER, length INTEGER);
CREATE INDEX episodes_order ON episodes(version, task, sample, scope);
CREATE INDEX episodes_file ON episodes(file, line);
CREATE TABLE problems(file INTEGER, line INTEGER, offset INTEGER, kind TEXT, message TEXT);
CREATE INDEX problems_file ON problems(file);
"""
_INSERT = f"INSERT INTO episodes VALUES (NULL{', ?' * (len(COLUMNS) + 4)})"
_TEXT_PLACES = tuple((COLUMNS.index(name), name) for name in TEXTS)


@dataclass(slots=True)
class _State:
    """What the index knows of a file."""

    size: int = -1
    mtime: int = 0
    inode: int = 0
    indexed: int = 0
    """Bytes that are in the index."""
    lines: int = 0
    """Lines in these bytes."""
    guard: int = 0
    """Checksum of the last of these bytes."""

    def columns(self) -> tuple[int, ...]:
        """Return the fields."""
        return self.size, self.mtime, self.inode, self.indexed, self.lines, self.guard


_NEW = _State().columns()


@dataclass(slots=True)
class _Chunk:
    """Rows of consecutive lines of one file, and the file's state before and after them."""

    folder: int
    name: str
    before: _State
    after: _State
    replaces: bool
    """Whether the file was written anew, so that its earlier rows go."""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    problems: list[tuple[int, int, str, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Listed:
    """All dumps of a folder were given before this; ``mtime`` is None if the folder may have changed since."""

    folder: int
    mtime: int | None
    unfinished: int


class DumpIndex:
    """The index of the dumps below ``root``. Thread-safe.

    Args:
        root: A run's folder (its ``rollout`` and ``eval-rollout`` count), or a file or any other folder of dumps.
        name: What users call the run.
        on_progress: Called with the number of lines that an update has read so far.
    """

    def __init__(self, root: Path, name: str, on_progress: Callable[[int], object] = lambda lines: None) -> None:
        self.root, self.name = root, name
        self.notes: list[str] = []
        """What a reader should know about the index itself."""
        self._is_run = is_run(root)
        self._on_progress = on_progress
        self._idle: list[tuple[sqlite3.Connection, _TextReader]] = []
        self._idle_lock, self._refreshing = Lock(), Lock()
        self._closed = False
        self._recheck_from = 0
        self.path = self._create()

    # -- connections

    def _create(self) -> Path:
        """Return the index's path, made if it does not exist; in the cache or a temporary folder if it must be."""
        key = hashlib.sha256(str(self.root.resolve()).encode(errors="surrogateescape")).hexdigest()[:20]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "areal-lite"
        places = [cache / f"{key}.sqlite", Path(tempfile.gettempdir()) / f"areal-lite-{os.getuid()}" / f"{key}.sqlite"]
        if self._is_run:
            places.insert(0, self.root / INDEX_NAME)
        for path in places:
            try:
                self._create_at(path)
                return path
            except (OSError, sqlite3.Error) as error:
                self.notes.append(f"no index at {path}: {error}")
        raise ConfigError("; ".join(self.notes) + ". Set XDG_CACHE_HOME to a folder that you may write")

    def _create_at(self, path: Path) -> None:
        if path.parent != self.root:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for attempt in range(2):
            with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)) as connection:
                try:
                    connection.execute("PRAGMA page_size = 16384")  # scans are a fifth faster than with 4096
                    connection.execute("PRAGMA journal_mode = WAL")
                    if connection.execute("PRAGMA user_version").fetchone() != (_SCHEMA,):
                        _create_tables(connection)
                    connection.execute("SELECT max(id) FROM episodes").fetchone()
                    return
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError as error:
                    if attempt:
                        raise
                    self.notes.append(f"{path} was damaged ({error}) and is built again")
            for suffix in ("", "-wal", "-shm"):
                Path(f"{path}{suffix}").unlink(missing_ok=True)

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection to this thread.

        Raises:
            StorageError: If SQLite fails in the block, for example on a full disk.
        """
        with self._idle_lock:
            lent = self._idle.pop() if self._idle else None
        connection, reader = lent or self._connect()
        try:
            yield connection
        except sqlite3.Error as error:
            raise StorageError(
                f"{self.path}: {error}: free disk space, or delete the file to build it again"
            ) from error
        finally:
            reader.close()
            with self._idle_lock:
                keep = not self._closed
                if keep:
                    self._idle.append((connection, reader))
            if not keep:
                connection.close()

    def _connect(self) -> tuple[sqlite3.Connection, _TextReader]:
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -16384")
        reader = _TextReader(self, connection)
        connection.create_function("matches", 2, _matches, deterministic=True)
        connection.create_function("any_is", 2, lambda names, name: name in orjson.loads(names), deterministic=True)
        connection.create_function("any_matches", 2, _any_matches, deterministic=True)
        connection.create_function("run_name", 0, lambda: self.name, deterministic=True)
        connection.create_function("text_matches", 4, reader.matches)
        return connection, reader

    def close(self) -> None:
        """Close the connections that no thread uses; the others close when they come back."""
        with self._idle_lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection, _ in idle:
            connection.close()

    # -- reading

    def file_path(self, connection: sqlite3.Connection, file: int) -> str | None:
        """Return the path of a file below ``root``."""
        found = connection.execute(
            "SELECT folders.path, files.name FROM files JOIN folders ON folders.id = files.folder WHERE files.id = ?",
            (file,),
        ).fetchone()
        return None if found is None else _join(*found)

    def full_path(self, path: str) -> Path:
        """Return where the dump ``path`` is on disk."""
        return self.root / path if self.root.is_dir() else self.root

    def read_line(self, path: str, offset: int, length: int) -> bytes:
        """Return one line of a dump."""
        with self.full_path(path).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    # -- updating

    def refresh(self, *, budget_s: float = _RECHECK_S) -> int:
        """Add lines that the index does not have, drop those that are gone, and return how many lines were read.

        Looks for new files in every folder that changed. Whether known files have changed is looked up for
        ``budget_s`` seconds, the newest first and the next call continuing: our dumper never writes a file twice.
        """
        read, rows, pending = 0, 0, []
        try:
            with self._refreshing, self.connection() as connection:
                for each in self._changes(connection, budget_s):
                    pending.append(each)
                    if isinstance(each, _Chunk):
                        rows += len(each.rows) + len(each.problems)
                        read += each.after.lines - (0 if each.replaces else each.before.lines)
                    if rows >= _CHUNK_LINES or len(pending) >= _CHUNK_LINES:
                        _write(connection, pending)
                        self._on_progress(read)
                        rows, pending = 0, []
                _write(connection, pending)
        except StorageError as error:
            self._note(f"the index is not up to date: {error}")
        return read

    def _changes(self, connection: sqlite3.Connection, budget_s: float) -> Iterator[_Chunk | _Listed]:
        newest = connection.execute("SELECT coalesce(max(id), 0) FROM files").fetchone()[0]
        if not self.root.is_dir():
            folder = _folder_id(connection, "", None)
            if not newest:
                yield from self._read(folder, "", self.root.name, _State())
        else:
            queue: list[tuple[str, int | None]] = [(name, None) for name in (SCOPES if self._is_run else ("",))]
            while queue:
                path, parent = queue.pop()
                yield from self._new_files(connection, path, parent, queue)
        deadline = time.monotonic() + budget_s
        self._recheck_from = self._recheck_from or newest
        while self._recheck_from and time.monotonic() < deadline:
            known = connection.execute(
                "SELECT files.id, folder, path, name, size, files.mtime, inode, indexed, lines, guard FROM files "
                "JOIN folders ON folders.id = folder WHERE files.id <= ? ORDER BY files.id DESC LIMIT 200",
                (self._recheck_from,),
            ).fetchall()
            for _, folder, path, name, *state in known:
                yield from self._read(folder, path, name, _State(*state))
            self._recheck_from = known[-1][0] - 1 if known else 0

    def _new_files(
        self, connection: sqlite3.Connection, path: str, parent: int | None, queue: list[tuple[str, int | None]]
    ) -> Iterator[_Chunk | _Listed]:
        """Give the unknown dumps of a folder that changed, and queue its subfolders."""
        place = self.root / path
        try:
            mtime = place.stat().st_mtime_ns
            known = connection.execute("SELECT id, mtime FROM folders WHERE path = ?", (path,)).fetchone()
            if known is not None and known[1] == mtime:
                children = connection.execute("SELECT path FROM folders WHERE parent = ?", (known[0],))
                queue += [(child, known[0]) for (child,) in children.fetchall()]
                return
            listed_at = time.time_ns()
            subfolders, names, unfinished = _list_folder(place)
            if odd := {name for name in subfolders | names if not is_utf8(name)}:
                self._note(f"{place}: {len(odd)} names are not UTF-8; rename these files to read them")
                subfolders, names = subfolders - odd, names - odd
        except FileNotFoundError:
            _forget_folder(connection, path)
            return
        except OSError as error:
            self._note(f"{place}: {error.strerror}")
            return
        folder = _folder_id(connection, path, parent)
        for name in subfolders:
            _folder_id(connection, _join(path, name), folder)
        queue += [(_join(path, name), folder) for name in subfolders]
        for (child,) in connection.execute("SELECT path FROM folders WHERE parent = ?", (folder,)).fetchall():
            if child.rpartition("/")[2] not in subfolders:
                _forget_folder(connection, child)
        old = {name for (name,) in connection.execute("SELECT name FROM files WHERE folder = ?", (folder,))}
        for name in old - names:
            _forget_file(connection, folder, name)
        for name in sorted(names - old):
            yield from self._read(folder, path, name, _State())
        yield _Listed(folder, mtime if listed_at - mtime > _SETTLED_NS else None, unfinished)

    def _read(self, folder: int, path: str, name: str, known: _State) -> Iterator[_Chunk]:
        """Give what a file has beyond ``known``, in chunks; nothing if it has not changed."""
        full, before = self.full_path(_join(path, name)), known
        try:
            status = os.stat(full)  # noqa: PTH116 -- Path.stat costs twice as much
            if (status.st_size, status.st_mtime_ns) == (known.size, known.mtime):
                return
            with full.open("rb") as file:
                grown = known.indexed > 0 and known.size < status.st_size and known.inode == status.st_ino
                if grown:
                    grown = zlib.crc32(_guarded(file, known.indexed)) == known.guard
                scope, version = _place_of(path)
                begin = known if grown else _State()
                for chunk in _chunks(file, begin, scope, version, is_loose=not self._is_run):
                    chunk.folder, chunk.name, chunk.before = folder, name, before
                    chunk.replaces = not grown and before is known
                    after = chunk.after
                    after.mtime, after.inode = status.st_mtime_ns, status.st_ino
                    if after.size < 0:
                        after.size = status.st_size
                    yield chunk
                    before = after
        except FileNotFoundError:
            with self.connection() as connection:
                _forget_file(connection, folder, name)
        except OSError as error:
            problem = (before.lines + 1, before.indexed, "unreadable", error.strerror or str(error))
            yield _Chunk(folder, name, before, replace(before, size=-1), False, problems=[problem])

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _create_tables(connection: sqlite3.Connection) -> None:
    """Make the tables anew, unless another process has."""
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("PRAGMA user_version").fetchone() != (_SCHEMA,):
        for table in ("folders", "files", "texts", "episodes", "problems"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")
        for statement in _CREATE.split(";"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {_SCHEMA}")
    connection.execute("COMMIT")


def _chunks(
    file: BinaryIO, begin: _State, scope: str | None, version: int | None, *, is_loose: bool
) -> Iterator[_Chunk]:
    """Give the lines of ``file`` from its position on; at least one chunk, perhaps without rows."""
    offset, line, size = begin.indexed, begin.lines, 0
    chunk = _Chunk(0, "", begin, _State(), False)

    def closed(*, is_last: bool) -> _Chunk:
        # A smaller size than the file's makes a later update continue here, if this one is killed.
        size = -1 if is_last else offset
        chunk.after = _State(size=size, indexed=offset, lines=line, guard=zlib.crc32(tail))
        return chunk

    tail = _guarded(file, offset)
    for text in file:
        if text.strip():
            try:
                record = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                kind = "not JSON" if text.endswith(b"\n") else "unfinished line"
                chunk.problems.append((line + 1, offset, kind, str(error)))
                if kind == "unfinished line":
                    break
            else:
                try:
                    if not is_loose or not isinstance(record, dict) or "turns" in record:
                        chunk.rows.append((*row_of(record, scope, version), line + 1, offset, len(text)))
                except ShapeError as error:
                    chunk.problems.append((line + 1, offset, "wrong shape", str(error)))
        offset, line, size = offset + len(text), line + 1, size + len(text)
        tail = (tail + text[-_GUARD:])[-_GUARD:]
        if len(chunk.rows) >= _CHUNK_LINES or size >= _CHUNK_BYTES:
            yield closed(is_last=False)
            chunk, size = _Chunk(0, "", begin, _State(), False), 0
    yield closed(is_last=True)


def _guarded(file: BinaryIO, indexed: int) -> bytes:
    """Return the last bytes before ``indexed``, and leave ``file`` there."""
    start = max(0, indexed - _GUARD)
    file.seek(start)
    return file.read(indexed - start)


def _write(connection: sqlite3.Connection, changes: list[_Chunk | _Listed]) -> None:
    """Add chunks in one transaction; a chunk whose file another process has brought further is dropped."""
    if not changes:
        return
    texts: dict[tuple[str, str], int] = {}
    connection.execute("BEGIN IMMEDIATE")
    try:
        for each in changes:
            if isinstance(each, _Chunk):
                _write_chunk(connection, each, texts)
            else:
                connection.execute(
                    "UPDATE folders SET mtime = ?, unfinished = ? WHERE id = ?",
                    (each.mtime, each.unfinished, each.folder),
                )
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _write_chunk(connection: sqlite3.Connection, chunk: _Chunk, texts: dict[tuple[str, str], int]) -> None:
    key = (chunk.folder, chunk.name)
    found = connection.execute(
        "SELECT id, size, mtime, inode, indexed, lines, guard FROM files WHERE folder = ? AND name = ?", key
    ).fetchone()
    if (_NEW if found is None else found[1:]) != chunk.before.columns():
        return
    if found is not None and chunk.replaces:
        _forget_file(connection, *key)
        found = None
    after = chunk.after.columns()
    if found is None:
        insert = "INSERT INTO files VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)"
        file = connection.execute(insert, (*key, *after)).lastrowid
    else:
        file = found[0]
        update = "UPDATE files SET size = ?, mtime = ?, inode = ?, indexed = ?, lines = ?, guard = ? WHERE id = ?"
        connection.execute(update, (*after, file))
        connection.execute("DELETE FROM problems WHERE file = ? AND offset >= ?", (file, chunk.before.indexed))
    rows = []
    for row in chunk.rows:
        values = list(row)
        for place, name in _TEXT_PLACES:
            if (text := values[place]) is not None:
                values[place] = texts.get((name, text)) or _text_id(connection, name, text, texts)
        values[-3:-3] = (file,)
        rows.append(values)
    connection.executemany(_INSERT, rows)
    connection.executemany("INSERT INTO problems VALUES (?, ?, ?, ?, ?)", [(file, *each) for each in chunk.problems])


def _text_id(connection: sqlite3.Connection, name: str, text: str, texts: dict[tuple[str, str], int]) -> int:
    key = (name, text_hash(text), text)
    found = connection.execute("SELECT id FROM texts WHERE field = ? AND hash = ? AND text = ?", key).fetchone()
    place = found[0] if found else connection.execute("INSERT INTO texts VALUES (NULL, ?, ?, ?)", key).lastrowid
    assert place is not None
    texts[name, text] = place
    return place


def _list_folder(place: Path) -> tuple[set[str], set[str], int]:
    """Return the names of subfolders and dumps, and the number of unfinished files."""
    subfolders, names, unfinished = set(), set(), 0
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl"):
                names.add(entry.name)
            elif entry.name.startswith(".unfinished-"):
                unfinished += 1
            elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                subfolders.add(entry.name)
    return subfolders, names, unfinished


def _folder_id(connection: sqlite3.Connection, path: str, parent: int | None) -> int:
    connection.execute("INSERT OR IGNORE INTO folders VALUES (NULL, ?, ?, NULL, 0)", (path, parent))
    return int(connection.execute("SELECT id FROM folders WHERE path = ?", (path,)).fetchone()[0])


def _forget_folder(connection: sqlite3.Connection, path: str) -> None:
    found = connection.execute("SELECT id FROM folders WHERE path = ?", (path,)).fetchone()
    if found is None:
        return
    for (child,) in connection.execute("SELECT path FROM folders WHERE parent = ?", found).fetchall():
        _forget_folder(connection, child)
    for (name,) in connection.execute("SELECT name FROM files WHERE folder = ?", found).fetchall():
        _forget_file(connection, found[0], name)
    connection.execute("DELETE FROM folders WHERE id = ?", found)


def _forget_file(connection: sqlite3.Connection, folder: int, name: str) -> None:
    found = connection.execute("SELECT id FROM files WHERE folder = ? AND name = ?", (folder, name)).fetchone()
    if found is not None:
        connection.execute("DELETE FROM episodes WHERE file = ?", found)
        connection.execute("DELETE FROM problems WHERE file = ?", found)
        connection.execute("DELETE FROM files WHERE id = ?", found)


def is_utf8(text: str) -> bool:
    """Return whether ``text`` has no lone surrogates, which SQLite refuses."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


def is_run(folder: Path) -> bool:
    """Return whether ``folder`` is a run's: it has dumps, or the lock of a run that has none yet."""
    return any((folder / scope).is_dir() for scope in SCOPES) or (folder / ".lock").is_file()


def _place_of(path: str) -> tuple[str | None, int | None]:
    """Return scope and version of a folder of a run."""
    scope, _, version = path.partition("/")
    if scope not in SCOPES:
        return None, None
    return scope, int(version) if version.isdecimal() and len(version) <= 15 else None


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


class _TextReader:
    """Searches the texts of dumped lines; keeps the file that it read last."""

    def __init__(self, index: DumpIndex, connection: sqlite3.Connection) -> None:
        self._index, self._connection = index, connection
        self._id: int | None = None
        self._file: BinaryIO | None = None

    def matches(self, file: int, offset: int, length: int, pattern: str) -> bool:
        """Return whether a turn's text has ``pattern``; a line that cannot be read does not."""
        try:
            line = self._line(file, offset, length)
            # orjson writes text as it is; other writers may escape it.
            if is_literal(pattern) and _PLAIN.match(pattern) and pattern.encode() not in line and b"\\u" not in line:
                return False
            return text_found(orjson.loads(line), _compiled(pattern))
        except (OSError, LookupError, TypeError, ValueError):
            return False

    def _line(self, file: int, offset: int, length: int) -> bytes:
        if file != self._id or self._file is None:
            self.close()
            path = self._index.file_path(self._connection, file)
            if path is None:
                raise LookupError(file)
            self._id, self._file = file, self._index.full_path(path).open("rb")
        self._file.seek(offset)
        return self._file.read(length)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


_PLAIN = re.compile(r"[^\x00-\x1f\"\\/\x7f]+\Z")
"""Text that JSON writes as it is."""


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _matches(text: str | None, pattern: str) -> bool:
    return text is not None and _compiled(pattern).search(text) is not None


def _any_matches(names: str, pattern: str) -> bool:
    return any(map(_compiled(pattern).search, orjson.loads(names)))
