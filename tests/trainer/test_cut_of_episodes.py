"""Credit belongs to episodes: it does not depend on how an episode is cut into sequences."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_lite.api.trajectory import TokenSequence
from tests.trainer.test_policy_trainer import gradients, make_trainer
from tests.trainer.training_data import drawn_batch, training_batch

REWARDS = (1.0, 0.0, 0.0, 0.0)


def episodes() -> list[TokenSequence]:
    """Return a group of four episodes, one sequence each."""
    return [
        dataclasses.replace(sequence, reward=reward, member_idx=member)
        for member, (sequence, reward) in enumerate(zip(drawn_batch(0, groups=1), REWARDS, strict=True))
    ]


def cut(sequence: TokenSequence) -> list[TokenSequence]:
    """Return the episode of ``sequence`` as one sequence per trained token, each with all before it as context."""
    pieces = []
    for place in np.flatnonzero(sequence.loss_mask):
        columns = {
            name: getattr(sequence, name)[: place + 1].copy()
            for name in ("input_ids", "logprobs", "versions")
        }
        pieces.append(
            dataclasses.replace(sequence, loss_mask=np.arange(place + 1) == place, place=((), 0), **columns)
        )
    return pieces


@pytest.mark.parametrize("changes", [
    {"advantage": "dr_grpo"},
    {"advantage": "grpo", "loss_aggregation": "seq-mean-token-mean"},
    {"advantage": "rloo", "loss_aggregation": "seq-mean-token-sum"},
    {"advantage": "grpo", "loss": "gspo"},
    {"advantage": "opo"},
], ids=lambda changes: "-".join(changes.values()))  # fmt: skip
def test_credit_does_not_depend_on_how_an_episode_is_cut_into_sequences(
    tiny: Path, changes: dict[str, Any]
) -> None:
    first, *others = episodes()
    assert first.num_trained_tokens > 2
    found = []
    for batch in ([first, *others], [*cut(first), *others]):
        trainer = make_trainer(tiny, max_grad_norm=1e9, **changes)
        step = trainer.begin(training_batch(batch), version=5)
        trainer.correct(step)
        trainer.estimate_advantages(step)
        trainer.update_policy(step)
        found.append((step.tokens.advantages, gradients(trainer), step.scores.tolist()))
    (whole, whole_gradients, scores), (parts, parts_gradients, parts_scores) = found
    assert scores == parts_scores == list(REWARDS)
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(parts_gradients, whole_gradients, atol=1e-6, rtol=1e-4)
    if changes["advantage"] == "dr_grpo":
        assert sorted(set(whole.tolist())) == [-0.25, 0.75]
