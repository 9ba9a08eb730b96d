"""What one sequence brings to training: whole, unpadded, every array aligned to the token itself.

Guarantees that lengths agree. Knows nothing of episodes, advantages, batches or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    """``[T]`` nats, as the engine sampled; None where nobody recorded them, NaN where one is missing."""

    versions: NDArray[np.int64] | None = None
    """``[T]`` policy version of each sampled token, -1 elsewhere; None where unknown."""

    reward: float
    group_id: str
    """Samples with the same id are each other's baseline."""
    task_id: str = ""
    multi_modal_inputs: dict[str, Any] | None = None
    """What the model reads beside the tokens, such as pixel values; None for text alone."""

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
