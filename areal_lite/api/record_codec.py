"""The record of an episode as plain data and bytes: one codec, for dumps and for rollout workers.

Packing must cost microseconds, because it happens on the event loop. Arrays become bytes beside the plain part, which
names them by number: JSON needs no list of numbers for them, and pickle writes bytes twice as fast as arrays. Turns and
the calls they come from are not here: a dump needs all of them, and a rollout worker none, because the run has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, ProcessRecord, TokenSequence, Trajectory

Plain = Sequence[Any]
"""Has JSON's types; a tuple may come back as a list."""
Columns = list[bytes]
"""Arrays as bytes, in the order in which they were packed."""
ReadColumns = Sequence[bytes | bytearray]


class Form:
    """Fields of a class, of which the last ``num_columns`` are arrays, as plain data."""

    def __init__(self, *fields: str, num_columns: int = 0) -> None:
        self._fields = fields
        self._num_plain = len(fields) - num_columns
        self._get = attrgetter(*fields)

    def pack(self, value: Any, columns: Columns) -> Plain:
        """Return the fields; of an array its dtype and its number in ``columns``."""
        plain: tuple[Any, ...] = self._get(value)
        at = self._num_plain
        if at == len(plain):
            return plain
        return *plain[:at], *[None if array is None else _add(array, columns) for array in plain[at:]]

    def unpack(self, plain: Plain, columns: ReadColumns) -> dict[str, Any]:
        """Return the fields by name."""
        arrays: list[NDArray[Any] | None] = [
            None if packed is None else np.frombuffer(columns[packed[1]], packed[0])
            for packed in plain[self._num_plain :]
        ]
        return dict(zip(self._fields, (*plain[: self._num_plain], *arrays), strict=True))


def _add(array: NDArray[Any], columns: Columns) -> tuple[str, int]:
    columns.append(array.tobytes())
    return array.dtype.char, len(columns) - 1


_TRAJECTORY = Form("member_idx", "reward", "has_loss_mask")
_SEQUENCE = Form("reward", "input_ids", "loss_mask", "logprobs", "versions", "token_rewards", num_columns=5)


def pack_records(episode: Any) -> Plain:
    """Return what the code of an episode recorded; also of its trajectory."""
    processes = [asdict(record) for record in episode.processes]
    return episode.counts, episode.reward_extra, episode.scalars, processes


def unpack_records(plain: Plain) -> dict[str, Any]:
    """Return the fields of :func:`pack_records` by name."""
    counts, reward_extra, scalars, processes = plain
    return {
        "counts": counts,
        "reward_extra": reward_extra,
        "scalars": [(name, value) for name, value in scalars],
        "processes": [ProcessRecord(**record) for record in processes],
    }


def pack_trajectory(trajectory: Trajectory, columns: Columns) -> Plain:
    """Return how an episode ended, and its sequences, whose arrays are added to ``columns``."""
    sequences = [_SEQUENCE.pack(sequence, columns) for sequence in trajectory.sequences]
    return _TRAJECTORY.pack(trajectory, columns), trajectory.status.value, pack_failure(trajectory.failure), sequences


def unpack_trajectory(plain: Plain, columns: ReadColumns) -> Trajectory:
    """Return the trajectory, without turns, records and extras."""
    own, status, failure, sequences = plain
    trajectory = Trajectory(
        **_TRAJECTORY.unpack(own, columns), status=EpisodeStatus(status), failure=unpack_failure(failure)
    )
    trajectory.sequences += [TokenSequence(**_SEQUENCE.unpack(sequence, columns)) for sequence in sequences]
    return trajectory


def pack_failure(failure: Failure | None) -> Plain | None:
    """Return a failure as plain data."""
    return None if failure is None else (failure.kind.value, *astuple(failure)[1:])


def unpack_failure(plain: Plain | None) -> Failure | None:
    """Return the failure of :func:`pack_failure`."""
    return None if plain is None else Failure(FailureKind(plain[0]), *plain[1:])
