"""Open files that somebody else may have written, such as those of a run's folder.

A folder from elsewhere may hold links to the rest of the disk, FIFOs, devices, and files without end. Guarantees for
each file opened here: it is a regular file, it lies inside of the named folder after all links are followed, and it is
read up to a bound. A file that breaks a rule is an OSError that says which one, and never a wait. The place is that of
the open descriptor, so a link that somebody puts there in the meantime is found as well.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
import orjson
from areal_lite.errors import ConfigError

MAX_LINE = 1 << 27
"""Bytes of a line; one of a million tokens has less than half of them."""
MAX_WHOLE = 1 << 28
"""Bytes of a file that is read at once."""
MAX_TENSORS = 1 << 36
"""Bytes of a file of weights or of a table, which is read in parts or mapped."""
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def open_inside(path: Path, folder: Path | None = None, *, most: int | None = None) -> BinaryIO:
    """Open a file of ``folder``, by default of its own, to read; raises OSError, also for more than ``most`` bytes."""
    _check_regular(path, os.stat(path))  # noqa: PTH116 -- a device must not even be opened; Path.stat costs twice as much
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)
        _check_regular(path, status)
        place = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 -- the same
        if not _is_inside(place, path.parent if folder is None else folder):
            raise OSError(errno.EPERM, "a link out of its folder, which is not followed", str(path))
        if most is not None and status.st_size > most:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, of which at most {most} are read", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_inside(path: Path, folder: Path | None = None, *, most: int = MAX_WHOLE) -> bytes:
    """Return the content of a file, opened as :func:`open_inside` does."""
    with open_inside(path, folder, most=most) as file:
        return file.read(most)


def checked(path: Path, folder: Path | None = None, *, most: int = MAX_TENSORS) -> Path:
    """Return ``path`` for a library that opens files itself, checked as :func:`open_inside` does."""
    open_inside(path, folder, most=most).close()
    return path


def lines_of(file: BinaryIO, *, most: int = MAX_LINE) -> Iterator[bytes]:
    """Yield the lines of an open file from where it is; raises OSError for one of more than ``most`` bytes."""
    while line := file.readline(most + 1):
        if len(line) > most:
            raise OSError(errno.EFBIG, f"a line of more than {most} bytes, which is not read")
        yield line


def read_lines(path: Path, folder: Path | None = None) -> Iterator[bytes]:
    """Yield the lines of a file, opened as :func:`open_inside` does."""
    with open_inside(path, folder) as file:
        yield from lines_of(file)


def read_records(path: Path, folder: Path | None = None, *, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, opened as :func:`open_inside` does; raises ConfigError. An unfinished last line is
    skipped, or an error if the file must be ``whole``."""
    begin = 0
    try:
        for number, line in enumerate(read_lines(path, folder), 1):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not (whole or line.endswith(b"\n")):
                    return
                raise ConfigError(f"{path}, line {number}: not JSON: {error}; it begins at byte {begin}") from None
            if not isinstance(record, dict):
                raise ConfigError(f"{path}, line {number}: not an object but a {type(record).__name__}")
            yield record
            begin += len(line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a file or folder that a run wrote") from None


def has_plain_files(model: Path, folder: Path) -> bool:
    """Return True if a model's files are regular ones; for a model inside of ``folder``, no link may leave that."""
    is_own = _is_inside(os.path.realpath(model), folder) or model.is_relative_to(folder)
    with suppress(OSError):
        for path in model.iterdir():
            if not path.is_dir():
                checked(path, folder if is_own else Path("/"))  # the hub's cache has links
        return True
    return False


def _check_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file, so it is not read", str(path))


def _is_inside(place: str, folder: Path) -> bool:
    return any(f"{place}/".startswith(f"{root.rstrip('/')}/") for root in (str(folder), os.path.realpath(folder)))
