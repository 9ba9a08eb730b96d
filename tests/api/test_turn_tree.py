"""Whichever sequences a workflow returns, an episode has the same turns: one for each model call."""

from __future__ import annotations
from collections.abc import Iterator, Sequence
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import ModelResponse, Trajectory
from areal_lite.api.trajectory import EpisodeStatus, TurnRole
from areal_lite.api.turn_tree import trajectory_of, unfinished_trajectory
from tests.api.test_trajectory import call, check_paths, episode, group_of, interaction, rows, sequence_of

Path = tuple[int, ...]
"""Places of the calls of a conversation, oldest first."""


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[ModelResponse], list[Path]]:
    """Return the calls of an episode, parents before children, and the path to each."""
    calls: list[ModelResponse] = []
    paths: list[Path] = []
    for place in range(draw(st.integers(1, 6))):
        parent = draw(st.integers(-1, place - 1))
        before = [1, 2] if parent < 0 else calls[parent].input_tokens + calls[parent].output_tokens
        asked = [100 + place] * draw(st.integers(0, 2))
        answer = [10 * place + 10 + token for token in range(draw(st.integers(1, 3)))]
        calls.append(call(before + asked, answer, f"call {place}", started=float(place)))
        paths.append((place,) if parent < 0 else (*paths[parent], place))
    return calls, paths


@st.composite
def sequences(draw: st.DrawFn, paths: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return paths, and the calls that each trains; no call is trained twice."""
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, unique=True))
    left = set(range(len(paths)))
    found = []
    for path in chosen:
        trained = tuple(place for place in path if place in left and draw(st.booleans()))
        left -= set(trained)
        found.append((path, trained))
    return found


def as_rows(calls: Sequence[ModelResponse], wanted: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    """Return the sequences as a tensor dict; columns are empty where a row does not train."""
    ids = [calls[path[-1]].input_tokens + calls[path[-1]].output_tokens for path, _ in wanted]
    masks = [[0] * len(row) for row in ids]
    width = max(map(len, ids))
    logprobs, versions = torch.zeros(len(ids), width), torch.full((len(ids), width), -1)
    for row, (_, trained) in enumerate(wanted):
        for one in (calls[place] for place in trained):
            here = slice(one.input_len, one.input_len + one.output_len)
            masks[row][here] = [1] * one.output_len
            logprobs[row, here] = torch.tensor(one.output_logprobs)
            versions[row, here] = torch.tensor(one.output_versions)
    return rows(*ids, masks=masks, logprobs=logprobs, versions=versions)


def as_interactions(calls: Sequence[ModelResponse], wanted: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    found = {}
    for number, (path, trained) in enumerate(wanted):
        node = None
        for place in path:
            node = interaction(calls[place], node, trained=place in trained)
        found[str(number)] = node
    return found


def conversation_ids(trajectory: Trajectory) -> Iterator[tuple[TurnRole, list[list[int]]]]:
    """Yield the role of each turn with the tokens of the turns up to it."""
    for place, turn in enumerate(trajectory.turns):
        yield turn.role, [trajectory.turns[above].ids.tolist() for above in trajectory.path_to(place)]


@given(st.data(), st.booleans())
def test_each_call_is_one_turn_whichever_sequences_were_returned(data: st.DataObject, by_rows: bool) -> None:
    calls, paths = data.draw(conversations())
    wanted = data.draw(sequences(paths))
    trajectory = trajectory_of((as_rows if by_rows else as_interactions)(calls, wanted), calls)
    check_paths(trajectory)
    unfinished = unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.FAILED)
    assert sorted(conversation_ids(trajectory)) == sorted(conversation_ids(unfinished))
    assert trajectory.num_sampled_tokens == unfinished.num_sampled_tokens == sum(c.output_len for c in calls)

    answers = {float(turn.started): turn for turn in trajectory.turns if turn.started is not None}
    assert len(answers) == sum(turn.role is TurnRole.ASSISTANT for turn in trajectory.turns) == len(calls)
    trained = {place for _, places in wanted for place in places}
    for place, one in enumerate(calls):
        turn = answers[float(place)]
        assert (turn.start, turn.ids.tolist()) == (one.input_len, one.output_tokens)
        assert turn.logprobs is not None and turn.logprobs.tolist() == one.output_logprobs
        assert turn.versions is not None and turn.versions.tolist() == one.output_versions
        assert turn.loss_mask.tolist() == [place in trained] * one.output_len
    assert [sequence.turn_idx for sequence in trajectory.sequences] == [len(path) - 1 for path, _ in wanted]
    assert trajectory.make_turns() is trajectory.turns  # made once


def test_a_turn_that_two_sequences_train_is_a_view_of_the_first() -> None:
    one = call([1, 2], [11, 12], "one")
    trajectory = trajectory_of(rows([1, 2, 11, 12], [1, 2, 11, 12], masks=[[0, 0, 1, 1]] * 2), [one])
    first, second = trajectory.sequences
    assert first.path == second.path == (0, 1)
    assert np.shares_memory(trajectory.turns[1].ids, first.input_ids)


def test_a_call_after_other_turns_is_another_turn_and_the_first_one_is_continued() -> None:
    first, second = call([1, 2], [11], "first"), call([1, 2, 11, 3], [21], "second")
    third = call([1, 2, 11, 3, 21, 4], [31], "third")
    whole, alone = interaction(second, interaction(first)), interaction(second)
    trajectory = trajectory_of({"whole": whole, "alone": alone}, [first, second, third])
    check_paths(trajectory)
    assert [one.path for one in trajectory.sequences] == [(0, 1, 2, 3), (4, 5)]
    assert trajectory.path_to(7) == [0, 1, 2, 3, 6, 7]


def test_a_sequence_may_be_empty() -> None:
    assert sequence_of([]).num_trained_tokens == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(-1, 3)), max_size=6))
def test_versions_are_those_of_trained_tokens_where_they_are_known(tokens: list[tuple[bool, int]]) -> None:
    mask, versions = [False, *(trains for trains, _ in tokens)], [0, *(version for _, version in tokens)]
    known = [version for trains, version in tokens if trains and version >= 0]
    sequence = sequence_of(list(map(int, mask)), versions=np.array(versions))
    assert sequence.trained_versions() == ((min(known), max(known)) if known else None)
    assert sequence.staleness(5) == (5 - min(known) if known else None)


@pytest.mark.parametrize(("own", "expected"), [(None, 0.5), (2.0, 2.0)])
def test_an_episode_without_a_reward_gets_the_mean_of_its_sequences(own: float | None, expected: float) -> None:
    trajectory = episode(
        0, EpisodeStatus.ACCEPTED, *(sequence_of([0, 1], reward=r) for r in (0.0, 1.0, None)), reward=own
    )
    assert group_of(trajectory).rewards == [expected]
    assert [sequence.reward for sequence in trajectory.sequences] == [0.0, 1.0, expected]
