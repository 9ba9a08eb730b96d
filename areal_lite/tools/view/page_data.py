"""Answers to the page's requests, as values that JSON can hold. Knows no HTTP. Ids and task numbers are text, because
JavaScript rounds large integers."""

import base64
import contextlib
import fcntl
import itertools
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any
import orjson
from areal_lite.errors import ConfigError
from areal_lite.tools.diagnose.episodes import read_run
from areal_lite.tools.diagnose.findings import diagnose
from areal_lite.tools.foreign_files import open_inside, read_inside, read_records
from areal_lite.tools.inspect.dumped_images import dumped_images
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.filters import KEYS, parse
from areal_lite.tools.inspect.plot import PANELS, PHASES, curve, is_number, phase
from areal_lite.tools.inspect.run_dumps import Row
from areal_lite.tools.inspect.token_table import decoder
from areal_lite.tools.inspect.training_facts import with_facts

Json = dict[str, Any]
MAX_ROWS = 500
MAX_GROUP = 64
"""Members of a group that come with their text."""
MAX_TEXT = 20_000
MAX_LISTED = 600
"""Characters of a prompt and of an answer in a row of the list."""
MAX_ENDS = 20_000
"""Rows whose texts are kept: at most 24 MB."""
MAX_TIMELINE = 500
MAX_COMPARED = 20_000
"""Rows of each run that a comparison reads."""
MAX_POINTS = 2000
"""Points of a curve; longer runs are thinned out."""
_COLUMNS: dict[str, list[str]] = tomllib.loads((resources.files("areal_lite.tools.view") / "columns.toml").read_text())
_SAMPLED = ("logprobs", "versions")
"""Columns that mean nothing on tokens that the engine did not sample."""
_TURN = ("role", "text", "stop_reason", "started", "latency_s", "agent", "start", "ids")
_TIMES = ("timing/step_s", "timing/rollout_wait_s", "timing/weight_update_s")


