"""Reading a JSONL file that may still be written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from areal_lite.errors import ConfigError


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of ``path``; an unfinished last line is skipped.

    Raises:
        ConfigError: If there is no such file, or a line before the last is not an object; with its number.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    if not line.endswith(b"\n"):
                        return
                    begin = file.tell() - len(line)
                    raise ConfigError(
                        f"{path}, line {number}: not JSON: {error}; the line begins at byte {begin}"
                    ) from None
                if not isinstance(record, dict):
                    raise ConfigError(f"{path}, line {number}: not an object but a {type(record).__name__}")
                yield record
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a file or folder that a run wrote") from None
