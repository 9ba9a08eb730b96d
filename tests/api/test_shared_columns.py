"""Turns and sequences of an episode are one set of arrays, however many ways there are to look at it."""

from __future__ import annotations
import numpy as np
from areal_lite.api import ModelResponse, TurnRole
from areal_lite.api.trajectory import Trajectory
from areal_lite.api.turn_tree import trajectory_of
from tests.rollout.scripted import tensors_of


def call(rid: str, prompt: list[int], answer: list[int]) -> ModelResponse:
    return ModelResponse(
        input_tokens=prompt,
        output_tokens=answer,
        output_logprobs=[-0.5] * len(answer),
        output_versions=[3] * len(answer),
        rid=rid,
        started=float(len(prompt)),
    )


def two_calls() -> Trajectory:
    first = call("a", [1, 2], [3, 4])
    second = call("b", [1, 2, 3, 4, 5], [6])
    return trajectory_of(dict(tensors_of(first, second)), [first, second])


def test_turns_are_views_of_the_sequence_that_trains_them() -> None:
    trajectory = two_calls()
    (sequence,) = trajectory.sequences
    turns = [trajectory.turns[place] for place in sequence.path]
    assert [turn.role for turn in turns] == [
        TurnRole.PROMPT,
        TurnRole.ASSISTANT,
        TurnRole.ENVIRONMENT,
        TurnRole.ASSISTANT,
    ]
    for name in ("ids", "loss_mask", "logprobs", "versions"):
        whole = getattr(sequence, "input_ids" if name == "ids" else name)
        parts = [getattr(turn, name) for turn in turns]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert all(np.shares_memory(part, whole) for part in parts), name


def test_a_token_masked_in_the_sequence_is_masked_in_its_turn() -> None:
    trajectory = two_calls()
    trajectory.sequences[0].loss_mask &= trajectory.sequences[0].input_ids != 4
    assert trajectory.turns[1].loss_mask.tolist() == [True, False]
