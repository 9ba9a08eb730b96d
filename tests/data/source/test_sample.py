"""Tokens, mask, log-probs and versions stay aligned whatever is appended; records survive JSON."""

import json
import math
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.data.source.sample import Sample, Span, with_own_containers

IDS = st.lists(st.integers(0, 99), max_size=5)
APPENDS = st.lists(st.tuples(IDS, st.booleans(), st.booleans(), st.booleans(), st.booleans()), max_size=6)


def filled(appends):
    sample = Sample(3, group_index=1, row={"q": ["a"]}, prompt="p", label="l", metadata={"m": 1})
    for ids, sampled, logprobs, versions, trained in appends:
        sample.append(
            ids,
            logprobs=[-1.5] * len(ids) if sampled and logprobs else None,
            versions=[7] * len(ids) if sampled and versions else None,
            sampled=sampled,
            trained=trained if sampled else None,
        )
    return sample


@given(APPENDS)
def test_columns_have_equal_length_after_every_append(appends):
    sample = filled(appends)
    tokens = [token for ids, *_ in appends for token in ids]
    assert list(sample.tokens) == tokens
    assert {len(c) for c in (sample.loss_mask, sample.logprobs, sample.versions)} == {len(tokens)}
    sampled = [s for ids, s, *_ in appends for _ in ids]
    trained = [s and t for ids, s, *_, t in appends for _ in ids]
    assert [bool(value) for value in sample.loss_mask] == trained
    in_spans = [any(span.start <= i < span.end for span in sample.spans) for i in range(len(tokens))]
    assert in_spans == sampled


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1, 2], "logprobs": [-1.0], "sampled": True}, "logprobs has 1 entries for 2 tokens"),
        ({"tokens": [1], "versions": [1, 2], "sampled": True}, "versions has 2 entries for 1 tokens"),
        ({"tokens": [1], "logprobs": [math.nan], "sampled": True}, "must be finite"),
        ({"tokens": [-1]}, "an int from 0"),
        ({"tokens": [True]}, "an int from 0"),
        ({"tokens": [1], "logprobs": [-1.0]}, "only sampled tokens"),
        ({"tokens": [1], "trained": True}, "only sampled tokens"),
        ({"tokens": [1], "versions": [1]}, "only sampled tokens"),
    ],
)
def test_a_bad_append_changes_nothing(arguments, message):
    sample = filled([([1, 2], True, True, True, True)])
    before = sample.to_dict()
    with pytest.raises(ValueError, match=message):
        sample.append(**arguments)
    assert sample.to_dict() == before


@given(APPENDS)
def test_s13_to_dict_and_from_dict_are_inverse_through_json(appends):
    sample = filled(appends)
    sample.reward, sample.status = {"acc": 1.0}, Sample.Status.ABORTED
    sample.response, sample.attempts = "the answer", 2
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again.to_dict() == sample.to_dict()
    assert again.spans == sample.spans
    assert again.status is Sample.Status.ABORTED


def test_s11_defaults_are_pending_and_empty():
    sample = Sample()
    assert (sample.index, sample.prompt, list(sample.tokens), sample.response) == (None, "", [], "")
    assert (sample.response_length, sample.label, sample.reward, sample.metadata) == (0, None, None, {})
    assert sample.status is Sample.Status.PENDING
    assert sample.attempts == 0
    assert Sample.from_dict({}).to_dict() == sample.to_dict()


def test_s12_the_statuses_have_their_string_values():
    values = {status.value for status in Sample.Status}
    assert {"pending", "completed", "truncated", "aborted"} <= values


def test_sb14_from_dict_keeps_unknown_keys_and_leaves_its_argument():
    record = {"index": 1, "status": "completed", "metadata": {"a": [1]}, "odd": 5, "response_length": 3}
    sample = Sample.from_dict(record)
    sample.metadata["a"].append(2)
    assert record == {"index": 1, "status": "completed", "metadata": {"a": [1]}, "odd": 5, "response_length": 3}
    assert sample.metadata == {"a": [1, 2], "odd": 5}


def test_sb14_to_dict_shares_nothing_with_the_sample():
    sample = Sample(row={"x": [1], "pixels": np.zeros(1)}, metadata={"a": [1]})
    sample.to_dict()["metadata"]["a"].append(2)
    sample.to_dict()["row"]["x"].append(2)
    sample.to_dict()["row"]["pixels"][0] = 1
    assert (sample.metadata, sample.row) == ({"a": [1]}, {"x": [1], "pixels": np.zeros(1)})


@pytest.mark.parametrize(
    "record",
    [
        {"tokens": [1]},
        {"tokens": [1], "loss_mask": [1], "logprobs": [0.0], "versions": [1], "spans": [[0, 2, "stop"]]},
    ],
)
def test_a_record_with_different_lengths_is_refused(record):
    with pytest.raises(ValueError, match="sample None: "):
        Sample.from_dict(record)


def test_s14_the_reward_is_a_number_or_an_entry():
    sample = Sample(4)
    sample.reward = 0.5
    assert sample.get_reward_value() == 0.5
    sample.reward = {"acc": 1}
    assert sample.get_reward_value("acc") == 1.0


