"""The groups that each step of a run trained (``batches.jsonl``), read back from the run's dumps.

Guarantees that :meth:`TrainedBatches.groups` returns what the trainer got: the same groups in the same order, with the
same tokens masked as too old.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from areal_lite.api.trajectory import Group
from areal_lite.errors import ConfigError
from areal_lite.rollout.dumps.dump_lines import SCHEMA
from areal_lite.rollout.episodes.batch_cut import cut_batch
from areal_lite.runs.folder.run_directory import BATCHES
from areal_lite.tools import foreign_files
from areal_lite.tools.replay.dump_reader import read_group, read_lines


@dataclass(frozen=True)
class TrainedBatches:
    """The batches of a run, by step from 1 on."""

    run: Path
    max_staleness: int
    records: list[dict[str, Any]]
    files: dict[str, list[Path]] = field(repr=False)
    oldest_schema: int = SCHEMA

    @classmethod
    def open(cls, run: Path, *, max_staleness: int) -> TrainedBatches:
        """Return the batches of the run in the folder ``run``; raises ConfigError."""
        files: dict[str, list[Path]] = {}
        for path in sorted(run.glob("rollout/*/*.jsonl")):
            files.setdefault(path.name, []).append(path)
        if not files:
            raise ConfigError(
                f"{run}/rollout has no dumps to train from: train the run again with rollout.dump_to_file=true"
            )
        if not (run / BATCHES).is_file():
            read_lines(next(iter(files.values()))[0], root=run)  # a run of schema 1 has none
            raise ConfigError(
                f"{run / BATCHES} is missing, so the groups of each step are unknown: train the run again with this "
                "version"
            )
        with foreign_files.needed(run / BATCHES):
            return cls(run, max_staleness, _read(run / BATCHES), files)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def have_baselines(self) -> bool:
        return all("baselines" in record for record in self.records)

    def groups(self, step: int) -> list[Group]:
        """Return the groups of a step, from 1 on; raises ConfigError."""
        record = self.records[step - 1]
        groups = [
            read_group(self._file(step, task_id), oldest_schema=self.oldest_schema, root=self.run)
            for task_id in record["task_ids"]
        ]
        for group, baseline in zip(groups, record.get("baselines", ()), strict=False):
            group.baseline = baseline
        # Groups may have been dumped before their older tokens were masked; without older tokens this masks nothing.
        cut = cut_batch(
            groups.copy(), len(groups), version=step - 1, max_staleness=self.max_staleness, mask_off_policy=True
        )
        if cut.stale:
            raise ConfigError(
                f"step {step} of {self.run} cannot have trained task {cut.stale[0].task_id}: its tokens are older than "
                f"max_head_offpolicyness={self.max_staleness} allows. Restore the run's dumps and config.yaml"
            )
        return groups

    def _file(self, step: int, task_id: int | str) -> Path:
        found = self.files.get(f"{task_id}.jsonl", [])
        if len(found) != 1:
            what = f"{len(found)} dumps" if found else "no dump"
            raise ConfigError(
                f"step {step} trained task {task_id}, which has {what} in {self.run}/rollout: restore the one that "
                "the run wrote"
            )
        return found[0]


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the records of steps 1, 2, ...; a resumed run writes the steps that it lost again."""
    records: list[dict[str, Any]] = []
    for number, line in enumerate(foreign_files.read_lines(path), 1):
        try:
            record = orjson.loads(line)
            step, ids = record["step"], record["task_ids"]
            if not (isinstance(ids, list) and ids and 1 <= step <= len(records) + 1):
                raise ValueError(f"step {step} after step {len(records)}")
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                break  # the run was killed while it wrote
            raise ConfigError(
                f"{path}, line {number} is not the record of a step ({error}): restore the file, or train the run again"
            ) from None
        records[step - 1 :] = [record]
    if not records:
        raise ConfigError(f"{path} has no step: the run ended before its first one; train it again")
    return records
