"""Rows from files, folders and the hub, as one ``datasets.Dataset`` that stays on disk.

Guarantees that everything named is read, in the order given, or an error says what cannot be read.
"""

from __future__ import annotations
import contextlib
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from areal_lite.data.rows.text_rows import COMPRESSIONS, different_columns, kind_of, text_table
from areal_lite.errors import ConfigError, did_you_mean
from areal_lite.files.whole_files import check_cache, local_copies

if TYPE_CHECKING:
    import datasets

_log = logging.getLogger(__name__)
_TEXT = (".json", ".jsonl", ".csv")
_SUFFIXES = (*_TEXT, ".parquet", ".arrow")
_SPLIT = re.compile(r"[\w.\-]+(\[[^\]]*\])?(\+[\w.\-]+(\[[^\]]*\])?)*")
_HUB_NAME = re.compile(r"[\w\-]+(/[\w.\-]+)?")
_Source = tuple[str, dict[str, list[str]]]  # the wanted split or slice, and files (or their addresses) by split


def load_dataset(data_path: str | Sequence[str], *, cache_dir: str | None = None) -> datasets.Dataset:
    """Return the rows of ``data_path``; those of a list are concatenated. ConfigError, with path and line, if something
    cannot be read, sources differ in columns, or there are no rows; StorageError if the cache cannot be written.

    Args:
        data_path: A file (parquet, json, jsonl, csv, arrow; text files also .gz, .bz2, .xz, .zst), a pattern, a folder
            of such files, an address (https://, s3://, hf://, ...), or the name of a dataset on the hub. Each may
            begin with ``SPLIT@``: ``train[:10%]@x.jsonl``, ``test@folder``; the default is all of ``train``.
        cache_dir: Folder for copies of remote files and for tables; None means ``~/.cache/areal_lite``.
    """
    paths = [data_path] if isinstance(data_path, str) else list(data_path)
    cache = Path(cache_dir or "~/.cache/areal_lite").expanduser()
    sources: list[_Source] = []
    with _quiet():
        for path in paths:
            split, files = _source(path, cache)
            if sources and split == sources[-1][0] == "train" == min(sources[-1][1]) and files.keys() == {"train"}:
                sources[-1][1]["train"] += files["train"]  # read together, so they share column types
            else:
                sources.append((split, files))
        rows = _joined([part for source in sources for part in _parts(*source, cache)])
    if not rows:
        raise ConfigError(f"dataset {data_path}: there are no rows: give at least one")
    return rows


def text_files(paths: Sequence[str], *, cache_dir: str | None) -> list[Path]:
    """Return the JSON and CSV files that ``paths`` name, remote ones as local copies."""
    cache = Path(cache_dir or "~/.cache/areal_lite").expanduser()
    names = [name for path in paths for files in _source(path, cache)[1].values() for name in files]
    return [file for name in names for file in _local(name, cache) if _suffix(file.name) in _TEXT]


def looks_like_files(path: str) -> bool:
    """Return whether ``path`` names files, a folder or a dataset on the hub rather than a Python object."""
    _, name = _split_and_path(path)
    return "/" in name or "." not in name or _suffix(name) is not None or Path(name).exists()


def _split_and_path(path: str) -> tuple[str, str]:
    prefix, at, rest = path.partition("@")
    if at and rest and _SPLIT.fullmatch(prefix) and not Path(path).exists():
        return prefix, rest
    return "train", path


def _suffix(path: str) -> str | None:
    name = Path(path).name.lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)


def _source(path: str, cache: Path) -> _Source:
    split, name = _split_and_path(path)
    local = Path(name).expanduser()
    if "://" in name or local.is_file():
        files = [name if "://" in name else str(local)]
    elif local.is_dir():
        return split, _folder(local.resolve(), cache)
    elif any(char in name for char in "*?["):
        matches = Path(local.anchor).glob(str(local.relative_to(local.anchor)))
        files = sorted(str(file) for file in matches if file.is_file())
        if not files:
            raise ConfigError(f"dataset {path}: no file matches {name} (looked in {Path.cwd()})")
    elif _suffix(name) is None and _HUB_NAME.fullmatch(name):
        return split, _files_by_split(name, cache)
    else:
        names = [other.name for other in local.parent.iterdir()] if local.parent.is_dir() else []
        hint = did_you_mean(local.name, names, f" (looked in {Path.cwd()})")
        raise ConfigError(f"dataset {local}: no such file or folder{hint}")
    return split, {"train": files}


def _folder(path: Path, cache: Path) -> dict[str, list[str]]:
    files = _files_by_split(str(path), cache)
    if skipped := sorted({str(file) for file in path.rglob("*") if _suffix(file.name)}.difference(*files.values())):
        _log.warning(
            "dataset %s: skipped %s, which belong to no split: other files have train or test in their names, or "
            "another type; to read them, name all files in a list",
            path,
            skipped,
        )
    return files


