"""Turns are a tree, sequences are its paths, and AReaL's tensor dict survives both directions."""

from __future__ import annotations
from collections.abc import Sequence
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import Failure, FailureKind, Group, ModelResponse, Trajectory, Turn
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.tensor_dict import concat_padded_tensors, split_rows, tensor_dict_of
from areal_lite.api.trajectory import EpisodeStatus, TokenSequence, TurnRewards, TurnRole
from areal_lite.api.turn_tree import trajectory_of, unfinished_trajectory


def call(prompt: Sequence[int], answer: Sequence[int], rid: str = "", **known: Any) -> ModelResponse:
    return ModelResponse(
        input_tokens=list(prompt),
        output_tokens=list(answer),
        output_logprobs=[-token / 8 for token in answer],
        output_versions=[token % 4 for token in answer],
        rid=rid,
        **known,
    )


def rows(*sequences: Sequence[int], masks: Sequence[Sequence[int]], **more: Any) -> dict[str, Any]:
    """Return a right-padded tensor dict."""
    width = max(map(len, sequences))

    def padded(values: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in values])

    return {
        "input_ids": padded(sequences),
        "attention_mask": padded([[1] * len(row) for row in sequences]),
        "loss_mask": padded(masks),
        **more,
    }


def interaction(
    response: ModelResponse, parent: InteractionWithTokenLogpReward | None = None, **fields: Any
) -> InteractionWithTokenLogpReward:
    return InteractionWithTokenLogpReward(
        model_response=response, parent=parent, **{"reward": 1.0, "concat": True, **fields}
    )


