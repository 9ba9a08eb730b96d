"""Reads a group back from its dump, with every number that the trainer needs.

Guarantees that a sequence has the ids, mask, log-probs, versions, reward and place in its episode that it had when it
was dumped, or that the error names file and line.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal_lite.api.image_span import images_of
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence, Trajectory
from areal_lite.errors import ConfigError
from areal_lite.rollout.dumps.dump_lines import SCHEMA
from areal_lite.tools import foreign_files


def read_group(path: Path, *, oldest_schema: int = SCHEMA, root: Path | None = None) -> Group:
    """Return the accepted part of a dumped group. ``oldest_schema`` 1 also reads schema 1, which has no branches: its
    lines count as conversations of their own. ``root`` is a folder above the dump that no link may leave."""
    lines = read_lines(path, oldest_schema=oldest_schema, root=root)
    records = [record for record in lines if record["status"] == EpisodeStatus.ACCEPTED]
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


def read_lines(path: Path, *, oldest_schema: int = SCHEMA, root: Path | None = None) -> list[dict[str, Any]]:
    """Return the lines of a dump; each must be whole and of a known schema."""
    try:
        lines = list(foreign_files.read_lines(path, root))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}: restore it, or train the run again") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = orjson.loads(line)
            schema, _ = record["schema"], record["status"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is not a whole line of a dump ({error!r}): restore the file from a copy, or "
                "train the run again"
            ) from None
        if schema not in range(oldest_schema, SCHEMA + 1):
            raise ConfigError(
                f"{path}, line {number} has schema {schema}, which lacks what the trainer needs; schema {SCHEMA} has "
                "it: train the run again"
            )
        records.append(record)
    return records


def _sequence(record: dict[str, Any]) -> TokenSequence:
    turns, missing = record["turns"], record.get("missing", ())

    def column(name: str, absent: float, dtype: type) -> Any:
        if name in missing:
            return None
        return np.concatenate([np.array(turn.get(name) or [absent] * len(turn["ids"]), dtype) for turn in turns])

    path = (turn["turn_idx"] if record["schema"] > 1 else place for place, turn in enumerate(turns))
    calls = sum(turn["role"] == "assistant" for turn in turns)
    return TokenSequence(
        input_ids=column("ids", 0, np.int32),
        loss_mask=column("loss_mask", 0, np.bool_),
        logprobs=column("logprobs", 0.0, np.float32),
        versions=column("versions", -1, np.int32),
        token_rewards=column("rewards", 0.0, np.float32) if any("rewards" in turn for turn in turns) else None,
        reward=record["reward"],
        place=(tuple(path), max(0, calls - 1)),
        images=tuple(
            span.moved(turn["start"]) for turn in turns if "images" in turn for span in images_of(turn["images"])
        ),
    )
