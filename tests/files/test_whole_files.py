"""A file under its final name is complete, and a cache that cannot be written is told from a damaged source."""

from __future__ import annotations
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
import fsspec
import pytest
from areal_lite.errors import StorageError
from areal_lite.files.whole_files import cached_file, check_cache, local_copies, write_whole


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_by_content_that_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    path = tmp_path / "a" / "b" / "file"
    for content in (b"first", b"second"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert synced == [5, 6]
    assert path.stat().st_mode & 0o777 == 0o644
    assert names(path.parent) == ["file"]


def test_a_failed_write_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"content")
    assert names(tmp_path) == ["folder"]


def test_a_cached_file_is_made_once_and_leaves_no_file_open(tmp_path: Path) -> None:
    opened = list(Path("/proc/self/fd").iterdir())
    path = tmp_path / "cache" / "file"
    assert cached_file(path, lambda part: part.write_text("one") and None).read_text() == "one"
    assert cached_file(path, lambda part: part.write_text("two") and None).read_text() == "one"
    assert names(path.parent) == ["file"]
    assert len(list(Path("/proc/self/fd").iterdir())) == len(opened)


class Large(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Files for which no disk has room."""

    def get_file(self, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "full")


def test_a_copy_for_which_there_is_no_room_is_an_error_of_the_cache(tmp_path: Path) -> None:
    fsspec.register_implementation("large", Large, clobber=True)
    with pytest.raises(StorageError, match="cannot be written: .*full: free disk space"):
        local_copies("large://x.jsonl", tmp_path)
    assert names(tmp_path / "files") == []


@pytest.mark.parametrize(
    ("error", "is_of_the_cache"),
    [
        (PermissionError(errno.EACCES, "denied", "/cache/file"), True),
        (PermissionError(errno.EACCES, "denied", "/source/file"), False),
        (FileNotFoundError(errno.ENOENT, "gone", "/cache/file"), False),
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EROFS, "read-only"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (ValueError("damaged"), False),
    ],
)
def test_only_an_error_of_the_cache_is_one_of_storage(error: Exception, is_of_the_cache: bool) -> None:
    if not is_of_the_cache:
        check_cache(Path("/cache"), error)
        return
    with pytest.raises(StorageError, match="the cache /cache cannot be written: .*or set cache_dir"):
        check_cache(Path("/cache"), error)


def test_a_line_that_a_full_disk_cuts_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from areal_lite.files.whole_files import append_line
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
for _ in range(2):
    append_line(Path(sys.argv[1]), b"123456\\n")
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "lines")], capture_output=True, text=True)
    assert "cannot be written: no room for a whole line: free disk space" in done.stderr
    assert (tmp_path / "lines").read_bytes() == b"123456\n"