def _files_by_split(name: str, cache: Path) -> dict[str, list[str]]:
    import datasets

    try:
        files = datasets.load_dataset_builder(name, cache_dir=str(cache)).config.data_files or {}
    except Exception as error:  # the hub, the network and a README fail in many ways
        raise ConfigError(
            f"dataset {name}: {str(error) or type(error).__name__}: name a folder of {', '.join(_SUFFIXES)} files, or "
            "a dataset on the hub that this machine can reach; to choose one of several configurations, name its "
            "files: hf://datasets/OWNER/NAME/CONFIGURATION/*.parquet"
        ) from error
    return {str(split): [str(file) for file in names] for split, names in files.items()}


def _parts(split: str, files: dict[str, list[str]], cache: Path) -> list[tuple[str, datasets.Dataset]]:
    import datasets

    wanted = [re.match(r"[\w.\-]+", part)[0] for part in split.split("+")]  # type: ignore[index]
    for name in wanted:
        if name not in files:
            where = next(iter(files.values()), ["?"])[0]
            raise ConfigError(
                f"dataset {split}@{where}: no split {name!r}; the splits are {sorted(files)}: name one before the @"
            )
    if split in files:
        return _read(files[split], cache)
    splits = {name: _joined(_read(files[name], cache)) for name in wanted}
    try:
        slices = datasets.ReadInstruction.from_spec(split).to_absolute(
            {name: len(rows) for name, rows in splits.items()}
        )
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"dataset {split}@{files[wanted[0]][0]}: {error}: write train, train[:100], train[10%:20%], "
            "or several joined with +"
        ) from None
    return [
        (split, splits[part.splitname].select(range(part.from_, part.to))) for part in slices if part.from_ < part.to
    ]


def _read(names: Sequence[str], cache: Path) -> list[tuple[str, datasets.Dataset]]:
    files = [file for name in names for file in _local(name, cache)]
    parts = []
    for is_text, group in itertools.groupby(files, lambda file: _suffix(file.name) in _TEXT):
        adjacent = list(group)
        if is_text:
            parts.append((str(adjacent[0]), text_table(adjacent, cache)))
        else:
            parts += [(str(file), _typed_table(file, cache)) for file in adjacent]
    return parts


def _local(name: str, cache: Path) -> list[Path]:
    return local_copies(name, cache) if "://" in name else [Path(name)]


def _typed_table(file: Path, cache: Path) -> datasets.Dataset:
    import datasets
    import pyarrow.parquet  # type: ignore[import-untyped]

    suffix = _suffix(file.name)
    if suffix is None:
        raise ConfigError(f"dataset {file}: unknown file type: rename it to one of {', '.join(_SUFFIXES)}")
    try:
        if suffix == ".parquet" and not pyarrow.parquet.read_metadata(file).num_rows:
            return datasets.Dataset.from_dict({})  # datasets cannot read an empty file
        return datasets.load_dataset(suffix[1:], data_files=[str(file)], split="train", cache_dir=str(cache))  # nosec B615 # local files
    except Exception as error:  # pyarrow, datasets and the codecs raise different errors
        if "corresponds to no data" in str(error):  # a file with columns but no rows
            return datasets.Dataset.from_dict({})
        reason = error.__cause__ or error
        check_cache(cache, reason)
        raise ConfigError(
            f"dataset {file}: cannot be read ({reason}): is it complete, and does its type match its name?"
        ) from error


def _joined(parts: Sequence[tuple[str, datasets.Dataset]]) -> datasets.Dataset:
    """Return the rows of all parts; types that differ in width, such as int32 and float, become the wider one."""
    import datasets
    import pyarrow as pa

    parts = [(name, rows) for name, rows in parts if len(rows)]
    if not parts:
        return datasets.Dataset.from_dict({})
    first_name, first = parts[0]
    schema = first.features.arrow_schema
    for name, rows in parts[1:]:
        if set(rows.column_names) != set(first.column_names):
            raise different_columns(first_name, first.column_names, name, rows.column_names)
        own = rows.features.arrow_schema
        for place, column in enumerate(schema.names):
            both = schema.field(column), own.field(column)
            # Text and bytes would become bytes.
            promote = "default" if any("binary" in str(field.type) for field in both) else "permissive"
            try:
                wider = pa.unify_schemas([pa.schema([field]) for field in both], promote_options=promote).field(0)
            except pa.ArrowTypeError as error:
                kinds = kind_of(first[0][column]), kind_of(rows[0][column])
                raise ConfigError(
                    f"dataset {name}: column {column!r} is a {kinds[1]} ({both[1].type}), but a {kinds[0]} in "
                    f"{first_name} ({both[0].type}): use one type in all files"
                ) from error
            schema = schema.set(place, wider)
    features = datasets.Features.from_arrow_schema(schema)
    return datasets.concatenate_datasets(
        [rows if rows.features == features else rows.cast(features) for _, rows in parts]
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of ``datasets``, and its log of errors, which are raised anyway."""
    import datasets

    level, bars = datasets.logging.get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
