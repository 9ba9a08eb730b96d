"""Which groups share an update: decided by the order in which they were drawn, which a resume keeps."""

from __future__ import annotations
import numpy as np
from areal_lite.api.trajectory import TokenSequence
from areal_lite.trainer.rl.step_tokens import split_groups


def shares(group_ids: range, count: int = 3, untrained: tuple[int, ...] = ()) -> list[list[int]]:
    """Return the places in the batch of the groups of each update."""
    ids = np.array([1, 2], np.int32)
    sequences = [
        TokenSequence(input_ids=ids, loss_mask=np.array([False, one not in untrained]), reward=0.0, group_id=str(one))
        for one in group_ids
    ]
    return split_groups(sequences, count, rng=np.random.default_rng(1))


def test_groups_share_updates_alike_whatever_number_they_start_from() -> None:
    assert shares(range(8, 20)) == shares(range(12)) == shares(range(95, 107))


def test_no_update_is_empty() -> None:
    """A share that trains nothing would divide by 0 tokens, and move the optimizer's moments."""
    assert sorted(shares(range(2), 5)) == [[0], [1]]
    assert shares(range(3), 3, untrained=(0, 2)) == [[1]]
    assert sorted(map(len, shares(range(7), 3))) == [2, 2, 3]
