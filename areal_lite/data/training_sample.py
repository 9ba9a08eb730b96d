"""What one sequence brings to training: whole, unpadded, every array aligned to the token itself.

Guarantees that rows come from accepted episodes only and that lengths agree. Knows nothing of
advantages, batches or torch: tensors are read through their ``numpy()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """One linear token sequence of a trajectory with its reward.

    Raises:
        ValueError: If lengths differ, or the first token, which nothing predicts, is to be trained.
    """

    input_ids: NDArray[np.int64]
    """``[T]`` prompt, answers and whatever came between."""

    loss_mask: NDArray[np.bool_]
    """``[T]`` True where the policy sampled the token and it trains."""

    behaviour_logprobs: NDArray[np.float32] | None = None
    """``[T]`` nats, as the engine sampled; None where nobody recorded them."""

    versions: NDArray[np.int64] | None = None
    """``[T]`` policy version of each sampled token, -1 elsewhere; None where unknown."""

    reward: float
    group_id: str
    """Samples with the same id are each other's baseline."""
    task_id: str = ""

    def __post_init__(self) -> None:
        for name in ("loss_mask", "behaviour_logprobs", "versions"):
            array = getattr(self, name)
            if array is not None and len(array) != len(self.input_ids):
                raise ValueError(
                    f"task {self.task_id}: {name} has {len(array)} entries but input_ids has "
                    f"{len(self.input_ids)}: give one per token"
                )
        if len(self.loss_mask) and self.loss_mask[0]:
            raise ValueError(
                f"task {self.task_id}: loss_mask is True at the first token, which no token predicts: "
                "set it to False there, or start the sequence with a BOS token"
            )

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    def staleness(self, version: int) -> int | None:
        """Return ``version`` minus the version of the oldest trained token, None where unknown."""
        if self.versions is None:
            return None
        known = self.versions[self.loss_mask & (self.versions >= 0)]
        return version - int(known.min()) if known.size else None


def training_samples(results: Sequence[EpisodeResult]) -> list[TrainingSample]:
    """Return the unpadded rows of the accepted results, in order; any padding side.

    Raises:
        ConfigError: If a trajectory has no ``loss_mask`` or no ``rewards``.
        ValueError: If a row breaks a rule of :class:`TrainingSample`.
    """
    samples: list[TrainingSample] = []
    for result in results:
        if result.status is EpisodeStatus.ACCEPTED and result.trajectory is not None:
            samples.extend(_rows(result, result.trajectory))
    return samples


def _rows(result: EpisodeResult, trajectory: dict[str, Any]) -> list[TrainingSample]:
    for key, what in (
        ("loss_mask", "which tokens the policy sampled"),
        ("rewards", "how good each sequence is"),
    ):
        if key not in trajectory:
            raise ConfigError(
                f"task {result.task_id}: the trajectory has no {key!r}, so training cannot know {what}; "
                f"it has {sorted(trajectory)}: return {key!r} from the workflow"
            )
    present = trajectory["attention_mask"].numpy() != 0
    ids = trajectory["input_ids"].numpy()
    loss_mask = trajectory["loss_mask"].numpy() != 0
    logprobs = trajectory["logprobs"].float().numpy() if "logprobs" in trajectory else None
    versions = trajectory["versions"].numpy() if "versions" in trajectory else None
    return [
        TrainingSample(
            input_ids=ids[row][keep].astype(np.int64),
            loss_mask=loss_mask[row][keep],
            behaviour_logprobs=None if logprobs is None else logprobs[row][keep].astype(np.float32),
            versions=None if versions is None else versions[row][keep].astype(np.int64),
            reward=float(reward),
            group_id=result.group_id,
            task_id=str(result.task_id),
        )
        for row, (keep, reward) in enumerate(zip(present, result.rewards, strict=True))
    ]