def shape(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    return [(str(t.role), t.parent, t.start, t.ids.tolist(), t.loss_mask.tolist()) for t in trajectory.turns]


def check_paths(trajectory: Trajectory) -> None:
    """Parents come first, and the turns of a path are its sequence without gaps."""
    for place, turn in enumerate(trajectory.turns):
        assert turn.parent is None or turn.parent < place
        assert turn.start == (0 if turn.parent is None else trajectory.turns[turn.parent].end)
        assert (turn.role is TurnRole.PROMPT) <= (turn.parent is None)
    for sequence in trajectory.sequences:
        assert list(sequence.path) == trajectory.path_to(sequence.path[-1])
        joined = np.concatenate([trajectory.turns[place].ids for place in sequence.path])
        assert joined.tolist() == sequence.input_ids.tolist()


def check_views(trajectory: Trajectory, place: int, sequence: TokenSequence) -> None:
    turn = trajectory.turns[place]
    for column, whole in (
        (turn.ids, sequence.input_ids),
        (turn.loss_mask, sequence.loss_mask),
        (turn.logprobs, sequence.logprobs),
        (turn.versions, sequence.versions),
    ):
        assert column is not None and whole is not None
        assert np.shares_memory(column, whole)
        assert column.tolist() == whole[turn.start : turn.end].tolist()


FIRST = call([1, 2], [11, 12], "first", started=5.0, latency=0.5, stop_reason="length")
SECOND = call([1, 2, 11, 12, 3], [21], "second", started=6.0)


class TestCallsOfInteractions:
    def test_a_conversation_is_a_chain_of_turns_that_share_memory_with_its_sequence(self) -> None:
        leaf = interaction(SECOND, interaction(FIRST))
        trajectory = trajectory_of({"a": leaf}, [FIRST, SECOND], member_idx=3)
        (sequence,) = trajectory.sequences
        assert shape(trajectory) == [
            ("prompt", None, 0, [1, 2], [False, False]),
            ("assistant", 0, 2, [11, 12], [True, True]),
            ("environment", 1, 4, [3], [False]),
            ("assistant", 2, 5, [21], [True]),
        ]
        assert (sequence.path, sequence.turn_idx, sequence.reward) == ((0, 1, 2, 3), 1, 1.0)
        assert (trajectory.member_idx, trajectory.status, trajectory.reward) == (3, "accepted", 1.0)
        assert (trajectory.prompt_len(sequence.path), trajectory.num_sampled_tokens) == (2, 3)
        assert sequence.logprobs is not None and sequence.versions is not None
        assert sequence.logprobs.tolist() == [0, 0, -11 / 8, -12 / 8, 0, -21 / 8]
        assert sequence.versions.tolist() == [-1, -1, 3, 0, -1, 1]
        assert (trajectory.trained_versions(), sequence.staleness(5)) == ((0, 3), 5)
        check_paths(trajectory)
        for place in sequence.path:
            check_views(trajectory, place, sequence)
        first = trajectory.turns[1]
        assert (first.stop_reason, first.started, first.latency_s) == ("length", 5.0, 0.5)
        assert trajectory.turns[0].stop_reason is None

    def test_a_fork_trains_its_shared_prefix_once(self) -> None:
        other = call([1, 2, 11, 12, 4], [31, 32], "other")
        trained = interaction(SECOND, interaction(FIRST))
        forked = interaction(other, interaction(FIRST, trained=False))
        for order in ({"a": trained, "b": forked}, {"b": forked, "a": trained}):
            trajectory = trajectory_of(order, [FIRST, SECOND, other])
            check_paths(trajectory)
            by_last = {int(s.input_ids[-1]): s for s in trajectory.sequences}
            assert by_last[21].loss_mask.tolist() == [False, False, True, True, False, True]
            assert by_last[32].loss_mask.tolist() == [False, False, False, False, False, True, True]
            assert [s.turn_idx for s in trajectory.sequences] == [1, 1]
            assert by_last[21].path[:2] == by_last[32].path[:2] == (0, 1)
            assert len(trajectory.turns) == 6
            assert trajectory.turns[1].loss_mask.all()  # the turn is that of the sequence that trains it
            check_views(trajectory, 1, by_last[21])
            assert trajectory.num_sampled_tokens == 5

    def test_individual_answers_keep_their_turn_index_and_reward(self) -> None:
        root = interaction(FIRST, concat=False, reward=0.5)
        trajectory = trajectory_of({"a": root, "b": interaction(SECOND, root, concat=False)}, [FIRST, SECOND])
        check_paths(trajectory)
        assert [s.path for s in trajectory.sequences] == [(0, 1), (0, 1, 2, 3)]
        assert [s.turn_idx for s in trajectory.sequences] == [0, 1]
        assert [s.loss_mask.sum() for s in trajectory.sequences] == [2, 1]
        assert [s.reward for s in trajectory.sequences] == [0.5, 1.0]
        assert trajectory.reward == 1.5

    @pytest.mark.parametrize("rid", ["", "one id for every request"])
    def test_equal_answers_to_one_prompt_stay_different_turns(self, rid: str) -> None:
        calls = [call([1, 2], [11], rid, started=float(n) if rid else 0.0) for n in range(3)]
        trajectory = trajectory_of({str(n): interaction(c) for n, c in enumerate(calls)}, calls)
        assert [s.path for s in trajectory.sequences] == [(0, 1), (0, 2), (0, 3)]
        assert [t.parent for t in trajectory.turns] == [None, 0, 0, 0]
        assert trajectory.num_sampled_tokens == 3

    def test_an_empty_answer_is_a_turn_and_trains_nothing(self) -> None:
        trajectory = trajectory_of({"a": interaction(call([1], []))}, [])
        assert shape(trajectory) == [("prompt", None, 0, [1], [False]), ("assistant", 0, 1, [], [])]
        assert trajectory.trained_versions() is None

    @pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), -float("inf"), 1e39])
    def test_an_interaction_needs_a_reward_that_is_finite_in_float32(self, reward: float | None) -> None:
        with pytest.raises(ValueError, match="interaction a has the reward .* with set_reward") as caught:
            trajectory_of({"a": interaction(FIRST, reward=reward)}, [])
        assert Failure.of(caught.value).kind == "output"