class Answers:
    """Answers over opened dumps. Thread-safe."""

    def __init__(self, dumps: Dumps, filter: str = "") -> None:
        self.dumps, self.filter = dumps, filter
        self._ends: dict[tuple[str, str, int], Json] = {}  # reading them takes ten times as long as the row
        dumps.count(filter, budget_s=0.0)  # so that a wrong filter ends the command

    def state(self) -> Json:
        """Return what does not depend on a filter."""
        roots, keys = self.dumps.runs, [key._asdict() for key in KEYS.values()]
        runs = [{"name": name, "path": str(root), "writes": _is_written(root)} for name, root in roots.items()]
        return {"runs": runs, "filter": self.filter, "keys": keys, "notes": self.dumps.notes()}

    def episodes(self, filter: str, sort: str, offset: int, limit: int, *, count: bool) -> Json:
        """Return rows ``offset`` to ``offset + limit`` with the ends of their prompts and their answers, the newest
        training first unless sorted; with ``count`` also how many match, null if that is slow."""
        if offset < 0 or not 0 < limit <= MAX_ROWS:
            rule = f"use an offset from 0 and a limit of 1..{MAX_ROWS}"
            raise ConfigError(f"offset is {offset} and limit {limit}: {rule}")
        page = self.dumps.page(filter, sort=sort or "newest", offset=offset, limit=limit, count_s=float(count))
        return {"rows": [self.listed_row(row) for row in page.rows], "total": page.total}

    def listed_row(self, row: Row) -> Json:
        """Return a row with the ends of the texts of its prompt and of its last answer."""
        key = row["run"], row["id"], row["length"]
        if (ends := self._ends.get(key)) is None:
            turns = [turn for record in self.dumps.records([row]) for turn in record["turns"]]
            texts = {turn.get("role"): (turn.get("text") or "")[-MAX_LISTED:] for turn in turns}
            if len(self._ends) >= MAX_ENDS:
                self._ends.clear()
            ends = self._ends[key] = {"prompt": texts.get("prompt"), "answer": texts.get("assistant")}
        return {**_listed(row), **ends}

    def summary(self, filter: str) -> Json:
        """Return counts, failures by cause and unreadable lines of the matching rows."""
        return {"runs": self.dumps.summary(filter), "problems": self.dumps.problems(limit=100)}

    def episode(self, run: str, id: str) -> Json:
        """Return an episode: its facts, its turns once each, and its sequences as paths through them."""
        root = self.dumps.run(run).index.root
        records = [with_facts(root, record) for record in self.dumps.episode(run, id)]
        turns: dict[str, Json] = {}
        sequences = []
        for record in records:
            path, parent = [], None
            for index, turn in enumerate(record["turns"]):
                known = turn.get("turn_idx") is not None
                key = str(turn["turn_idx"]) if known else f"{record['id']}/{index}"
                parent = _texts(turn, "parent_idx")["parent_idx"] if known else parent
                columns, facts = _columns(turn), {name: turn.get(name) for name in _TURN}
                facts |= {"key": key, "parent": parent, "place": index, "images": _images(root, turn)}
                shared = turns.setdefault(key, facts | {"columns": columns})["columns"]
                own = {name: values for name, values in columns.items() if values != shared.get(name)}
                path.append({"turn": key, "columns": own})
                parent = key
            facts = {name: record.get(name) for name in ("id", "reward", "status", "seqlen", "sample_idx")}
            sequences.append({**facts, "path": path})
        chosen = next(record for record in records if record["id"] == id)
        facts = {name: value for name, value in chosen.items() if name not in ("turns", "prompt", "completion")}
        processes = [each for record in records for each in record.get("processes") or ()]
        return {
            "facts": {**facts, "processes": processes, **_texts(facts, "task_id", "group_id")},
            **{"turns": turns, "sequences": sequences, "quantities": _quantities(turns.values())},
            "file": str(root / chosen["id"].rpartition(":")[0] if root.is_dir() else root),
        }

    def texts(self, run: str, id: str) -> Json:
        """Return the text of every token id in an episode; null without the run's tokenizer."""
        if (decode := decoder(self.dumps.run(run).index.root)) is None:
            return {"texts": None, "reason": "No text of tokens: the run's tokenizer is not on this machine."}
        turns = [turn for record in self.dumps.episode(run, id) for turn in record["turns"]]
        ids = {each for turn in turns for each in turn.get("ids") or ()}
        return {"texts": {each: decode(each) for each in ids}, "reason": None}

    def group(self, run: str, group: str) -> Json:
        """Return the rows of a group, the first ones with the text that the model wrote."""
        root, rows = self.dumps.run(run).index.root, self.dumps.group(run, group)
        if not rows:
            raise ConfigError(f"run {run} has no group {group!r}")
        members = []
        for row, record in itertools.zip_longest(rows, self.dumps.records(rows[:MAX_GROUP])):
            shown: Json = {"answer": None, "error": None, "advantages": None}
            if record is not None:
                turns = with_facts(root, record)["turns"]
                values = [value for turn in turns for value in turn.get("advantages") or () if value is not None]
                shown = {"answer": _answer(record), "error": record.get("error")}
                shown["advantages"] = [min(values), max(values)] if values else None
            members.append({**_listed(row), **shown})
        return {"run": run, "group": group, "members": members}

    def metrics(self, extra: Sequence[str] = ()) -> Json:
        """Return the curves of all runs, those named in ``extra`` too, and the names of all metrics."""
        names: set[str] = set()
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        panels = [*PANELS, *({"title": name, "unit": "", "curves": {name: ""}} for name in extra)]
        wanted = {name for panel in panels for name in panel["curves"]}
        for run, root in self.dumps.runs.items():
            records = _steps(*_metrics_state(root))
            own = set[str]().union(*records)
            names |= own
            timed = sorted(name for name in own if name.startswith(PHASES))
            step = -(-len(records) // MAX_POINTS) or 1
            found = {name: curve(records, name) for name in dict.fromkeys([*wanted, *timed])}
            curves[run] = {name: points[::step] for name, points in found.items() if points}
        phases = sorted({name for each in curves.values() for name in each if name.startswith(PHASES)})
        timing = {name: "training" if name == "train/seconds_step" else phase(name) for name in phases}
        panels.insert(len(PANELS), {"title": "Seconds of a step", "unit": "seconds", "curves": timing})
        drawn = [panel for panel in panels if any(name in each for each in curves.values() for name in panel["curves"])]
        return {"runs": curves, "panels": drawn, "names": sorted(name for name in names if "/" in name)}

    def diagnosis(self, filter: str) -> Json:
        """Return the findings of each run, and version, trained tokens and reward of its episodes."""
        read = {run: read_run(self.dumps, run, filter) for run in self.dumps.runs}
        facts = {run: [[each.get(n) for n in ("version", "tokens", "reward")] for each in read[run][0]] for run in read}
        return {"runs": [{"run": run, "findings": diagnose(*read[run]), "episodes": facts[run]} for run in read]}

    def timeline(self, filter: str) -> Json:
        """Return when the episodes of the first matching rows waited, called the model and ended, and the steps. A call
        is its start, its seconds, its server, and the text that the environment gave before it."""
        rows = list(self.dumps.rows(filter, limit=MAX_TIMELINE + 1))
        episodes: dict[tuple[str, str, Any], Json] = {}
        for record in self.dumps.records(rows[:MAX_TIMELINE]):
            timings = record.get("timings") or {}
            end, run_s = timings.get("finished_at"), timings.get("run_s")
            if end is None or run_s is None:
                continue
            key = (record["run"], record["id"].rpartition(":")[0], record.get("member_idx"))
            calls = []
            for before, turn in itertools.pairwise([{}, *record["turns"]]):
                if turn.get("started") is not None and turn.get("latency_s") is not None:
                    seen = (before.get("text") or "")[:MAX_LISTED] if before.get("role") == "environment" else None
                    calls.append([turn["started"], turn["latency_s"], turn.get("server"), seen])
            if key in episodes:
                episodes[key]["calls"] += [call for call in calls if call not in episodes[key]["calls"]]
                continue
            episodes[key] = {
                **{name: record.get(name) for name in ("run", "id", "status", "version", "scope")},
                "reward": record.get("episode_reward", record.get("reward")),
                **_texts({"task": record.get("task_id"), "group": record.get("group_id")}, "task", "group"),
                **{"member": record.get("member_idx"), "calls": calls},
                **{"queued": end - run_s - (timings.get("queued_s") or 0.0), "start": end - run_s, "end": end},
            }
        steps = [
            {"run": run, "step": r["step"], "time": r["time"], **{n.partition("/")[2]: r.get(n) for n in _TIMES}}
            for run, root in self.dumps.runs.items()
            for r in _steps(*_metrics_state(root))
            if is_number(r.get("time")) and "timing/step_s" in r
        ]
        return {"episodes": list(episodes.values()), "steps": steps, "more": len(rows) > MAX_TIMELINE}

    def compare(self, first: str, second: str, filter: str) -> Json:
        """Return the dataset rows that both runs had, found by their prompts, with the mean rewards of both."""
        (a, prompts, cut_a), (b, _, cut_b) = (self._rewards(run, filter) for run in (first, second))
        pairs = []
        for key in a.keys() & b.keys():
            before, after = a[key]["reward"], b[key]["reward"]
            change = None if before is None or after is None else after - before
            pairs.append({"scope": key[0], "prompt": prompts[key], "change": change, "sides": [a[key], b[key]]})
        pairs.sort(key=lambda pair: (pair["change"] is None, -abs(pair["change"] or 0.0), pair["prompt"] or ""))
        return {
            **{"runs": [first, second], "pairs": pairs[:2000], "both": len(pairs), "cut": cut_a or cut_b},
            "only": [len(a.keys() - b.keys()), len(b.keys() - a.keys())],
        }

    def _rewards(self, run: str, filter: str) -> tuple[dict[Any, Json], dict[Any, str | None], bool]:
        """Return rewards and the prompt's text by scope and prompt, and whether there are more rows than were read."""
        rows = list(self.dumps.run(run).select(parse(filter), limit=MAX_COMPARED + 1))
        prompt_of: dict[tuple[str, Any], tuple[Any, str | None]] = {}
        prompts: dict[Any, str | None] = {}
        members: dict[Any, list[Row]] = {}
        for row in rows[:MAX_COMPARED]:
            group = (row["file"], row["group"])
            if group not in prompt_of:
                first: Json = next((turn for record in self.dumps.records([row]) for turn in record["turns"]), {})
                prompt_of[group] = tuple(first.get("ids") or ()), first.get("text")
            ids, text = prompt_of[group]
            if key := ids or text:
                prompts[row["scope"], key] = text and text[:MAX_LISTED]
                members.setdefault((row["scope"], key), []).append(row)
        sides = {}
        for key, each in members.items():
            found = list(zip(*((row["reward"], row["weight"]) for row in each if row["weight"]), strict=True))
            tasks = list(dict.fromkeys(str(row["task"]) for row in each))
            sides[key] = {"reward": fmean(*found) if found else None, "lines": len(each), "tasks": tasks[:20]}
        return sides, prompts, len(rows) > MAX_COMPARED

    def metrics_state(self) -> list[Any]:
        """Return what changes when a run begins or ends, or a metrics.jsonl does."""
        return [(name, _is_written(root), _metrics_state(root)) for name, root in self.dumps.runs.items()]


def _metrics_state(root: Path) -> tuple[Path, tuple[int, int] | None]:
    path = root / "metrics.jsonl"
    with contextlib.suppress(OSError):
        return path, ((status := path.stat()).st_size, status.st_mtime_ns)
    return path, None


@lru_cache(maxsize=64)
def _steps(path: Path, state: tuple[int, int] | None) -> list[Json]:
    """Return the records of a metrics.jsonl; ``state`` tells versions of the file apart."""
    lines: list[Json] = []
    with contextlib.suppress(ConfigError):  # a damaged line ends the curves
        lines.extend(line for line in read_records(path) if is_number(line.get("step")))
    return lines


def _is_written(root: Path) -> bool:
    """Return True while a run holds the lock of its folder."""
    with contextlib.suppress(OSError), open_inside(root / ".lock", root) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def to_json(value: Any) -> bytes:
    """Return ``value`` as JSON; a path that is not UTF-8 is escaped."""
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return json.dumps(value).encode()


def _listed(row: Row) -> Json:
    return {**row, **_texts(row, "task", "group")}


def _texts(values: Mapping[str, Any], *names: str) -> Json:
    return {name: None if values.get(name) is None else str(values[name]) for name in names}


def _images(root: Path, turn: Mapping[str, Any]) -> list[Json]:
    """Return the images of a turn; without a picture where the run has no file of it."""
    shown: list[Json] = []
    for span in dumped_images(turn):
        picture = None
        with contextlib.suppress(OSError):
            png = read_inside(root / "images" / f"{span.sha256}.png", root)
            picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        shown.append({**span._asdict(), "picture": picture})
    return shown


def _columns(turn: Mapping[str, Any]) -> Json:
    """Return the lists of a turn with a number for each of its tokens, by the page's names."""
    length = len(turn.get("ids") or ())
    columns: Json = {}
    for name, values in turn.items():
        if name == "ids" or not isinstance(values, list) or not length or len(values) != length:
            continue
        if name in _SAMPLED and turn.get("role") != "assistant":
            continue
        if all(value is None or is_number(value) for value in values):
            if name == "versions":  # -1: not recorded
                values = [None if value is None or value < 0 else value for value in values]
            columns[_COLUMNS.get(name, (name,))[0]] = values
    proximal, sampled = columns.get("proximal_logprobs"), columns.get("logprob")
    if proximal and sampled:
        # The engine's log-probs are of the whole vocabulary.
        known = zip(proximal, columns.get("log_kept") or itertools.repeat(0.0, length), sampled, strict=True)
        columns["difference"] = [None if None in each else each[0] + each[1] - each[2] for each in known]
    return columns


def _quantities(turns: Iterable[Json]) -> list[Json]:
    """Return what tokens can be coloured by: the columns that the episode has."""
    listed = [column for turn in turns for column in turn["columns"].items()]
    present = {name for name, values in listed if any(value is not None for value in values)}
    others = sorted(present - {key for key, _, _ in _COLUMNS.values()})
    kinds = {key: "surprise" if key.endswith("logprobs") else "heat" for key in others}
    columns = [*_COLUMNS.values(), *((key, key.replace("_", " "), kind) for key, kind in kinds.items())]
    return [{"key": key, "label": label, "kind": kind} for key, label, kind in columns if key in present]


def _answer(record: Mapping[str, Any]) -> list[Json]:
    """Return role and text of the turns after the prompt, up to :data:`MAX_TEXT` characters."""
    turns: list[Json] = []
    left = MAX_TEXT
    for turn in record["turns"]:
        if turn.get("role") != "prompt" and left > 0:
            text = turn.get("text")
            turns.append({"role": turn.get("role"), "text": text and text[:left]})
            left -= len(text or "")
    return turns
