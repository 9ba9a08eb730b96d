"""Answers to the page's requests, as values that JSON can hold. Knows no HTTP.

Ids and task numbers are text, because JavaScript rounds large integers.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from areal_lite.api.image_span import images_of
from areal_lite.errors import ConfigError
from areal_lite.tools.diagnose.episodes import read_run
from areal_lite.tools.diagnose.findings import diagnose
from areal_lite.tools.foreign_files import open_inside, read_inside, read_records
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.filters import KEYS
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
_COLUMNS: dict[str, tuple[str, str, str]] = {
    "loss_mask": ("mask", "Loss mask", "flag"),
    "logprobs": ("logprob", "Log-prob", "surprise"),
    "versions": ("version", "Version", "category"),
    "advantages": ("advantage", "Advantage", "signed"),
    "importance_weights": ("weight", "Importance weight", "heat"),
    "clipped": ("clipped", "Clipped", "signed"),
    "entropy": ("entropy", "Entropy", "heat"),
    "difference": ("difference", "Trainer minus engine", "signed"),
}
"""Per-token lists that the page knows, of a turn or made of them: key, label, and how to colour it. Others are coloured
as numbers."""
_SAMPLED = ("logprobs", "versions")
"""Columns that mean nothing on tokens that the engine did not sample."""
_TIMES = ("timing/step_s", "timing/rollout_wait_s", "timing/weight_update_s")


class Answers:
    """Answers over opened dumps. Thread-safe."""

    def __init__(self, dumps: Dumps, filter: str = "") -> None:
        self.dumps, self.filter = dumps, filter
        self._ends: dict[tuple[str, str, int], Json] = {}  # reading them takes ten times as long as the row
        dumps.count(filter, budget_s=0.0)  # so that a wrong filter ends the command

    def state(self) -> Json:
        """Return what does not depend on a filter."""
        keys = [
            {"name": key.name, "alias": key.alias, "kind": key.kind, "meaning": key.meaning, "values": key.values}
            for key in KEYS.values()
        ]
        runs = [
            {"name": name, "path": str(path), "writes": _is_written(path)} for name, path in self.dumps.runs.items()
        ]
        return {"runs": runs, "filter": self.filter, "keys": keys, "notes": self.dumps.notes()}

    def episodes(self, filter: str, sort: str, offset: int, limit: int, *, count: bool) -> Json:
        """Return rows ``offset`` to ``offset + limit`` with the ends of their prompts and their answers, the newest
        training first unless sorted; with ``count`` also how many match, null if that is slow."""
        if offset < 0 or not 0 < limit <= MAX_ROWS:
            raise ConfigError(
                f"offset is {offset} and limit {limit}: use an offset from 0 and a limit of 1..{MAX_ROWS}"
            )
        page = self.dumps.page(filter, sort=sort or "newest", offset=offset, limit=limit, count_s=float(count))
        return {"rows": [self.listed_row(row) for row in page.rows], "total": page.total}

    def listed_row(self, row: Row) -> Json:
        """Return a row with the ends of the texts of its prompt and of its last answer."""
        key = row["run"], row["id"], row["length"]
        if (ends := self._ends.get(key)) is None:
            texts = {
                turn.get("role"): (turn.get("text") or "")[-MAX_LISTED:]
                for record in self.dumps.records([row])
                for turn in record["turns"]
            }
            if len(self._ends) >= MAX_ENDS:
                self._ends.clear()
            ends = self._ends[key] = {"prompt": texts.get("prompt"), "answer": texts.get("assistant")}
        return {**_listed(row), **ends}

    def summary(self, filter: str) -> Json:
        """Return counts, failures by cause and unreadable lines of the matching rows."""
        return {"runs": self.dumps.summary(filter), "problems": self.dumps.problems(limit=100)}

    def episode(self, run: str, id: str) -> Json:
        """Return an episode: its facts, its turns once each, and its sequences as paths through them."""
        root = self._root(run)
        records = [with_facts(root, record) for record in self.dumps.episode(run, id)]
        turns: dict[str, Json] = {}
        sequences = []
        for record in records:
            path, parent = [], None
            for index, turn in enumerate(record["turns"]):
                known = turn.get("turn_idx") is not None
                key = str(turn["turn_idx"]) if known else f"{record['id']}/{index}"
                columns = _columns(turn)
                parent = (None if turn.get("parent_idx") is None else str(turn["parent_idx"])) if known else parent
                shared = turns.setdefault(
                    key, {**_turn(turn, key, parent, index), "images": _images(root, turn), "columns": columns}
                )["columns"]
                own = {name: values for name, values in columns.items() if values != shared.get(name)}
                path.append({"turn": key, "columns": own})
                parent = key
            facts = {name: record.get(name) for name in ("id", "reward", "status", "seqlen", "sample_idx")}
            sequences.append({**facts, "path": path})
        chosen = next((record for record in records if record["id"] == id), records[0])
        facts = {name: value for name, value in chosen.items() if name not in ("turns", "prompt", "completion")}
        processes = [each for record in records for each in record.get("processes") or ()]
        return {
            "facts": {**facts, "processes": processes, **_texts(facts, "task_id", "group_id")},
            **{"turns": turns, "sequences": sequences, "quantities": _quantities(turns.values())},
            "file": str(root / chosen["id"].rpartition(":")[0] if root.is_dir() else root),
        }

    def texts(self, run: str, id: str) -> Json:
        """Return the text of every token id in an episode; null without the run's tokenizer."""
        decode = decoder(self._root(run))
        if decode is None:
            return {"texts": None, "reason": "No text of tokens: the run's tokenizer is not on this machine."}
        turns = [turn for record in self.dumps.episode(run, id) for turn in record["turns"]]
        ids = {each for turn in turns for each in turn.get("ids") or ()}
        return {"texts": {each: decode(each) for each in ids}, "reason": None}

    def group(self, run: str, group: str) -> Json:
        """Return the rows of a group, the first ones with the text that the model wrote."""
        root, rows = self._root(run), self.dumps.group(run, group)
        if not rows:
            raise ConfigError(f"run {run} has no group {group!r}")
        members = []
        for row, record in itertools.zip_longest(rows, self.dumps.records(rows[:MAX_GROUP])):
            shown: Json = {"answer": None, "error": None, "advantages": None}
            if record is not None:
                advantages = _range(with_facts(root, record)["turns"], "advantages")
                shown = {"answer": _answer(record), "error": record.get("error"), "advantages": advantages}
            members.append({**_listed(row), **shown})
        return {"run": run, "group": group, "members": members}

    def metrics(self, extra: Sequence[str] = ()) -> Json:
        """Return the curves of all runs, those named in ``extra`` too, and the names of all metrics."""
        names: set[str] = set()
        curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
        panels = [{"title": p.title, "unit": p.unit, "curves": dict(p.curves)} for p in PANELS]
        panels += [{"title": name, "unit": "", "curves": {name: ""}} for name in extra]
        wanted = {name for panel in panels for name in panel["curves"]}
        for run in self.dumps.runs:
            records = self._records(run)
            for record in records:
                names |= record.keys()
            timed = sorted({name for record in records for name in record if name.startswith(PHASES)})
            step = -(-len(records) // MAX_POINTS) or 1
            curves[run] = {
                name: found[::step] for name in dict.fromkeys([*wanted, *timed]) if (found := curve(records, name))
            }
        timing = {
            name: "training" if name == "train/seconds_step" else phase(name)
            for name in sorted({name for each in curves.values() for name in each if name.startswith(PHASES)})
        }
        panels.insert(len(PANELS), {"title": "Seconds of a step", "unit": "seconds", "curves": timing})
        drawn = [panel for panel in panels if any(name in each for each in curves.values() for name in panel["curves"])]
        known = sorted(name for name in names if "/" in name)
        return {"runs": curves, "panels": drawn, "names": known}

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
                **{name: record.get(name) for name in ("run", "id", "status", "reward", "version", "scope")},
                **_texts({"task": record.get("task_id"), "group": record.get("group_id")}, "task", "group"),
                **{"member": record.get("member_idx"), "calls": calls},
                **{"queued": end - run_s - (timings.get("queued_s") or 0.0), "start": end - run_s, "end": end},
            }
        steps = [
            {"run": run, "step": r["step"], "time": r["time"], **{n.partition("/")[2]: r.get(n) for n in _TIMES}}
            for run in self.dumps.runs
            for r in self._records(run)
            if is_number(r.get("time")) and "timing/step_s" in r
        ]
        return {"episodes": list(episodes.values()), "steps": steps, "more": len(rows) > MAX_TIMELINE}

    def compare(self, first: str, second: str, filter: str) -> Json:
        """Return the dataset rows that both runs had, found by their prompts, with the mean rewards of both."""
        sides = [self._rewards(run, filter) for run in (first, second)]
        (a, cut_a), (b, cut_b) = sides
        pairs = []
        for key in a.keys() & b.keys():
            one, two = a[key], b[key]
            means = [fmean(each["rewards"]) if each["rewards"] else None for each in (one, two)]
            change = None if means[0] is None or means[1] is None else means[1] - means[0]
            each = [
                {"reward": mean, "rewards": len(side["rewards"]), "lines": side["lines"], "tasks": side["tasks"]}
                for mean, side in zip(means, (one, two), strict=True)
            ]
            pairs.append({"scope": key[0], "prompt": one["prompt"], "change": change, "sides": each})
        pairs.sort(key=lambda pair: (pair["change"] is None, -abs(pair["change"] or 0.0), pair["prompt"] or ""))
        return {
            **{"runs": [first, second], "pairs": pairs[:2000], "both": len(pairs), "cut": cut_a or cut_b},
            "only": [len(a.keys() - b.keys()), len(b.keys() - a.keys())],
        }

    def _rewards(self, run: str, filter: str) -> tuple[dict[tuple[Any, Any], Json], bool]:
        """Return rewards by scope and prompt, and whether there are more rows than were read."""
        self._root(run)
        quoted = run.replace("\\", r"\\").replace('"', r"\"")
        chosen = f'run="{quoted}"' + (f" ({filter})" if filter.strip() else "")
        rows = list(self.dumps.rows(chosen, limit=MAX_COMPARED + 1))
        prompts: dict[tuple[str, Any], tuple[Any, Any]] = {}
        found: dict[tuple[Any, Any], Json] = {}
        for row in rows[:MAX_COMPARED]:
            key = (row["file"], row["group"])
            if key not in prompts:
                record = next(iter(self.dumps.records([row])), None)
                turns = record["turns"][:1] if record else []
                prompt = (tuple(turns[0].get("ids") or ()), turns[0].get("text")) if turns else ((), None)
                prompts[key] = prompt
            ids, text = prompts[key]
            if not ids and not text:
                continue
            each = found.setdefault(
                (row["scope"], ids or text), {"prompt": text and text[:600], "rewards": [], "lines": 0, "tasks": []}
            )
            each["lines"] += 1
            if row["reward"] is not None:
                each["rewards"].append(row["reward"])
            if (task := str(row["task"])) not in each["tasks"] and len(each["tasks"]) < 20:
                each["tasks"].append(task)
        return found, len(rows) > MAX_COMPARED

    def _records(self, run: str) -> list[Json]:
        return _steps(*_metrics_state(self.dumps.runs[run]))

    def metrics_state(self) -> list[Any]:
        """Return what changes when a run begins or ends, or a metrics.jsonl does."""
        return [(name, _is_written(root), _metrics_state(root)) for name, root in self.dumps.runs.items()]

    def _root(self, run: str) -> Path:
        if (root := self.dumps.runs.get(run)) is None:
            raise ConfigError(f"no run {run!r} is open; there are: {', '.join(self.dumps.runs)}")
        return root


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


