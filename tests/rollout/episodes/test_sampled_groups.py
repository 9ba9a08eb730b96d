"""What a stopped or surplus group keeps, as samples: paths, status and reward."""

from __future__ import annotations
import pytest
import torch
from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.api.turn_tree import trajectory_of, unfinished_trajectory
from areal_lite.data.source.sample import Sample
from areal_lite.rollout.episodes.partial_rollout import record_answers, sampled_group


def call(prompt: list[int], answer: list[int], stop_reason: str = "stop") -> ModelResponse:
    return ModelResponse(
        input_tokens=prompt,
        output_tokens=answer,
        output_logprobs=[-1.0] * len(answer),
        output_versions=[0] * len(answer),
        stop_reason=stop_reason,
        rid=str((prompt, answer)),
    )


def samples_of(trajectory: Trajectory, status: EpisodeStatus = EpisodeStatus.CANCELLED) -> list[Sample]:
    """Return the samples of a group with this episode."""
    drawn = [Sample(0, group_index=0)]
    return sampled_group(
        Group(task_id=0, group_id="0", status=status, data={}, trajectories=[trajectory], samples=drawn)
    )


def finished(*calls: ModelResponse, rewards: list[float]) -> Trajectory:
    """Return an episode with a row and a reward for each call."""
    rows = [one.input_tokens + one.output_tokens for one in calls]
    length = max(map(len, rows))
    return trajectory_of(
        {
            "input_ids": torch.tensor([row + [0] * (length - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[at < len(row) for at in range(length)] for row in rows]),
            "loss_mask": torch.tensor([[one.input_len <= at < len(row) for at in range(length)]
                                       for one, row in zip(calls, rows, strict=True)]),
            "rewards": torch.tensor(rewards),
        },
        calls,
    )  # fmt: skip


def test_each_path_of_a_fork_has_the_reward_of_the_episode() -> None:
    root, left, right = call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 5], [6])
    samples = samples_of(finished(left, right, root, rewards=[1.0, 0.0, 0.5]), EpisodeStatus.ACCEPTED)
    assert [sample.tokens for sample in samples] == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert [sample.reward for sample in samples] == [1.5, 1.5]
    assert [len(sample.spans) for sample in samples] == [2, 1]  # the shared answer counts once


@pytest.mark.parametrize(
    ("reasons", "status"),
    [(("stop", "length"), "truncated"), (("length", "stop"), "completed"), (("stop", "stop"), "completed")],
)
def test_an_episode_is_truncated_if_its_last_answer_reached_the_limit(reasons: tuple[str, str], status: str) -> None:
    calls = [call([1], [2], reasons[0]), call([1, 2, 3], [4], reasons[1])]
    (sample,) = samples_of(finished(*calls, rewards=[1.0, 1.0]), EpisodeStatus.ACCEPTED)
    assert sample.status == status
    assert [span.stop_reason for span in sample.spans] == list(reasons)


def test_an_answer_that_goes_on_at_once_is_one_path() -> None:
    calls = [call([1], [2]), call([1, 2], [3])]
    (sample,) = samples_of(unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.CANCELLED))
    assert sample.tokens == [1, 2, 3] and len(sample.spans) == 2
    assert (list(sample.logprobs), list(sample.versions)) == ([0, -1, -1], [-1, 0, 0])


def test_answers_are_reused_while_no_token_is_beyond_the_bound() -> None:
    calls = [call([1], [2])]
    samples = samples_of(unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.CANCELLED))
    episode = Episode()
    record_answers(samples, [episode], oldest_version=1)
    assert episode.oldest_version is None
    record_answers(samples, [episode], oldest_version=0)
    assert episode.oldest_version == 0


@pytest.mark.parametrize("versions", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_one_old_token_of_a_group_is_enough_to_sample_all_again(versions: tuple[int, ...]) -> None:
    """Of any member and path."""
    drawn = Sample(0, group_index=0), Sample(1, group_index=0)
    samples = [drawn[0].sibling(0), drawn[0].sibling(0), drawn[1].sibling(1)]
    for sample, version in zip(samples, versions, strict=True):
        sample.append([2, 3], logprobs=[-1.0, -1.0], versions=[1, version], sampled=True)
    episodes = [Episode(), Episode()]
    record_answers(samples, episodes, oldest_version=1)
    assert [episode.oldest_version for episode in episodes] == [None, None]
    record_answers(samples, episodes, oldest_version=0)
    assert [episode.oldest_version for episode in episodes] == [min(versions[:2]), versions[2]]


def test_an_unfinished_episode_is_aborted_also_after_an_answer_at_the_limit() -> None:
    calls = [call([1], [2], "length")]
    (sample,) = samples_of(unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.CANCELLED))
    assert (sample.status, sample.reward) == ("aborted", None)
    for nothing in ([], [call([1], [])]):
        (sample,) = samples_of(unfinished_trajectory(nothing, member_idx=0, status=EpisodeStatus.CANCELLED))
        assert (sample.status, sample.tokens) == ("pending", [])


def test_a_call_continues_the_longest_call_that_its_prompt_extends() -> None:
    """Whichever call came last."""
    short, longer, last = call([1], [2]), call([1, 2, 3], [4]), call([1, 2, 3, 4, 5], [6])
    for calls, spans in (([short, longer, last], [3]), ([longer, short, last], [1, 2])):
        samples = samples_of(unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.CANCELLED))
        assert sorted(len(sample.spans) for sample in samples) == spans
        (whole,) = [sample for sample in samples if len(sample.tokens) == 6]
        assert whole.tokens == [1, 2, 3, 4, 5, 6]
