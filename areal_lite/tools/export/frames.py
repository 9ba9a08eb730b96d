"""``areal_lite.load_run``: what runs left, as frames of pandas or polars.

Guarantees that a folder is only read, by the readers of ``areal-lite inspect``: nothing that it names is imported, and
no link out of it is followed.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload
from areal_lite.errors import ConfigError
from areal_lite.tools.export.export import EPISODE, arrow_tables, episode_row
from areal_lite.tools.foreign_files import read_records
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_text import print_note
from areal_lite.tools.inspect.plot import is_number
from areal_lite.tools.inspect.token_table import FACTS, tokens
from areal_lite.tools.inspect.training_facts import with_facts

if TYPE_CHECKING:
    import pandas
    import polars

Frame = TypeVar("Frame")
Rows = Iterator[Mapping[str, Any]]
_TEXTS, _INTEGERS, _NUMBERS = "string", "int64", "float64"
_TOKEN = ("turn", "index", "role", "mask", "logprob", "version")


class RunFrames(Generic[Frame]):
    """Frames, made when first asked for. ``run`` and ``episode`` of a turn are ``run`` and ``id`` of its episode."""

    def __init__(self, path: str | Path, filter: str, frame_of: Callable[[Any], Frame]) -> None:
        self._path, self._filter, self._frame_of = path, filter, frame_of

    @cached_property
    def episodes(self) -> Frame:
        """A row per dumped line: its fields but those of turns, as ``areal-lite export --parquet`` writes them."""
        return self._frame(lambda dumps: map(episode_row, dumps.records(dumps.rows(self._filter))), EPISODE)

    @cached_property
    def turns(self) -> Frame:
        """A row per turn of these episodes, as in the dump, with the numbers of its tokens and trained tokens."""

        def rows(dumps: Dumps) -> Rows:
            for record in dumps.records(dumps.rows(self._filter)):
                for index, turn in enumerate(record["turns"]):
                    counts = {"tokens": len(turn.get("ids") or ()), "trained": sum(turn.get("loss_mask") or ())}
                    yield turn | counts | {"run": record["run"], "episode": record["id"], "turn": index}

        columns = dict.fromkeys(("run", "episode", "role", "text", "stop_reason", "agent", "server"), _TEXTS)
        columns |= dict.fromkeys(("turn", "turn_idx", "parent_idx", "tokens", "trained"), _INTEGERS)
        return self._frame(rows, columns | dict.fromkeys(("started", "latency_s"), _NUMBERS))

    @cached_property
    def tokens(self) -> Frame:
        """A row per token of these episodes, ``index`` its place in the sequence, with its training facts."""

        def rows(dumps: Dumps) -> Rows:
            for record in dumps.records(dumps.rows(self._filter)):
                for token in tokens(with_facts(dumps.runs[record["run"]], record)):
                    known = {name: getattr(token, name) for name in _TOKEN}
                    yield token.facts | known | {"run": record["run"], "episode": record["id"], "token": token.id}

        columns = dict.fromkeys(("run", "episode", "turn", "index", "role", "token", "mask", "version"), _INTEGERS)
        columns |= dict.fromkeys(("run", "episode", "role"), _TEXTS)
        return self._frame(rows, columns | dict.fromkeys(("logprob", *FACTS), _NUMBERS))

    @cached_property
    def metrics(self) -> Frame:
        """A row per record of metrics.jsonl: ``run``, ``step`` and every metric that any of them has."""

        def rows(dumps: Dumps) -> Rows:
            for run, root in dumps.runs.items():
                for record in read_records(file) if (file := root / "metrics.jsonl").exists() else ():
                    yield {name: value for name, value in record.items() if is_number(value)} | {"run": run}

        with Dumps.open(self._path, may_be_empty=True) as dumps:
            columns = dict.fromkeys(("run", "step", *(name for row in rows(dumps) for name in row)), _NUMBERS)
        return self._frame(rows, columns | {"run": _TEXTS, "step": _INTEGERS})

    def _frame(self, rows: Callable[[Dumps], Rows], columns: Mapping[str, Any]) -> Frame:
        import pyarrow  # type: ignore[import-untyped]

        schema = pyarrow.schema(list(columns.items()))
        with Dumps.open(self._path, may_be_empty=True) as dumps:
            tables = [schema.empty_table(), *arrow_tables(rows(dumps), schema)]
        return self._frame_of(pyarrow.concat_tables(tables))


@overload
def load_run(path: str | Path, filter: str = "", *, frames: Literal["polars"]) -> "RunFrames[polars.DataFrame]": ...
@overload
def load_run(
    path: str | Path, filter: str = "", *, frames: Literal["pandas"] = "pandas"
) -> "RunFrames[pandas.DataFrame]": ...
def load_run(path: str | Path, filter: str = "", *, frames: str = "pandas") -> RunFrames[Any]:
    """Return the episodes, turns, tokens and metrics of the runs in ``path``, as in ``load_run(RUN).episodes``.

    Args:
        path: A run's folder, a folder of runs, a folder of dumps, or a dump.
        filter: Selects episodes, such as ``reward<0.5 status=accepted`` (docs/trajectories.md).
        frames: ``pandas`` or ``polars``.

    Raises:
        ConfigError: If there is no such path, the filter is wrong, or the library is not installed.
    """
    if frames not in ("pandas", "polars"):
        raise ConfigError(f"frames is {frames!r}: it must be pandas or polars")
    try:
        library: Any = importlib.import_module(frames)
    except ModuleNotFoundError as error:
        raise ConfigError(f"frames={frames!r} needs {error.name}: pip install {error.name}") from None
    with Dumps.open(path, may_be_empty=True) as dumps:
        dumps.count(filter)  # refuses a wrong one
        for note in dumps.notes():
            print_note(note)
    return RunFrames(path, filter, library.from_arrow if frames == "polars" else lambda table: table.to_pandas())
