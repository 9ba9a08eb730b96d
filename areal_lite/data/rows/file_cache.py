"""Files kept on this machine: copies of remote files, and whatever else is made once.

Guarantees that a file of the cache is whole: it is written beside its place and then renamed. Does not know
whether a remote file has changed since it was copied; remove its copy to have it copied again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_lite.errors import ConfigError


def cached_file(path: Path, write: Callable[[Path], None]) -> Path:
    """Return ``path``; where it is missing, ``write`` makes it first, under another name."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.name)
        os.close(handle)
        try:
            write(Path(name))
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    return path


def local_copies(url: str, cache: Path) -> list[Path]:
    """Return local copies of a remote file, or of all files that match; each address is copied once.

    Args:
        url: Any address fsspec knows: https://, s3://, hf://, ...; ``*`` matches where it can list files.
        cache: Folder of the copies, which keep their names behind a digest of their address.

    Raises:
        ConfigError: If there is no such file, or it cannot be copied.
    """
    import fsspec  # type: ignore[import-untyped]

    try:
        files, pattern = fsspec.url_to_fs(url)
        found = sorted(files.glob(pattern)) if "*" in url else [pattern]
        copies = [
            _copy(files, remote, files.unstrip_protocol(remote) if "*" in url else url, cache)
            for remote in found
        ]
    except Exception as error:  # each protocol has its own errors, and may need a package
        raise ConfigError(
            f"dataset {url}: it cannot be copied ({type(error).__name__}: {error}): check the address, that this "
            "machine reaches it, and that fsspec's package for it is installed"
        ) from error
    if not copies:
        raise ConfigError(f"dataset {url}: no file matches: check the pattern")
    return copies


def _copy(files: Any, remote: str, address: str, cache: Path) -> Path:
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    target = cache / "files" / f"{digest}-{Path(urlsplit(address).path).name}"
    return cached_file(target, lambda path: files.get_file(remote, str(path)))
