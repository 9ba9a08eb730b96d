"""The trained tokens of a step, and how ranks share its forward passes."""

from __future__ import annotations
import dataclasses
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.rl.step_tokens import Microbatch, StepCut, StepTokens
from tests.trainer.training_data import VOCABULARY, drawn_batch, sequence

CPU = torch.device("cpu")


class RanksOfOneProcess(Ranks):
    """Ranks that each have at most 20 micro-batches."""

    def most(self, count: int, device: torch.device) -> int:
        assert count <= 20
        return 20


def model(*, ragged: bool = False) -> Any:
    return SimpleNamespace(
        balance_length=500, ragged=ragged, shares_prefixes=True, vocab_size=VOCABULARY, tower=None, pixels=None, parts=1
    )


def test_nothing_is_filled_in_at_first() -> None:
    tokens = StepTokens.zeros(torch.tensor([0, 0, 1, 2, 2, 2]))
    assert tokens.ends.tolist() == [False, True, True, False, False, True]
    assert tokens.sequences is tokens.episodes
    assert tokens.versions.tolist() == [-1] * 6
    assert not any(bool(column.any()) for column in (tokens.known, tokens.computed, tokens.policy, tokens.rewards))
    assert StepTokens.of([sequence([5, 6, 7], [1, 2])], [0], device=CPU).versions.tolist() == [-1, -1]


def test_sequences_without_a_trained_token_have_no_place_and_no_reward() -> None:
    batch = [sequence([5, 6, 7], [1, 2], group=name) for name in "ab"] + [sequence([5, 6], [], group="c")]
    for place, rewards in enumerate(([0.0, 1.0, 2.0], [0.0, 3.0, 4.0], [5.0, 6.0])):
        batch[place] = dataclasses.replace(batch[place], token_rewards=np.array(rewards, np.float32))
    tokens = StepTokens.of(batch, range(len(batch)), device=CPU)
    assert tokens.rewards.tolist() == [1, 2, 3, 4]
    assert tokens.chosen([1, 2]).tolist() == [False, False, True, True]
    assert not bool(tokens.chosen([]).any())


@pytest.mark.parametrize(("size", "whole"), [(2, False), (2, True), (3, False), (16, False)])
def test_every_rank_has_as_many_forward_passes_and_each_sequence_is_computed_once(size: int, whole: bool) -> None:
    batch = [dataclasses.replace(one, member_idx=place // 2 % 2) for place, one in enumerate(drawn_batch(1))]
    own = [one.group_id if whole else (one.group_id, one.member_idx) for one in batch]
    of_token = np.repeat(np.arange(len(batch)), [one.num_trained_tokens for one in batch])
    seen, loads, units = [], [], []
    for rank in range(size):
        cut = StepCut(batch, model(), ranks=RanksOfOneProcess(rank, size), device=CPU, units=own, whole=whole)
        passes: list[Microbatch] = [*cut(range(len(batch)), 100)]
        assert len(passes) == 20
        assert all(len(one.tokens) == len(one.packed.targets) for one in passes)
        tokens = [token for one in passes if one.counts for token in one.tokens.tolist()]
        seen += tokens
        loads.append(sum(sum(one.packed.lengths) for one in passes if one.counts))
        members = [batch[index] for index in sorted(set(of_token[tokens]))]
        units += sorted({one.group_id if whole else (one.group_id, one.member_idx) for one in members})
    assert sorted(seen) == list(range(len(of_token)))
    assert len(units) == len(set(units))  # none is divided
    assert len(units) == (3 if whole else 6)
    if size == 2 and not whole:
        assert max(loads) < 1.2 * min(loads)
    if size == 16:
        assert sorted(map(bool, loads)) == [False] * 10 + [True] * 6


def test_side_by_side_a_forward_pass_holds_as_many_tokens_as_allowed() -> None:
    batch = [sequence(range(first, first + 8), [7], group=str(first)) for first in (10, 20, 30, 40)]
    cut = StepCut(batch, model(ragged=True), ranks=Ranks(), device=CPU)
    assert [one.packed.input_ids.shape for one in cut(range(4), 14)] == [(14,), (14,)]
