"""A packed group is dumped like the group itself, whichever way its turns come about."""

from __future__ import annotations
import json
import pickle
from pathlib import Path
from typing import Any
import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api.episode_context import Episode
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.image_span import ImageSpan
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.api.trajectory import EpisodeStatus, Group, ProcessRecord, Trajectory
from areal_lite.api.turn_tree import trajectory_of, unfinished_trajectory
from areal_lite.data.source.sample import Sample
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text
from areal_lite.rollout.dumps.packed_group import pack_group, row_json, unpack_group
from areal_lite.rollout.episodes.partial_rollout import record_answers, sampled_group
from areal_lite.servers.client.answer import take_recorded
from areal_lite.tools.replay.dump_reader import read_group
from areal_lite.tools.verify.verify_episodes import outcome_is_consistent
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
            _ = trajectory.turns
    arrived, row = unpack_group(pack_group(group))
    assert text_of(arrived, row) == text_of(group, row_json(group.data))


@given(trajectory=trajectories(0), cancelled=st.booleans())
def test_all_that_was_sampled_in_an_episode_that_trains_is_in_its_lines(
    trajectory: Trajectory, cancelled: bool
) -> None:
    if cancelled and trajectory.sequences:  # its group was, after its end
        trajectory.status, trajectory.failure = EpisodeStatus.CANCELLED, Failure(FailureKind.CANCELLED, "", "stopped")
    group = Group(
        task_id="a", group_id="b", status=EpisodeStatus.ACCEPTED, data={}, trajectories=[trajectory], finished_at=1e9
    )
    lines = [json.loads(line) for line in text_of(group, None).splitlines()]
    assert [line["sample_idx"] for line in lines] == list(range(len(lines)))
    count = len(trajectory.sequences)
    if count == 0:
        assert [line["status"] for line in lines] == ["failed"]
        return
    assert {turn["turn_idx"] for line in lines for turn in line["turns"]} == set(range(len(trajectory.turns)))
    ended = ["cancelled"] * len(lines) if cancelled else ["accepted"] * count + ["untrained"] * (len(lines) - count)
    assert [line["status"] for line in lines] == ended
    for line in lines[count:]:
        assert not [*outcome_is_consistent(line)]
        assert line["reward"] is None and not any(any(turn["loss_mask"]) for turn in line["turns"])
        assert line["turns"][-1]["role"] == "assistant"


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


def test_images_are_spans_in_turns_dumps_and_samples(tmp_path: Path) -> None:
    red, blue = (ImageSpan(2, 3, digit * 64, (1, 2, 6)) for digit in "ab")
    own: dict[str, Any] = {"output_logprobs": [-0.5] * 2, "output_versions": [0] * 2}
    first = ModelResponse(input_tokens=[1, 2, 9, 9, 9, 3], output_tokens=[4, 9], rid="1", images=(red,), **own)
    prompt = [*first.input_tokens, *first.output_tokens, 7, 8, 9, 9, 9]
    images = (red, blue._replace(offset=10))
    second = ModelResponse(input_tokens=prompt, output_tokens=[5, 6], rid="2", images=images, **own)
    parent = InteractionWithTokenLogpReward(model_response=first)
    leaf = InteractionWithTokenLogpReward(model_response=second, parent=parent, concat=True, reward=1.0)
    trajectory = trajectory_of({"x": leaf}, [first, second])
    assert [turn.images for turn in trajectory.turns] == [(red,), (), (blue,), ()]
    drawn = [Sample(0, group_index=0, row={})]
    group = Group(
        task_id=0,
        group_id="0",
        status=EpisodeStatus.ACCEPTED,
        data={},
        trajectories=[trajectory],
        samples=drawn,
    )
    file = tmp_path / "0.jsonl"
    file.write_bytes(text_of(*unpack_group(pack_group(group))))
    assert orjson.loads(file.read_bytes())["turns"][2]["images"][0] == blue._asdict() | {"grid": [1, 2, 6]}
    (sequence,) = read_group(file).sequences
    assert sequence.images == images
    (sample,) = (Sample.from_dict(orjson.loads(orjson.dumps(one.to_dict()))) for one in sampled_group(group))
    assert sample.to_sequence().images == images
    episode = Episode()
    record_answers([sample], [episode], oldest_version=0)
    assert take_recorded(episode, prompt, (red, red._replace(offset=10))) is None
    again = take_recorded(episode, prompt, images)
    assert again is not None
    assert (again.output_tokens, again.images) == ([5, 6], images)
    assert take_recorded(episode, first.input_tokens, (red,)) is not None