def _listed(row: Row) -> Json:
    return {**row, **_texts(row, "task", "group")}


def _texts(values: Mapping[str, Any], *names: str) -> Json:
    return {name: None if values.get(name) is None else str(values[name]) for name in names}


def _turn(turn: Mapping[str, Any], key: str, parent: str | None, place: int) -> Json:
    names = ("role", "text", "stop_reason", "started", "latency_s", "agent", "start", "ids")
    return {"key": key, "parent": parent, "place": place, **{name: turn.get(name) for name in names}}


def _images(root: Path, turn: Mapping[str, Any]) -> list[Json]:
    """Return the images of a turn; without a picture where the run has no file of it."""
    shown: list[Json] = []
    with contextlib.suppress(ValueError):  # of a file that somebody made by hand
        for span in images_of(turn.get("images") or []):
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
        kept = columns.get("log_kept") or itertools.repeat(0.0, length)
        known = zip(proximal, kept, sampled, strict=True)
        columns["difference"] = [None if None in each else each[0] + each[1] - each[2] for each in known]
    return columns


def _range(turns: Sequence[Mapping[str, Any]], name: str) -> list[float] | None:
    """Return the least and the largest value of a list of the turns; None without one."""
    values = [value for turn in turns for value in turn.get(name) or () if value is not None]
    return [min(values), max(values)] if values else None


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