class TestCallsOfTensorDicts:
    def test_a_sequence_is_matched_with_its_calls_by_tokens(self) -> None:
        tensors = rows(
            [1, 2, 11, 12, 3, 21],
            masks=[[0, 0, 1, 1, 0, 1]],
            logprobs=torch.tensor([[0, 0, -1.0, -2.0, 0, -3.0]]),
            versions=torch.tensor([[-1, -1, 3, 3, -1, 4]]),
            rewards=torch.tensor([2.0]),
        )
        stranger = call([1, 2, 11, 99, 3], [21], "stranger")
        trajectory = trajectory_of(tensors, [FIRST, stranger, SECOND])
        (sequence,) = trajectory.sequences
        assert sequence.path == (0, 1, 2, 3)
        for place in sequence.path:
            check_views(trajectory, place, sequence)
        assert np.shares_memory(sequence.input_ids, tensors["input_ids"].numpy())
        assert trajectory.turns[1].latency_s == 0.5
        assert trajectory.turns[3].started == 6.0
        assert shape(trajectory)[4:] == [  # the call that no sequence holds
            ("prompt", None, 0, [1, 2, 11, 99, 3], [False] * 5),
            ("assistant", 4, 5, [21], [False]),
        ]
        lost = trajectory.turns[5]
        assert lost.logprobs is not None and lost.versions is not None
        assert (lost.logprobs.tolist(), lost.versions.tolist()) == ([-21 / 8], [1])

    def test_a_call_that_no_sequence_holds_follows_the_longest_call_it_extends(self) -> None:
        third = call([1, 2, 11, 12, 3, 21, 4, 5], [31], "third")
        trajectory = trajectory_of(rows([1, 2, 11, 12], masks=[[0, 0, 1, 1]]), [FIRST, SECOND, third])
        assert shape(trajectory) == [
            ("prompt", None, 0, [1, 2], [False, False]),
            ("assistant", 0, 2, [11, 12], [True, True]),
            ("environment", 1, 4, [3], [False]),
            ("assistant", 2, 5, [21], [False]),
            ("environment", 3, 6, [4, 5], [False, False]),
            ("assistant", 4, 8, [31], [False]),
        ]
        check_paths(trajectory)

    def test_a_call_without_an_answer_is_not_on_a_sequences_path(self) -> None:
        trajectory = trajectory_of(rows([1, 2, 11, 12], masks=[[0, 0, 1, 1]]), [call([1, 2], [], "none"), FIRST])
        assert trajectory.sequences[0].path == (0, 1)
        assert [(t.parent, len(t.ids)) for t in trajectory.turns] == [(None, 2), (0, 2), (0, 0)]

    def test_the_longest_call_counts_whichever_ended_last(self) -> None:
        calls = [call([1], [2, 3], "long"), call([1], [2], "short"), call([1, 2, 3, 4], [5], "next")]
        trajectory = unfinished_trajectory(calls, member_idx=0, status=EpisodeStatus.FAILED)
        assert [t.parent for t in trajectory.turns] == [None, 0, 0, 1, 3]
        check_paths(trajectory)

    def test_an_unused_answer_to_the_same_prompt_shares_it(self) -> None:
        """Best of two: the prompt of the answer that is left out is not a second conversation."""
        worse = call([1, 2], [13], "worse")
        for ids in (torch.int32, torch.int64):
            tensors = rows([1, 2, 11, 12], masks=[[0, 0, 1, 1]])
            tensors["input_ids"] = tensors["input_ids"].to(ids)
            trajectory = trajectory_of(tensors, [worse, FIRST])
            assert [(t.role, t.parent) for t in trajectory.turns] == [
                ("prompt", None),
                ("assistant", 0),
                ("assistant", 0),
            ]
            assert trajectory.turns[2].ids.tolist() == [13]

    def test_equal_sequences_take_a_call_each(self) -> None:
        calls = [call([1, 2], [11, 12], f"call {n}", started=float(n)) for n in range(2)]
        same = [1, 2, 11, 12]
        trajectory = trajectory_of(rows(same, same, same, masks=[[0, 0, 1, 1]] * 3), calls)
        first, second, third = (s.path for s in trajectory.sequences)
        assert (first, second) == ((0, 1), (0, 2)) and third in (first, second)
        assert [t.started for t in trajectory.turns] == [None, 0.0, 1.0]

    def test_missing_log_probs_are_filled_in_from_the_calls(self) -> None:
        trajectory = trajectory_of(rows([1, 2, 11, 12], masks=[[0, 0, 1, 1]]), [FIRST])
        prompt, answer = trajectory.turns
        assert prompt.logprobs is None and answer.logprobs is not None and answer.versions is not None
        assert (answer.logprobs.tolist(), answer.versions.tolist()) == ([-11 / 8, -12 / 8], [3, 0])
        assert trajectory.sequences[0].logprobs is None

    def test_a_partly_trained_answer_is_one_turn(self) -> None:
        trajectory = trajectory_of(rows([1, 2, 11, 12], masks=[[0, 0, 0, 1]]), [FIRST])
        assert shape(trajectory)[1] == ("assistant", 0, 2, [11, 12], [False, True])
        (sequence,) = trajectory.sequences
        assert (sequence.num_trained_tokens, trajectory.prompt_len(sequence.path)) == (1, 2)

    def test_sequences_without_matching_calls_are_split_by_their_mask(self) -> None:
        first, second = [1, 2, 11, 12, 3, 21], [1, 2, 11, 12, 4, 5]
        trajectory = trajectory_of(rows(first, second, masks=[[0, 0, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0]]), [])
        assert shape(trajectory) == [
            ("prompt", None, 0, [1, 2], [False, False]),
            ("assistant", 0, 2, [11, 12], [True, True]),
            ("environment", 1, 4, [3], [False]),
            ("assistant", 2, 5, [21], [True]),
            ("environment", 1, 4, [4, 5], [False, False]),
        ]
        assert [(s.path, s.turn_idx) for s in trajectory.sequences] == [((0, 1, 2, 3), 1), ((0, 1, 4), 0)]
        assert trajectory.reward is None
        check_paths(trajectory)

    def test_equal_tokens_in_prompt_and_answer_are_different_turns(self) -> None:
        trajectory = trajectory_of(rows([1, 11], [1, 11], masks=[[0, 1], [0, 0]]), [])
        assert [(s.path, s.turn_idx) for s in trajectory.sequences] == [((0, 1), 0), ((2,), 0)]
        assert trajectory.prompt_len(trajectory.sequences[1].path) == 2

    def test_padding_on_either_side_is_removed(self) -> None:
        tensors = {
            "input_ids": torch.tensor([[0, 0, 1, 11], [1, 2, 12, 0]]),
            "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]),
            "loss_mask": torch.tensor([[0, 0, 0, 1], [0, 0, 1, 0]]),
            "versions": torch.tensor([[-1, -1, -1, 7], [-1, -1, 5, -1]]),
            "rewards": torch.tensor([1.0, 4.0]),
        }
        trajectory = trajectory_of(tensors, [])
        assert [s.input_ids.tolist() for s in trajectory.sequences] == [[1, 11], [1, 2, 12]]
        assert [s.trained_versions() for s in trajectory.sequences] == [(7, 7), (5, 5)]
        assert (trajectory.trained_versions(), trajectory.reward) == ((5, 7), 5.0)
        for sequence in trajectory.sequences:
            turn = trajectory.turns[sequence.path[-1]]
            assert np.shares_memory(turn.ids, sequence.input_ids)

    def test_without_a_loss_mask_nothing_trains_and_calls_are_still_turns(self) -> None:
        tensors = rows([1, 2, 11, 12], masks=[[0, 0, 1, 1]])
        del tensors["loss_mask"]
        trajectory = trajectory_of(tensors, [FIRST])
        assert not trajectory.has_loss_mask and not trajectory.sequences[0].loss_mask.any()
        assert [t.role for t in trajectory.turns] == ["prompt", "assistant"]
        view = tensor_dict_of([trajectory])
        assert view is not None and "loss_mask" not in view

    def test_the_first_token_cannot_train(self) -> None:
        with pytest.raises(ValueError, match="^loss_mask is True at the first token") as caught:
            trajectory_of(rows([1, 11], masks=[[1, 1]]), [])
        assert Failure.of(caught.value).kind == "output"


