"""Which groups share an update: decided by the order in which they were drawn, which a resume keeps."""

from __future__ import annotations

import numpy as np

from areal_lite.api.trajectory import TokenSequence
from areal_lite.trainer.step_tokens import split_groups


def shares(group_ids: range) -> list[list[int]]:
    """Return the places in the batch of the groups of each update."""
    ids, mask = np.array([1, 2], np.int32), np.array([False, True])
    sequences = [TokenSequence(input_ids=ids, loss_mask=mask, reward=0.0, group_id=str(one)) for one in group_ids]
    return split_groups(sequences, 3, rng=np.random.default_rng(1))


def test_groups_share_updates_alike_whatever_number_they_start_from() -> None:
    assert shares(range(8, 20)) == shares(range(12)) == shares(range(95, 107))
