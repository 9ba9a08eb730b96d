"""A run's folder, as the checks of ``areal-lite verify`` read it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from areal_lite.config.loader import load_recorded
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.errors import ConfigError
from areal_lite.tools.foreign_files import open_inside, read_lines
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.last_answer import CONFIG, UNREADABLE

Record = Mapping[str, Any]
SLACK_S = 0.5
"""Seconds by which clocks may differ: a record's time is taken after what it describes."""
METRICS = "metrics.jsonl"
TRAINING = "rollout"
EVALUATION = "eval-rollout"


@dataclass(slots=True)
class DumpedGroup:
    """The lines of one group, and what the checks of the whole run keep of them."""

    records: Sequence[Record]
    """Emptied once the group is checked."""
    scope: str | None
    version: int | None
    task: int | str
    id: str
    """The first line's id, which names the group in findings."""
    finished: float
    start: int
    head: int | None
    tail: int | None
    accepted: bool
    lines: list[int | None]
    """The ``sample_idx`` of accepted lines: sequences that train, or would."""
    trained: int
    rewards: list[float]
    """Reward per accepted episode."""
    calls: list[str]
    """Keys that identify the model calls of accepted lines."""

    @property
    def file(self) -> str:
        return self.id.rpartition(":")[0]

    @classmethod
    def of(cls, records: Sequence[Record]) -> DumpedGroup:
        first = records[0]
        kept = [record for record in records if record.get("status") == "accepted"]
        heads = [record["head_version"] for record in kept if record.get("head_version") is not None]
        tails = [record["tail_version"] for record in kept if record.get("tail_version") is not None]
        by_member: dict[Any, list[float]] = {}
        for record in kept:
            if (reward := record.get("episode_reward", record.get("reward"))) is not None:
                by_member.setdefault(record.get("member_idx"), []).append(reward)
        calls = {
            f"{turn['started']} {hash(tuple(turn.get('ids') or ()))}"
            for record in kept
            for turn in record["turns"]
            if turn.get("started") is not None
        }
        return cls(
            records=records,
            scope=first["scope"],
            version=first["version"],
            task=first.get("task_id") or 0,
            id=first["id"],
            finished=float((first.get("timings") or {}).get("finished_at") or 0.0),
            start=int(first.get("start_version") or 0),
            head=min(heads, default=None),
            tail=max(tails, default=None),
            accepted=bool(kept),
            lines=[record.get("sample_idx") for record in kept],
            trained=sum(sum(turn.get("loss_mask") or ()) for record in kept for turn in record["turns"]),
            rewards=[math.fsum(rewards) / len(rewards) for rewards in by_member.values()],
            calls=sorted(calls),
        )


@dataclass(slots=True)
class Run:
    """A run's folder, and what the checks found in it."""

    root: Path
    config: ExperimentConfig | None
    metrics: list[Record]
    broken_metrics: list[str]
    groups: list[DumpedGroup] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    """Claims that the folder cannot prove, one line each."""
    unread: list[str] = field(default_factory=list)
    """Files that could not be read, with the reason."""
    findings: list[tuple[str, str]] = field(default_factory=list)
    """Name of the check, and what it found."""
    lines: int = 0
    """Dumped lines that were checked."""
    tokenizer: Any = None
    """The run's tokenizer; None if it is not on this machine."""

    @classmethod
    def open(cls, root: Path) -> Run:
        """Return the run in the folder ``root``, without its dumps."""
        if not any((root / name).exists() for name in (CONFIG, METRICS, TRAINING, EVALUATION)):
            raise ConfigError(f"{root} is not the folder of a run: name the one with config.yaml and metrics.jsonl")
        run = cls(root, None, [], [])
        try:
            run.config = load_recorded(root, open_inside, root=ExperimentConfig)
        except UNREADABLE as error:
            if (root / CONFIG).exists():
                reason = str(error).partition("\n")[0].removeprefix(f"{root}/{CONFIG}: ")
                run.unread.append(f"{CONFIG}: {reason[:200]}")
            run.unproved.append("config.yaml cannot be read, so group sizes, staleness and advantages are not checked")
        run._read_metrics()
        return run

    def _read_metrics(self) -> None:
        path = self.root / METRICS
        try:
            for number, line in enumerate(read_lines(path, self.root) if path.exists() else (), 1):
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
    def evaluations(self) -> list[Record]:
        """The records of evaluations on held-out rows by episodes."""
        return [record for record in self.metrics if "eval/episodes" in record]

    @property
    def trained(self) -> list[DumpedGroup]:
        return [group for group in self.groups if group.scope == TRAINING and group.accepted]

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
        def key(record: Record) -> tuple[Any, ...]:
            return tuple(record.get(name) for name in ("version", "task_id", "scope", "group_id"))

        for _, records in itertools.groupby(dumps.records(dumps.rows()), key):
            yield DumpedGroup.of(list(records))


def began(record: Record) -> float:
    """Return the wall clock at which a recorded step or evaluation began."""
    seconds = record.get("timing/step_s") or record.get("eval/seconds") or 0.0
    return float(record["time"] - seconds)


def differs(one: float | None, other: float | None, *, relative: float = 1e-4) -> bool:
    """Return True if two figures differ by more than rounding."""
    if one is None or other is None:
        return one is not other
    return not math.isclose(one, other, rel_tol=relative, abs_tol=1e-5)


def some(values: Iterable[Any], most: int = 8) -> str:
    listed = [str(value) for value in values]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")
