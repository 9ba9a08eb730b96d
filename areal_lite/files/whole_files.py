"""Files written whole: atomic replacement, and a cache of remote files and of tables made from text files.

A file under its final name is complete. Changes of a remote file go unnoticed until its copy is deleted.
"""

import errno
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from areal_lite.errors import ConfigError, StorageError


@contextmanager
def storing(what: object, fix: str = "free disk space") -> Iterator[None]:
    """Raise StorageError for an OSError: ``what`` cannot be written, and how to ``fix`` that."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what} cannot be written: {error}: {fix}") from error


def append_line(path: Path, line: bytes, *, fix: str = "free disk space") -> None:
    with storing(path, fix), path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(line) < len(line):  # half a line would make the file unreadable for good
            file.truncate(end)
            raise OSError("no room for a whole line")


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` with ``content`` atomically and sync it to disk; on failure keep the old file."""
    with _replacing(path) as aside, aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; what is written there replaces it, unless an error is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-", suffix=path.suffix)
    os.close(descriptor)
    aside = Path(name)
    try:
        yield aside
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def cached_file(path: Path, write: Callable[[Path], None]) -> Path:
    """Return ``path``; if it is missing, first create it with ``write``, which gets a temporary name."""
    if not path.exists():
        try:
            with _replacing(path) as aside:
                write(aside)
        except OSError as error:
            check_cache(path.parent, error)
            raise
    return path


def check_cache(folder: Path, error: BaseException) -> None:
    """Raise a StorageError if ``error`` says that the cache ``folder`` is full or not writable."""
    if not isinstance(error, OSError):
        return
    # A source that must not be read is not the cache's fault.
    denied = isinstance(error, PermissionError) and str(error.filename).startswith(str(folder))
    if denied or error.errno in (errno.EROFS, errno.ENOSPC, errno.EDQUOT):
        raise StorageError(
            f"the cache {folder} cannot be written: {error}: free disk space, or set cache_dir of the dataset to a "
            "writable folder"
        ) from error


def local_copies(url: str, cache: Path) -> list[Path]:
    """Return local copies of a remote file, or of all files that match a pattern; each is copied once."""
    import fsspec  # type: ignore[import-untyped]

    try:
        files, pattern = fsspec.url_to_fs(url)
        remotes = sorted(files.glob(pattern)) if "*" in url else [pattern]
        copies = [
            _copy(files, remote, files.unstrip_protocol(remote) if "*" in url else url, cache) for remote in remotes
        ]
    except StorageError:
        raise
    except Exception as error:  # each protocol raises its own errors and may need a package
        raise ConfigError(
            f"dataset {url}: cannot be copied ({type(error).__name__}: {error}): check the address, the network, and "
            "that fsspec's package for it is installed"
        ) from error
    if not copies:
        raise ConfigError(f"dataset {url}: no file matches: check the pattern")
    return copies


def _copy(files: Any, remote: str, address: str, cache: Path) -> Path:
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    target = cache / "files" / f"{digest}-{Path(urlsplit(address).path).name}"
    return cached_file(target, lambda path: files.get_file(remote, str(path)))
