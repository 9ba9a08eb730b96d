"""The rows of a run: from a JSON file, a reasoning-gym task, or a function of the user's."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from areal_lite.api.config import DatasetConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.errors import ConfigError

Row = dict[str, Any]
_GYM = "reasoning-gym:"
_GYM_SIZE = 500
"""Rows of a reasoning-gym task where the config names no size."""


def load_rows(config: DatasetConfig) -> list[Row]:
    """Return the rows ``config`` names, at most ``max_samples``; never none.

    A row of ``reasoning-gym:TASK`` has the keys question, answer, metadata and task.

    Raises:
        ConfigError: If they cannot be had, or one is not a JSON object; with file and line.
    """
    if config.path.startswith(_GYM):
        rows = _reasoning_gym(config)
    elif config.path.endswith((".jsonl", ".json")):
        if config.kwargs:
            raise ConfigError(
                f"dataset {config.path}: kwargs {config.kwargs} mean nothing to a file: remove them"
            )
        rows = _file(Path(config.path))[: config.max_samples]
    else:
        rows = _function(config)
    if not rows:
        raise ConfigError(f"dataset {config.path}: there are no rows: give at least one")
    return rows


def _file(path: Path) -> list[Row]:
    try:
        content = path.read_bytes()
    except OSError as error:
        names = [p.name for p in path.parent.glob("*.json*")]
        close = difflib.get_close_matches(path.name, names, 1)
        hint = f"; did you mean {path.with_name(close[0])}?" if close else f" (looked in {Path.cwd()})"
        raise ConfigError(f"dataset {path}: {error.strerror}{hint}") from None
    if path.suffix == ".json":
        rows = _parse(content, str(path))
        if not isinstance(rows, list):
            raise ConfigError(f"dataset {path}: it holds a {_kind(rows)}: it must be a list of objects")
        return [_checked(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]
    lines = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            rows.append(_checked(_parse(line, where), where))
        except ConfigError as error:
            if number == len(lines):  # no newline: whoever wrote it was stopped
                raise ConfigError(
                    f"{error}. It is the last line, perhaps cut off: complete or remove it"
                ) from None
            raise
    return rows


def _parse(text: bytes, where: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"dataset {where}: not JSON: {error}") from None


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise ConfigError(
            f'dataset {where}: it is a {_kind(row)}: each row must be an object, {{"key": value}}'
        )
    return dict(row)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _reasoning_gym(config: DatasetConfig) -> list[Row]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"dataset {config.path} needs {error.name}, which is not installed: pip install 'areal-lite[examples]'"
        ) from None
    task = config.path.removeprefix(_GYM)
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, 3)
        hint = (
            f"did you mean {' or '.join(close)}?" if close else f"the tasks are {', '.join(sorted(DATASETS))}"
        )
        raise ConfigError(f"dataset {config.path}: reasoning-gym has no task {task!r}; {hint}")
    if "seed" not in config.kwargs:
        raise ConfigError(
            f"dataset {config.path}: kwargs has no seed, so that every start would make other rows: set "
            "kwargs: {seed: 1}, and for held-out rows a seed that is at least size away"
        )
    try:
        dataset = reasoning_gym.create_dataset(task, **config.kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"dataset {config.path}: kwargs {config.kwargs}: {error}") from None
    return [{**row, "task": task} for row in itertools.islice(dataset, config.max_samples)]


def check_held_out(train: DatasetConfig, held_out: DatasetConfig) -> None:
    """Refuse held-out rows of a reasoning-gym task that are training rows too.

    Row i of a task is made from ``seed + i``, so two seeds closer than the size share rows.

    Raises:
        ConfigError: If they overlap.
    """
    if not (train.path.startswith(_GYM) and train.path == held_out.path):
        return
    first, second = (_gym_seeds(config) for config in (train, held_out))
    if max(first.start, second.start) < min(first.stop, second.stop):
        raise ConfigError(
            f"eval_dataset {held_out.path} uses seeds {second.start} to {second.stop - 1}, some of which are among the "
            f"training rows' {first.start} to {first.stop - 1}: set its seed to {first.stop} or more"
        )


def _gym_seeds(config: DatasetConfig) -> range:
    seed = int(config.kwargs.get("seed", 0))
    size = int(config.kwargs.get("size", _GYM_SIZE))
    return range(seed, seed + min(size, config.max_samples or size))


def _function(config: DatasetConfig) -> list[Row]:
    if "." not in config.path or "/" in config.path:
        raise ConfigError(
            f"dataset {config.path}: write a file that ends in .jsonl or .json, reasoning-gym:TASK, or the dotted "
            "path of a function"
        )
    function = load_object(config.path, where="dataset path")
    if not callable(function):
        raise ConfigError(
            f"dataset {config.path}: it is a {_kind(function)}: it must be a function that returns rows"
        )
    try:
        inspect.signature(function).bind(**config.kwargs)
    except TypeError as error:
        raise ConfigError(f"dataset {config.path}: kwargs {config.kwargs} do not fit: {error}") from None
    rows = function(**config.kwargs)
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ConfigError(
            f"dataset {config.path}: it returned a {_kind(rows)}: it must return a list of dicts"
        )
    return [
        _checked(row, f"{config.path}, row {number}")
        for number, row in enumerate(itertools.islice(rows, config.max_samples), 1)
    ]