@pytest.mark.parametrize(
    ("reward", "key"), [(None, None), (None, "acc"), (1.0, "acc"), ({"f1": 1.0}, "acc"), (math.nan, None)]
)
def test_sb15_a_missing_reward_is_named_with_index_and_key(reward, key):
    sample = Sample(4)
    sample.reward = reward
    with pytest.raises(ValueError, match=f"sample 4: the reward.*{key or ''}"):
        sample.get_reward_value(key)


def test_a_numpy_reward_is_a_number():
    sample = Sample()
    sample.reward = np.float32(0.5)
    assert sample.get_reward_value() == 0.5


def test_with_own_containers_copies_containers_and_shares_values():
    image = object()
    row = {"messages": [{"content": [image, 1]}], "n": 1}
    copy = with_own_containers(row)
    copy["messages"][0]["content"].append(2)
    copy["messages"].append(3)
    assert row == {"messages": [{"content": [image, 1]}], "n": 1}
    assert copy["messages"][0]["content"][0] is image


def test_reset_makes_a_sample_pending_again():
    sample = filled([([1, 2], True, True, True, True)])
    sample.reward = 1.0
    sample.reset()
    assert (sample.tokens, sample.spans, sample.reward, sample.status) == (
        [],
        [],
        None,
        Sample.Status.PENDING,
    )


def test_the_response_begins_at_the_first_sampled_token():
    sample = Sample()
    sample.append([1, 2])
    assert sample.response_length == 0
    sample.append([3], sampled=True, stop_reason="length")
    sample.append([4])
    assert sample.response_length == 2
    assert list(sample.spans) == [Span(2, 3, "length")]
    sample.append([5, 6], sampled=True)
    assert sample.response_length == 4  # over all turns


def test_a_sibling_shares_the_row_and_no_sampled_tokens():
    sample = filled([([1, 2], True, True, True, True)])
    sample.reward, sample.attempts, sample.mini_batch = 1.0, 2, (object(), 1)
    sample.row["q"].append("b")
    sibling = sample.sibling(9)
    assert (sibling.index, sibling.group_index, sibling.attempts) == (9, 1, 2)
    assert (sibling.row, sibling.prompt, sibling.metadata) == ({"q": ["a"]}, "p", {"m": 1})
    assert (sibling.tokens, sibling.reward, sibling.status) == ([], None, "pending")
    assert sibling.metadata is not sample.metadata
    assert sibling.mini_batch is sample.mini_batch


def test_a_sibling_has_its_own_messages_and_label():
    sample = Sample(prompt=[{"content": "p"}], label=["l"])
    sibling = sample.sibling(1)
    sibling.prompt[0]["content"] = "q"
    sibling.label.append("m")
    assert (sample.prompt, sample.label) == ([{"content": "p"}], ["l"])


@pytest.mark.parametrize("versions", [[0, 0], [3, 4], None])
def test_a_sequence_has_the_versions_that_were_recorded(versions):
    sample = Sample(7, group_index=2)
    sample.append([1])
    sample.append([2, 3], sampled=True, logprobs=[-0.5, -0.25], versions=versions)
    sample.reward = 1.0
    sequence = sample.to_sequence()
    found = None if sequence.versions is None else sequence.versions.tolist()
    assert found == (None if versions is None else [-1, *versions])
    assert sequence.logprobs.tolist() == [0.0, -0.5, -0.25]
    assert (sequence.group_id, sequence.member_idx, sequence.reward) == ("2", 7, 1.0)


def test_an_empty_record_is_a_new_sample():
    assert Sample.from_dict({}).to_dict() == Sample().to_dict()


@pytest.mark.parametrize(
    "spans", [[[0, 1, "stop"], [1, 3, "stop"]], [[0, 2, "stop"], [1, 2, "stop"]], [[-1, 1, "stop"]]]
)
def test_spans_that_overlap_or_leave_the_tokens_are_refused(spans):
    sample = Sample()
    sample.append([0, 1], sampled=True)
    assert Sample.from_dict(sample.to_dict()).spans == [Span(0, 2, "stop")]
    with pytest.raises(ValueError, match="does not fit 2 tokens"):
        Sample.from_dict(sample.to_dict() | {"spans": spans})


def test_of_a_sequence_only_a_trained_token_may_lack_its_log_prob():
    sample = Sample(4)
    sample.append([1])
    sample.append([2], sampled=True, trained=False)
    sample.append([3, 4], sampled=True, logprobs=[-0.5, -1.0])
    sample.append([5], sampled=True)
    sample.reward = 1.0
    sequence = sample.to_sequence()
    np.testing.assert_array_equal(sequence.logprobs, np.array([0, 0, -0.5, -1, np.nan], np.float32))
    assert (sequence.group_id, sequence.task_id, sequence.member_idx) == ("", "", 4)
    unrecorded = Sample()
    unrecorded.append([1])
    unrecorded.append([2], sampled=True)
    unrecorded.reward = 0.0
    assert unrecorded.to_sequence().logprobs is None
