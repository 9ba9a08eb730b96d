"""The index of one run's dumps: an SQLite file with a row per dumped line.

The JSON lines stay the truth: :meth:`DumpIndex.refresh` reads new files and new lines (:mod:`.index_update`), and an
index that is damaged, of another version or deleted is built again. An unreadable line is a row of ``problems``, never
an exception. An unfinished last line is read again when its file grows. Processes may share an index.

It is in a folder that only this user can write, and never in the run's: whoever made that folder could put any file
there, such as a link to another database, triggers that run when rows are added, or rows that hide what the dumps say.
To tell these from an own index takes a secret in the user's cache, and then the index may be there as well.

Readers build the index, not the dumper: a row costs 22 us of CPU beside the 36 us of dumping a line (192 tokens), in a
thread that shares the interpreter with all episodes. A reader spends about 75 us a line, parsing included, once. Full
text is searched in the dumps, line by line in the order asked for, at 15 us a line: the first matches come at once; an
FTS5 trigram index would first read everything, take as much disk as the text, and not answer regular expressions.
"""

import contextlib
import hashlib
import os
import re
import sqlite3
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO
import orjson
from areal_lite.errors import ConfigError, StorageError
from areal_lite.tools.foreign_files import open_inside
from areal_lite.tools.inspect.episode_row import COLUMNS, text_found
from areal_lite.tools.inspect.filters import is_literal
from areal_lite.tools.inspect.index_update import IndexUpdate, Progress

_SCHEMA = 9
_UNUSED_DAYS = 60
"""Days after which the index of a run that nobody looked at is deleted."""
_BUSY_S = 30.0
_PLAIN = re.compile(r"[^\x00-\x1f\"\\/\x7f]+\Z")
"""Text that JSON writes as it is."""


class DumpIndex:
    """The index of the dumps below ``root``. Thread-safe."""

    def __init__(self, root: Path, name: str, on_progress: Progress) -> None:
        self.root, self.name = root, name
        self.notes: list[str] = []
        """Sentences about the index itself, for users."""
        self.unread: list[str] = []
        """Sentences about folders that could not be read."""
        self._on_progress = on_progress
        self._idle: list[tuple[sqlite3.Connection, _TextReader]] = []
        self._idle_lock, self._refreshing = Lock(), Lock()
        self._closed = False
        self._recheck_from = 0
        self.path = self._create()

    def _create(self) -> Path:
        """Return the index's path, made if need be: in the cache, or in a temporary folder if that is read-only."""
        name = hashlib.sha256(str(self.root.resolve()).encode(errors="surrogateescape")).hexdigest()[:20]
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for folder in (cache / "areal-lite", Path(tempfile.gettempdir()) / f"areal-lite-{os.getuid()}"):
            path = folder / f"{name}.sqlite"
            try:
                _make_private(folder)
                try:
                    _create_tables(path)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError):
                        raise
                    self.notes.append(f"{path} was damaged ({error}) and is built again")
                    _remove_database(path)
                    _create_tables(path)
                os.utime(path)
                for unused in folder.glob("*.sqlite"):
                    with contextlib.suppress(OSError):
                        if unused.lstat().st_mtime < time.time() - _UNUSED_DAYS * 86400:
                            _remove_database(unused)
                return path
            except (OSError, sqlite3.Error) as error:
                self.notes.append(f"no index at {path}: {error}")
        raise ConfigError("; ".join(self.notes) + ". Set XDG_CACHE_HOME to a folder that you may write")

    @contextlib.contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection to this thread."""
        with self._idle_lock:
            lent = self._idle.pop() if self._idle else None
        connection, reader = lent or self._connect()
        try:
            yield connection
        except sqlite3.Error as error:
            fix = "free disk space, or delete the file to build it again"
            raise StorageError(f"{self.path}: {error}: {fix}") from error
        finally:
            reader.close()
            with self._idle_lock:
                if self._closed:
                    connection.close()
                else:
                    self._idle.append((connection, reader))

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        with self.connection() as connection:
            return connection.execute(sql, parameters).fetchall()

    def _connect(self) -> "tuple[sqlite3.Connection, _TextReader]":
        connection = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_S, check_same_thread=False)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -16384")
        connection.execute("PRAGMA foreign_keys = ON")  # the rows of a file go with it
        reader = _TextReader(self)
        connection.create_function(
            "matches", 2, lambda text, regex: text is not None and bool(re.search(regex, text)), deterministic=True
        )
        connection.create_function("run_name", 0, lambda: self.name, deterministic=True)
        connection.create_function("text_matches", 4, reader.matches)
        return connection, reader

    def close(self) -> None:
        """Close the connections that no thread uses; the others close when they come back."""
        with self._idle_lock:
            self._closed, idle, self._idle = True, self._idle, []
        for connection, _ in idle:
            connection.close()

    def full_path(self, path: str) -> Path:
        return self.root / path if self.root.is_dir() else self.root

    def refresh(self, *, budget_s: float) -> int:
        """Add lines that the index does not have, drop those that are gone, and return how many lines were read.

        Looks for new files in every folder that changed. Whether known files have changed is looked up for
        ``budget_s`` seconds, the newest first and the next call continuing: our dumper never writes a file twice."""
        read = 0
        try:
            with self._refreshing, self.connection() as connection:
                update = IndexUpdate(connection, self.root, self._cannot_read, self._on_progress)
                try:
                    self._recheck_from = update.run(self._recheck_from, budget_s)
                finally:
                    read = update.lines
        except StorageError as error:
            self._cannot_read(f"the index is not up to date: {error}")
        return read

    def _cannot_read(self, text: str) -> None:
        if text not in self.unread:
            self.unread.append(text)


def _create_tables(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=_BUSY_S)) as connection:
        connection.execute("PRAGMA page_size = 16384")  # scans are a fifth faster than with 4096
        connection.execute("PRAGMA journal_mode = WAL")
        if connection.execute("PRAGMA user_version").fetchone() != (_SCHEMA,):
            connection.execute("BEGIN IMMEDIATE")
            if connection.execute("PRAGMA user_version").fetchone() != (_SCHEMA,):  # another process may be first
                for table in ("folders", "files", "texts", "episodes", "problems", "facts"):
                    connection.execute(f"DROP TABLE IF EXISTS {table}")
                schema = (resources.files("areal_lite.tools.inspect") / "schema.sql").read_text()
                for statement in schema.format(columns=", ".join(f'"{name}"' for name in COLUMNS)).split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {_SCHEMA}")
            connection.execute("COMMIT")
        connection.execute("SELECT max(id) FROM episodes").fetchone()


class _TextReader:
    """Searches the texts of dumped lines; keeps the file that it read last."""

    def __init__(self, index: DumpIndex) -> None:
        self._index = index
        self._path: str | None = None
        self._file: BinaryIO | None = None

    def matches(self, path: str, offset: int, length: int, pattern: str) -> bool:
        try:
            if path != self._path or self._file is None:
                self.close()
                self._path, self._file = path, open_inside(self._index.full_path(path), self._index.root)
            self._file.seek(offset)
            line = self._file.read(length)
            # orjson writes text as it is; other writers may escape it.
            if is_literal(pattern) and _PLAIN.match(pattern) and pattern.encode() not in line and b"\\u" not in line:
                return False
            return text_found(orjson.loads(line), re.compile(pattern))
        except (OSError, LookupError, TypeError, ValueError):
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _remove_database(path: Path) -> None:
    """Remove an SQLite file with the files beside it."""
    for suffix in ("-wal", "-shm", ""):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def _make_private(folder: Path) -> None:
    """Make a folder, or refuse one that other users may write; raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} may be written by other users")
