"""A run's folder, as the checks of ``areal-lite verify`` read it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
import orjson
from areal_lite.config.loader import load_recorded
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.errors import ConfigError
from areal_lite.tools.foreign_files import open_inside, read_lines
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_row import SCOPES
from areal_lite.tools.inspect.last_answer import CONFIG, UNREADABLE

Record = Mapping[str, Any]
SLACK_S = 0.5
"""Seconds by which clocks may differ: a record's time is taken after what it describes."""
METRICS = "metrics.jsonl"
TRAINING, EVALUATION = SCOPES


class DumpedGroup:
    """The lines of one group, and what the checks of the whole run keep of them."""

    def __init__(self, records: Sequence[Record]) -> None:
        first = records[0]
        kept = [record for record in records if record.get("status") == "accepted"]
        by_member: dict[Any, list[float]] = {}
        for record in kept:
            if (reward := record.get("episode_reward", record.get("reward"))) is not None:
                by_member.setdefault(record.get("member_idx"), []).append(reward)
        turns = [turn for record in kept for turn in record["turns"]]
        started = (turn for turn in turns if turn.get("started") is not None)
        self.records = records
        """Emptied once the group is checked."""
        self.scope, self.version, self.task = first["scope"], first["version"], first.get("task_id") or 0
        self.id: str = first["id"]
        """The first line's id, which names the group in findings."""
        self.file = self.id.rpartition(":")[0]
        self.finished = float((first.get("timings") or {}).get("finished_at") or 0.0)
        self.start = int(first.get("start_version") or 0)
        self.head = min((head for record in kept if (head := record.get("head_version")) is not None), default=None)
        self.tail = max((tail for record in kept if (tail := record.get("tail_version")) is not None), default=None)
        self.lines = [record.get("sample_idx") for record in kept]
        """The ``sample_idx`` of accepted lines: sequences that train, or would."""
        self.trained = sum(sum(turn.get("loss_mask") or ()) for turn in turns)
        self.rewards = [math.fsum(rewards) / len(rewards) for rewards in by_member.values()]
        """Reward per accepted episode."""
        self.calls = sorted({f"{turn['started']} {hash(tuple(turn.get('ids') or ()))}" for turn in started})
        """Keys that identify the model calls of accepted lines."""


class Run:
    """A run's folder, and what the checks found in it; made without its dumps."""

    def __init__(self, root: Path) -> None:
        if not any((root / name).exists() for name in (CONFIG, METRICS, TRAINING, EVALUATION)):
            raise ConfigError(f"{root} is not the folder of a run: name the one with config.yaml and metrics.jsonl")
        self.root = root
        self.config: ExperimentConfig | None = None
        self.metrics: list[Record] = []
        self.broken_metrics: list[str] = []
        self.groups: list[DumpedGroup] = []
        self.unproved: list[str] = []
        """Claims that the folder cannot prove, one line each."""
        self.unread: list[str] = []
        """Files that could not be read, with the reason."""
        self.findings: list[tuple[str, str]] = []
        """Name of the check, and what it found."""
        self.lines = 0
        """Dumped lines that were checked."""
        self.tokenizer: Any = None
        """The run's tokenizer; None if it is not on this machine."""
        try:
            self.config = load_recorded(root, open_inside, root=ExperimentConfig)
        except UNREADABLE as error:
            if (root / CONFIG).exists():
                reason = str(error).partition("\n")[0].removeprefix(f"{root}/{CONFIG}: ")
                self.unread.append(f"{CONFIG}: {reason[:200]}")
            self.unproved.append("config.yaml cannot be read, so group sizes, staleness and advantages are not checked")
        path = root / METRICS
        try:
            for number, line in enumerate(read_lines(path, root) if path.exists() else (), 1):
                try:
                    record = orjson.loads(line)
                    assert type(record["step"]) is int and isinstance(record["time"], int | float)
                    self.metrics.append(record)
                except (ValueError, KeyError, TypeError, AssertionError):
                    self.broken_metrics.append(f"metrics.jsonl, line {number} is not a record")
        except OSError as error:
            self.unread.append(f"{METRICS}: {error.strerror}")

    @property
    def rl(self) -> RunConfig | None:
        """The config, if it is that of a run with rollouts."""
        return self.config if isinstance(self.config, RunConfig) else None

    @property
    def steps(self) -> list[Record]:
        return [record for record in self.metrics if "train/loss" in record]

    @property
    def trained(self) -> list[DumpedGroup]:
        return [group for group in self.groups if group.scope == TRAINING and group.lines]

    @property
    def restarted(self) -> bool:
        """True if a process resumed the run: its count of accepted groups lacks earlier ones."""
        size = self.rl.evaluation.group_size if self.rl is not None else 1
        least = 0.0
        for record in self.metrics:
            least += record.get("train/groups") or (record.get("eval/episodes") or 0) / size
            if (count := record.get("episodes/accepted")) is not None:
                if count + 1 <= least:
                    return True
                least = count
        return False

    @property
    def first_moment(self) -> float:
        """Wall clock before which nothing of the recorded steps happened; groups that ended earlier were lost."""
        return min((began(record) for record in self.metrics), default=-math.inf) - SLACK_S

    @property
    def complete(self) -> bool:
        """True if the run made all its steps in one process, and its metrics begin at its start."""
        config = self.rl
        if config is None or not self.steps or self.restarted:
            return False
        done = self.steps[-1]["step"] == config.trainer.total_steps
        saved = (self.root / "model" / "manifest.json").is_file() or not config.save_model
        return done and saved and all(group.finished >= self.first_moment for group in self.groups)

    def dumped(self, dumps: Dumps) -> Iterator[DumpedGroup]:
        keys = ("version", "task_id", "scope", "group_id")
        for _, records in itertools.groupby(dumps.records(dumps.rows()), lambda each: [each.get(key) for key in keys]):
            yield DumpedGroup(list(records))


def began(record: Record) -> float:
    """Return the wall clock at which a recorded step or evaluation began."""
    return float(record["time"] - (record.get("timing/step_s") or record.get("eval/seconds") or 0.0))


def differs(one: float | None, other: float | None, *, relative: float = 1e-4) -> bool:
    """Return True if two figures differ by more than rounding."""
    if one is None or other is None:
        return one is not other
    return not math.isclose(one, other, rel_tol=relative, abs_tol=1e-5)


def some(values: Iterable[Any], most: int = 8) -> str:
    listed = [str(value) for value in values]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