class TestNothingReturned:
    def test_none_rejects_an_episode_and_keeps_its_calls(self) -> None:
        trajectory = trajectory_of(None, [FIRST, SECOND])
        assert (trajectory.status, trajectory.sequences, trajectory.reward) == ("rejected", [], None)
        assert [t.parent for t in trajectory.turns] == [None, 0, 1, 2]
        assert tensor_dict_of([trajectory]) is None

    def test_a_failed_episode_keeps_its_calls_and_trains_nothing(self) -> None:
        other = call([1, 2, 9], [31], "other")
        trajectory = unfinished_trajectory([FIRST, SECOND, other], member_idx=2, status=EpisodeStatus.FAILED)
        assert (trajectory.member_idx, trajectory.status, trajectory.sequences) == (2, "failed", [])
        assert [(t.role, t.parent) for t in trajectory.turns[4:]] == [("prompt", None), ("assistant", 4)]
        assert not any(t.loss_mask.any() for t in trajectory.turns)
        assert trajectory.path_to(5) == [4, 5]
        assert trajectory.trained_versions() is None

    @pytest.mark.parametrize("returned", [3, {}, [FIRST], {"a": FIRST}])
    def test_anything_else_breaks_the_contract(self, returned: Any) -> None:
        with pytest.raises(ValueError) as caught:
            trajectory_of(returned, [])
        assert Failure.of(caught.value).kind == "output"


