"""Rows of JSON and CSV files, kept on disk as one Arrow table.

Guarantees that values come back as they were written: text never becomes a date, nested values keep their own keys,
and a CSV cell becomes a number only if the number prints as the same text. Every damaged row is an error with file
and line. Knows nothing about the meaning of a column.

The readers of ``datasets`` turn "2024-01-01" into a timestamp and "007" into 7, guess the type of a column from the
first megabytes, and do not report line numbers.
"""

import bz2
import csv
import gzip
import hashlib
import io
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
import orjson
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import cached_file

if TYPE_CHECKING:
    from datasets import Dataset

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
Row = dict[str, Any]
_BATCH = 1000
_BOM = b"\xef\xbb\xbf"
_LONG_NUMBER = re.compile(rb"\d{19}")
_WHOLE = range(-(1 << 63), 1 << 64)  # integers that orjson reads and writes; it turns others into floats


@dataclass(slots=True)
class _Column:
    kind: str
    type: str
    where: str


def text_table(files: Sequence[Path], cache: Path) -> "Dataset":
    """Return the rows of ``files``, in order; missing keys become None."""
    from datasets import Dataset

    # The table is made again when a file's size or modification time changes.
    state = [(str(file.resolve()), (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    target = cache / "tables" / f"{hashlib.sha256(repr(state).encode()).hexdigest()[:32]}.arrow"
    return Dataset.from_file(str(cached_file(target, lambda path: _write(path, files))))


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value: text, number, bool, list, dict or null."""
    if value is None:
        return "null"
    return {str: "text", int: "number", float: "number"}.get(type(value), type(value).__name__)


def different_columns(first: str, first_names: Iterable[str], second: str, second_names: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"dataset {second}: its columns are {sorted(second_names)}, but {first} has {sorted(first_names)}: all "
        "rows of a dataset need the same columns; rename or add columns, or load the files separately"
    )


def _write(path: Path, files: Sequence[Path]) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    from datasets import Features, Json, Value

    columns = _columns(files)
    schema = Features(
        {name: Json() if column.type == "json" else Value(column.type) for name, column in columns.items()}
    ).arrow_schema
    as_json = [name for name, column in columns.items() if column.type == "json"]
    rows = (row for file in files for row in located_rows(file))
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
        while batch := list(itertools.islice(rows, _BATCH)):
            records = [{**row, **{name: _as_json(row.get(name), where) for name in as_json}} for where, row in batch]
            writer.write_batch(pa.RecordBatch.from_pylist(records, schema=schema))


def _as_json(value: Any, where: str) -> str | None:
    try:
        return None if value is None else orjson.dumps(value).decode()
    except TypeError as error:
        raise ConfigError(
            f"dataset {where}: a value cannot be stored ({error}): nest it less deeply, or write it as text"
        ) from None


def _columns(files: Sequence[Path]) -> dict[str, _Column]:
    columns: dict[str, _Column] = {}
    first_file: Path | None = None
    for file in files:
        names: dict[str, None] = {}
        for where, row in located_rows(file):
            names |= dict.fromkeys(row)
            for name, value in row.items():
                _add_value(columns, name, value, where)
        if not names:
            continue
        if first_file is None:
            first_file, first_names = file, names
        elif names.keys() != first_names.keys():
            raise different_columns(str(first_file), first_names, str(file), names)
    return columns


def _add_value(columns: dict[str, _Column], name: str, value: Any, where: str) -> None:
    kind, type_ = kind_of(value), _type(value)
    if (column := columns.get(name)) is None or column.kind == "null":
        columns[name] = _Column(kind, type_, where)
    elif kind not in ("null", column.kind):
        raise ConfigError(
            f"dataset {where}: column {name!r} is a {kind}, but a {column.kind} in {column.where}: use one kind"
        )
    elif type_ not in ("null", column.type):
        column.type = "json"  # integers and floats mixed, or unsigned 64-bit integers


def _type(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "int64" if value < 1 << 63 else "json"  # none is below -(1 << 63)
    return {type(None): "null", str: "string", bool: "bool", float: "float64"}.get(type(value), "json")


def located_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row with its location for error messages."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    is_csv = path.name.lower().removesuffix(compression).endswith(".csv")
    try:
        if is_csv:
            yield from _csv_rows(path, compression)
        else:
            with _open(path, compression) as file:
                yield from _json_rows(path, file)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, lzma.LZMAError, zlib.error) as error:
        raise ConfigError(
            f"dataset {path}: cannot be read ({error}): is it complete, and does its type match its name?"
        ) from error


def _open(path: Path, compression: str) -> BinaryIO:
    if compression == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    opened: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(compression, Path.open)
    return opened(path, "rb")  # type: ignore[no-any-return]


def _json_rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, Row]]:
    in_lines = False
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        if not in_lines and line.lstrip().startswith(b"["):
            for row_number, row in enumerate(_parsed(line + file.read(), str(path)), 1):
                where = f"{path}, row {row_number}"
                yield where, checked_row(row, where)
            return
        in_lines = True
        where = f"{path}, line {number}"
        try:
            yield where, checked_row(_parsed(line, where), where)
        except ConfigError as error:
            if line.endswith(b"\n"):
                raise
            raise ConfigError(f"{error}. The last line may be truncated: complete or remove it") from None


def _parsed(text: bytes, where: str) -> Any:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"dataset {where}: not JSON: {error}: write an object per line, or a list of them") from None
    if _LONG_NUMBER.search(text):
        json.loads(text, parse_int=partial(_check_size, where))
    return value


def _check_size(where: str, digits: str) -> None:
    if len(digits) > 20 or int(digits) not in _WHOLE:
        raise ConfigError(f"dataset {where}: the number {digits:.40} exceeds 64 bits: write it in quotes, as text")


def checked_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigError(f'dataset {where}: a {kind_of(row)}: each row must be an object, {{"key": value}}')
    return row


def _csv_rows(path: Path, compression: str) -> Iterator[tuple[str, Row]]:
    texts = {
        name
        for _, row in _csv_cells(path, compression)
        for name, cell in row.items()
        if cell and isinstance(_number(cell), str)
    }
    for where, row in _csv_cells(path, compression):
        yield where, {name: (cell if name in texts else _number(cell)) if cell else None for name, cell in row.items()}


def _csv_cells(path: Path, compression: str) -> Iterator[tuple[str, dict[str, str]]]:
    csv.field_size_limit(1_000_000_000)  # the default limit is 128 KiB
    with io.TextIOWrapper(_open(path, compression), encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ConfigError(f"dataset {path}: duplicate column names in {header}: rename one")
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"dataset {where}: {len(cells)} cells for {len(header)} columns: fix the line; a cell "
                    'with a comma or a line break needs "quotes"'
                )
            yield where, dict(zip(header, cells, strict=True))


def _number(cell: str) -> int | float | str:
    for number in (int, float):
        try:
            value = number(cell)
        except ValueError:
            continue
        if str(value) == cell and cell not in ("nan", "inf", "-inf"):
            return value if number is float or value in _WHOLE else cell
    return cell
