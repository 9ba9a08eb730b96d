"""Prompts, answers and scores of one training step as JSON lines.

Guarantees that files are written atomically and never replaced: a step that is trained again after a resume gets a new
file. The engine dumps full trajectories; these files hold the scores that the trainer saw.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
import orjson
from areal_lite.data.batch.data_proto import form_of
from areal_lite.files.whole_files import storing, write_whole

_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def dump_rollouts(
    directory: Path | str, step: int, columns: Mapping[str, Sequence[Any]], extra: Mapping[str, Sequence[Any]]
) -> Path:
    """Write ``{step}.jsonl``, one line per answer, and return its path; if it exists, ``{step}.1.jsonl`` and so on."""
    columns = {**columns, "step": [step] * len(next(iter(columns.values())))}
    if taken := columns.keys() & extra.keys():
        raise ValueError(f"extra has {sorted(taken)}, which every line already has: remove or rename them")
    columns |= extra
    content = b"".join(
        orjson.dumps({name: _json(name, value) for name, value in zip(columns, values, strict=True)}) + b"\n"
        for values in zip(*columns.values(), strict=True)
    )
    folder = Path(directory)
    names = (f"{step}{f'.{number}' if number else ''}.jsonl" for number in count())
    path = next(folder / name for name in names if not (folder / name).exists())
    with storing(f"{path} with the rollouts of step {step}", "free disk space or fix its permissions"):
        write_whole(path, content)
    return path


def _json(name: str, value: Any) -> orjson.Fragment:
    try:
        return orjson.Fragment(orjson.dumps(value, default=_plain, option=_JSON))
    except TypeError as error:
        raise ValueError(
            f"{name} is {form_of(value)} that cannot be written as JSON ({error.__cause__ or error}): give numbers, "
            "text, lists, dicts or arrays"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{form_of(value)} has no JSON form")
