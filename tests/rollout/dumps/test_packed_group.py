"""A packed group is dumped like the group itself, whichever way its turns come about."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, ProcessRecord, Trajectory
from areal_lite.api.turn_tree import trajectory_of, unfinished_trajectory
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text
from areal_lite.rollout.dumps.packed_group import pack_group, row_json, unpack_group
from tests.api.test_turn_tree import as_interactions, as_rows, conversations, sequences


@st.composite
def trajectories(draw: st.DrawFn, member_idx: int) -> Trajectory:
    """Return an episode that finished, or failed after some calls."""
    calls, paths = draw(conversations())
    for call in calls:
        call.metadata["agent"] = draw(st.sampled_from(["main", "reviewer", None]))
    if draw(st.booleans()):
        given = draw(st.sampled_from([as_rows, as_interactions]))(calls, draw(sequences(paths)))
        trajectory = trajectory_of(given, calls, member_idx=member_idx)
        trajectory.reward_extra = {"format": 0.5, "why": "too short"}
    else:
        trajectory = unfinished_trajectory(calls, member_idx=member_idx, status=EpisodeStatus.FAILED)
        trajectory.failure = Failure(FailureKind.DEADLINE, "TimeoutError", "late", "frames")
    trajectory.counts = {"forks": np.float64(2)}  # type: ignore[dict-item]  # a workflow's own number
    trajectory.processes = [
        ProcessRecord(command=["ls"], returncode=-9, timed_out=True, seconds=0.5, stdout="a", stderr="")
    ]
    return trajectory


def text_of(group: Group, row: bytes | None) -> bytes:
    return dump_text(dump_lines(group, row=row))


@given(data=st.data(), made=st.booleans())
def test_a_packed_group_is_dumped_like_the_group_itself(data: st.DataObject, made: bool) -> None:
    group = Group(
        task_id="a",
        group_id="b",
        status=data.draw(st.sampled_from([EpisodeStatus.ACCEPTED, EpisodeStatus.REJECTED])),
        data={"question": "why", "image": np.zeros(2)},
        trajectories=[data.draw(trajectories(member_idx)) for member_idx in range(data.draw(st.integers(1, 3)))],
        rejection=data.draw(st.sampled_from([None, "should_accept_fn said no"])),
        start_version=3,
        queued_s=0.25,
        run_s=1.5,
        finished_at=1e9,
    )
    if made:  # the trainer, or a filter, has asked for turns
        for trajectory in group.trajectories:
            trajectory.find_paths()
    arrived, row = unpack_group(pack_group(group))
    assert text_of(arrived, row) == text_of(group, row_json(group.data))


def test_calls_that_share_a_prompt_are_packed_with_one_copy_of_it() -> None:
    ids: list[int] = []

    def call(number: int) -> ModelResponse:
        ids.extend(range(1000))
        own: dict[str, Any] = {"output_tokens": [7], "output_logprobs": [-0.5], "output_versions": [0]}
        response = ModelResponse(input_tokens=[], rid=str(number), **own)
        return SharedPromptResponse.of(response, TokenPrefix(ids, len(ids)))

    calls = [call(number) for number in range(50)]
    trajectory = unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.FAILED)
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.FAILED, data={}, trajectories=[trajectory])
    assert len(pack_group(group)) < 1.2 * len(pickle.dumps(ids))


def test_a_row_without_a_json_form_is_left_out() -> None:
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.CANCELLED, data={"a": object()})
    assert unpack_group(pack_group(group))[1] is None