# -- the view ----------------------------------------------------------------------------------------------


@st.composite
def tensor_dicts(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    width, count = max(lengths), len(lengths)
    present = torch.arange(width) < torch.tensor(lengths)[:, None]

    def column(values: st.SearchStrategy[Any], padding: Any, dtype: torch.dtype) -> torch.Tensor:
        drawn = draw(st.lists(values, min_size=width * count, max_size=width * count))
        return torch.where(present, torch.tensor(drawn, dtype=dtype).view(count, width), padding)

    mask = column(st.integers(0, 1), 0, torch.int32)
    mask[:, 0] = 0
    versions = column(st.integers(-1, 9), -1, torch.int32)
    tensors = {
        "input_ids": column(st.integers(0, 3), 0, torch.int32),
        "attention_mask": present,
        "loss_mask": mask,
        "logprobs": column(st.floats(-9, 0, width=32), 0, torch.float32),
        "versions": torch.where(mask.bool(), versions.clamp(min=0), versions),  # -1: no trained token
        "rewards": torch.tensor(draw(st.lists(st.floats(-9, 9, width=32), min_size=count, max_size=count))),
        "names": [f"row {row}" for row in range(count)],
        "scores": torch.rand(count, 2),
        "kind": "extra",
    }
    optional = ["loss_mask", "logprobs", "versions", "rewards", "names", "scores", "kind"]
    left_out = draw(st.sets(st.sampled_from(optional)))
    return {key: value for key, value in tensors.items() if key not in left_out}


@given(tensor_dicts(), st.integers(0, 4))
def test_a_tensor_dict_survives_the_round_trip_through_a_trajectory(tensors: dict[str, Any], num_calls: int) -> None:
    calls = []
    for row in range(min(num_calls, len(tensors["input_ids"]))):
        ids = tensors["input_ids"][row, : int(tensors["attention_mask"][row].sum())].tolist()
        calls.append(call(ids[: len(ids) // 2], ids[len(ids) // 2 :], started=float(row)))
    trajectory = trajectory_of(tensors, calls)
    check_paths(trajectory)
    view = tensor_dict_of([trajectory])
    assert view is not None and view.keys() == tensors.keys()
    for key, value in tensors.items():
        if isinstance(value, torch.Tensor):
            assert view[key].dtype == value.dtype, key
            assert torch.equal(view[key], value), key
        else:
            assert view[key] == value, key


@given(st.lists(tensor_dicts(), min_size=1, max_size=3))
def test_the_view_of_a_group_concatenates_its_episodes_and_splits_again(
    episodes: list[dict[str, Any]],
) -> None:
    view = tensor_dict_of([trajectory_of(tensors, []) for tensors in episodes])
    assert view is not None
    counts = [len(tensors["input_ids"]) for tensors in episodes]
    assert len(view["input_ids"]) == sum(counts)
    for key in ("loss_mask", "logprobs", "versions", "rewards"):
        assert (key in view) == all(key in tensors for tensors in episodes)
    for part, tensors in zip(split_rows(view, counts), episodes, strict=True):
        assert part is not None
        width = tensors["input_ids"].shape[1]
        for key in view.keys() & {"input_ids", "attention_mask", "loss_mask", "logprobs", "versions"}:
            assert torch.equal(part[key][:, :width], tensors[key])
            padding = -1 if key == "versions" else 0
            assert (part[key][:, width:] == padding).all()


def test_other_keys_are_kept_if_every_episode_has_them() -> None:
    first = rows([1, 11], masks=[[0, 1]], note=["a"], image=torch.ones(1, 2))
    second = rows([1, 12, 13], masks=[[0, 1, 1]], note=["b"], image=torch.ones(1, 3))
    view = tensor_dict_of([trajectory_of(first, []), trajectory_of(None, []), trajectory_of(second, [])])
    assert view is not None
    assert view["note"] == ["a", "b"]
    assert view["image"].tolist() == [[1, 1, 0], [1, 1, 1]]
    del second["note"]
    view = tensor_dict_of([trajectory_of(first, []), trajectory_of(second, [])])
    assert view is not None and not {"note", "image"} & view.keys()


def test_the_view_has_areals_dtypes() -> None:
    tensors = rows([1, 11], masks=[[0, 1]], logprobs=torch.zeros(1, 2, dtype=torch.float64))
    view = tensor_dict_of([trajectory_of({**tensors, "loss_mask": tensors["loss_mask"].bool()}, [])])
    assert view is not None
    assert {key: str(value.dtype) for key, value in view.items()} == {
        "input_ids": "torch.int32",
        "attention_mask": "torch.bool",
        "loss_mask": "torch.int32",
        "logprobs": "torch.float32",
    }


def test_surplus_sequences_belong_to_the_last_episode_and_dropped_episodes_have_none() -> None:
    tensors = rows([1], [2], [3], masks=[[0]] * 3, names=["a", "b", "c"], kind="x")
    parts = split_rows(tensors, [1, 0, 1])
    assert [None if p is None else (p["names"], p["kind"]) for p in parts] == [
        (["a"], "x"),
        None,
        (["b", "c"], "x"),
    ]
    assert [None if p is None else p["names"] for p in split_rows(tensors, [3, 1])] == [["a", "b", "c"], None]
    named = {key: interaction(FIRST) for key in "ab"}
    assert [list(p or ()) for p in split_rows(named, [1, 1])] == [["a"], ["b"]]


# -- records -----------------------------------------------------------------------------------------------


def sequence_of(mask: list[int], **columns: Any) -> TokenSequence:
    return TokenSequence(input_ids=np.arange(len(mask)), loss_mask=np.array(mask, np.bool_), **columns)


class TestTokenSequence:
    def test_columns_have_one_entry_per_token(self) -> None:
        for name in ("logprobs", "versions"):
            with pytest.raises(ValueError, match=f"task 7: {name} has 1 entries but input_ids has 2"):
                sequence_of([0, 1], task_id="7", **{name: np.zeros(1)})
        with pytest.raises(ValueError, match="loss_mask has 3 entries but input_ids has 2"):
            TokenSequence(input_ids=np.arange(2), loss_mask=np.zeros(3, np.bool_))

    def test_versions_count_trained_tokens_only(self) -> None:
        sequence = sequence_of([0, 1, 0, 1, 1], versions=np.array([1, 5, 2, -1, 4]))
        assert (len(sequence), sequence.num_trained_tokens) == (5, 3)
        assert (sequence.trained_versions(), sequence.staleness(6)) == ((4, 5), 2)
        for unknown in (None, np.array([3, -1, 3, -1, -1])):
            sequence = sequence_of([0, 1, 0, 1, 1], versions=unknown)
            assert sequence.trained_versions() is None and sequence.staleness(6) is None
        assert sequence_of([0, 0], versions=np.array([1, 2])).trained_versions() is None


def episode(member_idx: int, status: EpisodeStatus, *sequences: TokenSequence, **fields: Any) -> Trajectory:
    return Trajectory(member_idx=member_idx, status=status, sequences=list(sequences), **fields)


def group_of(*trajectories: Trajectory, **fields: Any) -> Group:
    named = {"task_id": 5, "group_id": "g", "status": EpisodeStatus.ACCEPTED, "data": {}}
    return Group(trajectories=list(trajectories), **(named | fields))


class TestGroup:
    def test_a_groups_versions_and_rewards_come_from_its_episodes(self) -> None:
        group = group_of(
            episode(0, EpisodeStatus.ACCEPTED, sequence_of([0, 1], versions=np.array([-1, 6])), reward=1.0),
            episode(1, EpisodeStatus.FAILED, reward=9.0),
            episode(2, EpisodeStatus.ACCEPTED, sequence_of([0, 1], versions=np.array([-1, 3])), reward=0.0),
            episode(3, EpisodeStatus.ACCEPTED, sequence_of([0, 1])),
        )
        assert (group.head_version, group.tail_version, group.rewards) == (3, 6, [1.0, 0.0])
        assert len(group.sequences) == 3
        group.trajectories[2].sequences.clear()
        group.note_versions()
        assert (group.head_version, group.tail_version) == (6, 6)
        assert (group_of().head_version, group_of().tail_version) == (None, None)

    def test_ids_and_status_are_set_on_episodes_unless_they_ended_differently(self) -> None:
        broken = Failure(FailureKind.AGENT, "KeyError", "no key")
        kept = episode(1, EpisodeStatus.ACCEPTED, sequence_of([0, 1]))
        group = group_of(kept, episode(0, EpisodeStatus.FAILED, failure=broken))
        assert kept.status == "accepted"
        assert [(s.task_id, s.group_id, s.member_idx) for s in kept.sequences] == [("5", "g", 1)]
        group.end_as(EpisodeStatus.REJECTED, rejection="stale")
        assert [t.status for t in group.trajectories] == ["rejected", "failed"]
        assert [t.failure for t in group.trajectories] == [None, broken]
        assert (group.status, group.error, group.failure) == ("rejected", "stale", None)

    def test_a_stopped_group_passes_its_failure_on(self) -> None:
        group = group_of(episode(0, EpisodeStatus.ACCEPTED, sequence_of([0, 1])))
        group.end_as(EpisodeStatus.CANCELLED, failure=Failure.cancelled("the run ended"))
        assert (group.error, group.trajectories[0].status) == ("the run ended", "cancelled")
        assert group.trajectories[0].failure is group.failure

    def test_error_is_the_traceback_of_a_failure_and_none_for_accepted_groups(self) -> None:
        failure = Failure(FailureKind.ENGINE, "ServerError", "down", "Traceback: down")
        assert group_of(failure=failure).error == "Traceback: down"
        assert group_of().error is None

    def test_the_tensor_dict_is_made_on_first_access(self) -> None:
        group = group_of(trajectory_of(rows([1, 11], masks=[[0, 1]]), []), trajectory_of(None, []))
        assert group.trajectory is not None
        assert group.trajectory["input_ids"].tolist() == [[1, 11]]
        assert group_of().trajectory is None


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        (TurnRewards(), 1.75),
        (TurnRewards(discount=0.5), 1.5 + 0.5 * 0.25),  # the answer without a reward is no turn
        (TurnRewards("mean"), 0.875),
        (TurnRewards("mean", 0.5), 0.875),
        (TurnRewards("last"), 0.25),
    ],
)
def test_rewards_of_turns_are_joined_by_the_rule(by: TurnRewards, expected: float) -> None:
    trajectory = episode(0, EpisodeStatus.ACCEPTED, *(sequence_of([0, 1], reward=r) for r in (1.5, None, 0.25)))
    trajectory.join_rewards(by)
    assert trajectory.reward == expected
    trajectory.sequences.clear()
    trajectory.join_rewards(by)
    assert trajectory.reward is None


@pytest.mark.parametrize("rule", ["sum", "mean", "last"])
def test_sequences_that_share_a_reward_have_it_once(rule: Any) -> None:
    """An agent's one reward is that of each conversation; rows of a tensor dict with equal rewards share it."""
    shared = [interaction(each, reward=0.5, episode_reward=0.5) for each in (FIRST, call([3], [13]))]
    for returned in (
        {str(number): each for number, each in enumerate(shared)},
        rows([1, 11], [1, 12], masks=[[0, 1], [0, 1]], rewards=torch.tensor([0.5, 0.5])),
    ):
        trajectory = trajectory_of(returned, [])
        trajectory.join_rewards(TurnRewards(rule, 0.5))
        assert trajectory.reward == 0.5


def test_a_workflow_may_say_the_reward_of_the_episode() -> None:
    """Two turns that earned 1 each; without the key, equal rewards would be one reward."""
    own = rows([1, 11], [1, 11, 12], masks=[[0, 1, 0], [0, 0, 1]], rewards=torch.tensor([1.0, 1.0]))
    assert trajectory_of(own, []).reward == 1.0
    assert trajectory_of(own | {"episode_rewards": torch.tensor([2.0, 2.0])}, []).reward == 2.0
    with pytest.raises(ValueError, match=r"episode_rewards has shape \[1\]: it must be \[2\]"):
        trajectory_of(own | {"episode_rewards": torch.tensor([2.0])}, [])


def test_rewards_that_hold_later_ones_are_not_summed_again() -> None:
    """As after apply_reward_discount: returns 1.5 and 1 of the rewards 1 and 1 at a discount of 0.5."""
    root = interaction(FIRST, concat=False, reward=1.5, episode_reward=1.5)
    leaf = interaction(SECOND, root, concat=False, reward=1.0, episode_reward=1.5)
    as_tensors = concat_padded_tensors([root.to_tensor_dict(), leaf.to_tensor_dict()])
    for returned in ({"a": root, "b": leaf}, as_tensors):
        assert trajectory_of(returned, [FIRST, SECOND]).reward == 1.5


def test_a_group_tells_its_sequences_the_reward_of_their_episode() -> None:
    returned = {"a": interaction(FIRST, concat=False, reward=0.5), "b": interaction(SECOND, concat=False, reward=1.0)}
    group = group_of(trajectory_of(returned, [FIRST, SECOND]))
    assert [(s.reward, s.score) for s in group.sequences] == [(0.5, 1.5), (1.0, 1.5)]
    assert group.rewards == [1.5]


def test_a_turn_ends_after_its_own_tokens_and_all_before_it() -> None:
    turn = Turn(role=TurnRole.PROMPT, start=3, ids=np.arange(4), loss_mask=np.zeros(4, np.bool_))
    assert turn.end == 7


def test_a_handmade_group_trains_like_one_from_the_engine() -> None:
    turns = [Turn(role=TurnRole.PROMPT, ids=np.arange(2), loss_mask=np.zeros(2, np.bool_))]
    trajectory = Trajectory(
        member_idx=3, status=EpisodeStatus.ACCEPTED, made_turns=turns, sequences=[sequence_of([0, 1])], reward=0.5
    )
    group = group_of(trajectory)
    assert trajectory.turns is turns
    (sequence,) = group.sequences
    assert (sequence.group_id, sequence.member_idx, sequence.reward, sequence.path) == ("g", 3, 0.5, ())
    with pytest.raises(AttributeError, match="no attribute 'turn'"):
        trajectory.turn  # noqa: B018
