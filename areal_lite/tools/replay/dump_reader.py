"""Reads groups back from their dumps with every number that the trainer needs: one, or those that each step trained.

Guarantees that a sequence has the ids, mask, log-probs, versions, reward and place in its episode that it had when it
was dumped, or that the error names file and line; and that :meth:`TrainedBatches.groups` returns what the trainer got:
the same groups in the same order, with the same tokens masked as too old.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
import numpy as np
from areal_lite.api.image_span import images_of
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory
from areal_lite.errors import ConfigError
from areal_lite.rollout.dumps.dump_lines import SCHEMA
from areal_lite.rollout.episodes.batch_cut import cut_batch
from areal_lite.runs.folder.run_directory import BATCHES
from areal_lite.tools.foreign_files import read_records


def read_group(path: Path, *, root: Path | None = None) -> Group:
    """Return the accepted part of a dumped group; ``root`` is a folder above the dump that no link may leave."""
    records = [record for record in read_lines(path, root=root) if record["status"] == EpisodeStatus.ACCEPTED]
    if not records:
        raise ConfigError(f"{path} has no accepted episode: it is not the dump of a trained group")
    try:
        by_member = itertools.groupby(records, lambda record: record["member_idx"])
        trajectories = [
            Trajectory(
                member_idx=member,
                status=EpisodeStatus.ACCEPTED,
                sequences=[_sequence(line) for line in lines],
                reward=next((line["episode_reward"] for line in lines if "episode_reward" in line), None),
            )
            for member, lines in ((member, list(lines)) for member, lines in by_member)
        ]
        return Group(
            task_id=records[0]["task_id"],
            group_id=records[0]["group_id"],
            status=EpisodeStatus.ACCEPTED,
            data=records[0].get("row") or {},
            trajectories=trajectories,
            start_version=records[0]["start_version"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): restore it from a copy, or train the run again") from None


def read_lines(path: Path, *, root: Path | None = None) -> list[dict[str, Any]]:
    """Return the lines of a dump; each must be whole and of a known schema."""
    try:
        records = list(read_records(path, root, whole=True))
    except ConfigError as error:
        raise ConfigError(f"{error}. Restore it from a copy, or train the run again") from None
    for number, record in enumerate(records, 1):
        schema = record.get("schema") if "status" in record else None
        if schema != SCHEMA:
            raise ConfigError(
                f"{path}, line {number} has schema {schema}, which lacks what the trainer needs; schema {SCHEMA} has "
                "it: train the run again"
            )
    return records


def _sequence(record: dict[str, Any]) -> TokenSequence:
    turns, missing = record["turns"], record.get("missing", ())

    def column(name: str, absent: float, dtype: type) -> Any:
        if name in missing:
            return None
        return np.concatenate([np.array(turn.get(name) or [absent] * len(turn["ids"]), dtype) for turn in turns])

    calls = sum(turn["role"] == "assistant" for turn in turns)
    return TokenSequence(
        input_ids=column("ids", 0, np.int32),
        loss_mask=column("loss_mask", 0, np.bool_),
        logprobs=column("logprobs", 0.0, np.float32),
        versions=column("versions", -1, np.int32),
        token_rewards=column("rewards", 0.0, np.float32) if any("rewards" in turn for turn in turns) else None,
        reward=record["reward"],
        place=(tuple(turn["turn_idx"] for turn in turns), max(0, calls - 1)),
        images=tuple(span.moved(turn["start"]) for turn in turns for span in images_of(turn.get("images", []))),
    )


@dataclass(frozen=True)
class TrainedBatches:
    """The batches of a run, by step from 1 on."""

    run: Path
    max_staleness: int
    records: list[dict[str, Any]]
    files: dict[str, list[Path]] = field(repr=False)

    @classmethod
    def open(cls, run: Path, *, max_staleness: int) -> Self:
        """Return the batches of the run in the folder ``run``; raises ConfigError."""
        files: dict[str, list[Path]] = {}
        for path in sorted(run.glob("rollout/*/*.jsonl")):
            files.setdefault(path.name, []).append(path)
        if not files:
            raise ConfigError(
                f"{run}/rollout has no dumps to train from: train the run again with rollout.dump_to_file=true"
            )
        if not (run / BATCHES).is_file():
            raise ConfigError(
                f"{run / BATCHES} is missing, so the groups of each step are unknown: name the folder of a run of "
                "`areal-lite train` (rollout, eval and continue train nothing)"
            )
        return cls(run, max_staleness, _read(run / BATCHES), files)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def have_baselines(self) -> bool:
        return all("baselines" in record for record in self.records)

    def groups(self, step: int) -> list[Group]:
        """Return the groups of a step, from 1 on; raises ConfigError."""
        record = self.records[step - 1]
        files = [self._file(step, task_id) for task_id in record["task_ids"]]
        groups = [read_group(file, root=self.run) for file in files]
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
    for number, record in enumerate(read_records(path), 1):
        try:
            step, ids = record["step"], record["task_ids"]
            if not (isinstance(ids, list) and ids and 1 <= step <= len(records) + 1):
                raise ValueError(f"step {step} after step {len(records)}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is not the record of a step ({error}): restore the file, or train the run again"
            ) from None
        records[step - 1 :] = [record]
    if not records:
        raise ConfigError(f"{path} has no step: the run ended before its first one; train it again")
    return records
