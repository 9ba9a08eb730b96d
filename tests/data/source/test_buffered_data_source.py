"""Returned groups come first, in the order a filter chooses; a bad filter loses nothing."""

import math
import numpy as np
import orjson
import pytest
from areal_lite.data.source import buffered_data_source
from areal_lite.data.source.buffered_data_source import (
    RolloutDataSourceWithBuffer,
    pop_first,
)
from areal_lite.data.source.dynamic_filters import highest_reward_first
from areal_lite.data.source.rollout_data_source import restarted
from areal_lite.data.source.sample import Sample
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError


def make(size=9, members=1, **settings):
    return RolloutDataSourceWithBuffer(
        [{"n": n} for n in range(size)], SourceSettings(n_samples_per_prompt=members, **settings)
    )


def groups_with_rewards(source, *rewards):
    groups = source.get_samples(len(rewards))
    for group, reward in zip(groups, rewards, strict=True):
        group[0].reward = reward
    return groups


def drawn(source, count):
    return [group[0].row["n"] for group in source.get_samples(count)]


def deleting(source, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def too_many(source, rollout_id, buffer, num_samples):
    return buffer[: num_samples + 1]


def foreign(source, rollout_id, buffer, num_samples):
    return [[Sample(99, group_index=99)]]


def twice(source, rollout_id, buffer, num_samples):
    return [buffer[0], buffer[0]][:num_samples]


def expiring(source, rollout_id, buffer, num_samples):
    del buffer[0]
    return buffer[:num_samples]


def test_s20_the_default_filter_is_first_in_first_out():
    source = make()
    assert source.buffer_filter is pop_first
    groups = source.get_samples(3)
    source.add_samples([groups[2], groups[0]])
    assert drawn(source, 2) == [2, 0]


def test_s20_sb20_a_filter_is_a_function_or_its_path():
    path = "areal_lite.data.source.dynamic_filters.highest_reward_first"
    assert make(buffer_filter=path).buffer_filter is highest_reward_first
    assert make(buffer_filter=deleting).buffer_filter is deleting
    with pytest.raises(ConfigError, match="no module 'nowhere'"):
        make(buffer_filter="nowhere.filter")
    with pytest.raises(ConfigError, match="has no 'pop_frist'; did you mean .*pop_first"):
        make(buffer_filter="areal_lite.data.source.buffered_data_source.pop_frist")
    with pytest.raises(ConfigError, match="must be a function"):
        make(buffer_filter="areal_lite.data.source.buffered_data_source.math")


def test_s21_s26_the_buffer_comes_first_and_the_dataset_fills_up():
    source = make()
    groups = source.get_samples(2)
    source.add_samples(groups)
    assert drawn(source, 4) == [0, 1, 2, 3]
    assert source.sample_offset == 4


def test_s22_the_filter_is_not_called_for_zero_groups_or_an_empty_buffer():
    asked = []
    source = make(buffer_filter=lambda *arguments: asked.append(arguments) or [])
    source.get_samples(1)
    source.add_samples(source.get_samples(1))
    source.get_samples(0)
    assert asked == []
    source.get_samples(1)
    ((given, rollout_id, _, count),) = asked
    assert (given, rollout_id, count) == (source, None, 1)


def test_s23_pop_first_takes_at_most_what_the_buffer_has():
    buffer = [[Sample(0)], [Sample(1)]]
    taken = pop_first(None, None, buffer, 5)
    assert ([g[0].index for g in taken], buffer) == ([0, 1], [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("text", "must be a list of lists of Sample, got 'text'"),
        ([Sample(1)], r"'Sample'\]"),
        ([["no sample"]], r"holds \['str'\]"),
        ([[Sample(7)]], "group 1 has 1 members and n_samples_per_prompt is 2"),
        ([[]], "group 1 has 0 members"),
    ],
)
def test_s24_sb6_one_bad_group_refuses_the_whole_call(bad, message):
    source = make(members=2)
    good = source.get_samples(1)
    with pytest.raises(ValueError, match=message):
        source.add_samples(bad if isinstance(bad, str) else [*good, *bad])
    assert (source.get_buffer_length(), source.num_owed) == (0, 1)
    source.add_samples([])
    source.add_samples(good)
    assert source.get_buffer_length() == 1


def test_a_reward_that_is_not_finite_is_refused_with_group_and_sample():
    source = make()
    groups = groups_with_rewards(source, 1.0, math.nan)
    with pytest.raises(ValueError, match="group 1, sample 1: the reward is nan.*nothing was added"):
        source.add_samples(groups)
    for reward in ({"acc": math.inf}, np.float32("nan")):
        groups[1][0].reward = reward
        with pytest.raises(ValueError, match="group 1, sample 1"):
            source.add_samples(groups)
    assert source.get_buffer_length() == 0


def test_a_group_is_in_the_buffer_once():
    source = make()
    groups = source.get_samples(1)
    with pytest.raises(ValueError, match="group 0 is in the buffer already"):
        source.add_samples(groups * 2)
    source.add_samples(groups)
    with pytest.raises(ValueError, match="group 0 is in the buffer already"):
        source.add_samples(groups)
    source.add_samples(source.get_samples(1))
    assert source.get_buffer_length() == 1


def test_samples_that_share_an_index_are_one_member():
    source = make(members=2)
    ((first, second),) = source.get_samples(1)
    fan_out = Sample(first.index, group_index=first.group_index, position=first.position)
    source.add_samples([[first, fan_out, second]])
    assert len(source.get_samples(1)[0]) == 3


def test_s25_metadata_and_buffer_length():
    source = make()
    source.update_metadata({"a": 1})
    source.update_metadata({"b": 2})
    source.add_samples(source.get_samples(3))
    assert (source.get_metadata(), source.get_buffer_length()) == ({"a": 1, "b": 2}, 3)


def test_s27_surplus_groups_go_back_and_come_first():
    source = make()
    finished = source.get_samples(5)
    for group in finished:
        group[0].append([1, 2], sampled=True, versions=[0, 0], logprobs=[-1.0, -2.0])
        group[0].status = Sample.Status.COMPLETED
    source.mark_trained(finished[:3])
    source.add_samples(finished[3:])
    again = source.get_samples(2)
    assert [(g[0].status, list(g[0].tokens)) for g in again] == [("completed", [1, 2])] * 2


def test_s28_sb3_a_pure_filter_hands_each_group_out_once():
    source = make(buffer_filter=highest_reward_first)
    source.add_samples(groups_with_rewards(source, 0.1, np.float32(0.9), 0.5))
    assert drawn(source, 2) == [1, 2]
    assert source.get_buffer_length() == 1
    assert drawn(source, 1) == [0]
    assert source.get_buffer_length() == 0


def test_sb3_a_filter_that_deletes_hands_each_group_out_once():
    source = make(buffer_filter=deleting)
    source.add_samples(source.get_samples(3))
    assert drawn(source, 2) == [2, 1]
    assert source.get_buffer_length() == 1


def test_sb4_groups_without_a_reward_come_last():
    source = make(buffer_filter=highest_reward_first)
    source.add_samples(groups_with_rewards(source, None, -5.0, 0.2))
    assert drawn(source, 3) == [2, 1, 0]


def test_a_group_is_worth_the_mean_of_its_rewards():
    source = make(members=2, buffer_filter=highest_reward_first)
    groups = source.get_samples(3)
    for group, rewards in zip(groups, [(0.6, 0.6), (1.0, None), ({"acc": 9.0}, None)], strict=True):
        group[0].reward, group[1].reward = rewards
    source.add_samples(groups)
    assert drawn(source, 3) == [1, 0, 2]


@pytest.mark.parametrize("bad", [too_many, foreign, twice])
def test_sb5_a_filter_that_returns_wrong_groups_is_an_error_and_loses_nothing(bad):
    source = make(buffer_filter=bad)
    source.get_samples(3)
    source.add_samples([[Sample(i, group_index=i)] for i in range(3)])
    with pytest.raises(ValueError, match="the buffer filter returned"):
        source.get_samples(2)
    assert (source.get_buffer_length(), source.sample_offset) == (3, 3)


def test_a_filter_that_raises_loses_nothing():
    source = make(buffer_filter=lambda *_: 1 / 0)
    source.add_samples(source.get_samples(2))
    with pytest.raises(ZeroDivisionError):
        source.get_samples(1)
    assert source.get_buffer_length() == 2
    resumed = make(buffer_filter=lambda *_: 1 / 0)
    first, owed = make().get_samples(2)
    resumed.load_state_dict({"owed": [[sample.to_dict() for sample in owed]]})
    resumed.add_samples([first])
    with pytest.raises(ZeroDivisionError):
        resumed.get_samples(2)
    assert drawn(resumed, 1) == [1]


def test_a_filter_that_shrinks_a_group_is_refused():
    def thinning(source, rollout_id, buffer, num_samples):
        del buffer[0][1:]
        return buffer[:1]

    source = make(members=2, buffer_filter=thinning)
    source.add_samples(source.get_samples(1))
    with pytest.raises(ValueError, match="has 1 members and n_samples_per_prompt is 2"):
        source.get_samples(1)


def test_groups_that_a_filter_only_deletes_are_dropped_and_counted():
    source = make(buffer_filter=expiring)
    source.add_samples(source.get_samples(3))
    assert drawn(source, 1) == [1]
    assert source.get_buffer_length() == 1
    assert source.dropped == {"the buffer filter deleted it": 1}


def test_sb8_the_buffer_survives_a_restart_with_tokens_log_probs_and_versions(tmp_path):
    source = make(members=2)
    aborted, owed = source.get_samples(2)
    aborted[0].append([5, 6])
    aborted[0].append([7], sampled=True, logprobs=[-0.25], versions=[3], stop_reason="abort")
    aborted[0].status = Sample.Status.ABORTED
    source.give_back([aborted])
    source.save(1, tmp_path)
    resumed = make(members=2)
    resumed.load(1, tmp_path)
    first, second = resumed.get_samples(2)
    assert [s.to_dict() for s in first] == [s.to_dict() for s in owed]
    assert [s.to_dict() for s in second] == [s.to_dict() for s in aborted]
    assert drawn(resumed, 1) == [2]


def test_samples_without_an_index_each_get_one():
    source = make(members=3)
    source.get_samples(1)
    source.add_samples([[Sample(), Sample(), Sample()], [Sample(1), Sample(), Sample(), Sample(1)]])
    whole, mixed = source.get_samples(2)
    assert [sample.index for sample in restarted(whole)] == [3, 4, 5]
    assert [sample.index for sample in mixed] == [1, 6, 7, 1]


def test_the_number_of_an_added_group_is_not_reused():
    source = make()
    with pytest.raises(ValueError, match="is not numbered"):
        source.add_samples([[Sample(0)], [Sample(1, group_index="mine")]])
    assert source.get_buffer_length() == 0
    source.add_samples([[Sample(7, group_index=7)]])
    assert [group[0].group_index for group in source.get_samples(2)] == [7, 8]


def test_sb16_groups_without_a_number_get_one():
    source = make()
    source.add_samples([[Sample()], [Sample()]])
    groups = source.get_samples(3)
    assert len({group[0].group_index for group in groups}) == 3
    assert orjson.loads(orjson.dumps(source.state_dict()))["owed"][0][0]["position"] is None


def test_a_group_that_comes_and_goes_costs_the_same_in_a_large_buffer(monkeypatch):
    looked_at = []
    number_of = buffered_data_source.group_index_of
    monkeypatch.setattr(
        buffered_data_source, "group_index_of", lambda group: looked_at.append(group) or number_of(group)
    )
    source = make(1000)
    groups = source.get_samples(1000)
    for group in groups:
        source.give_back([group])
    buffer = source.buffer
    for _ in range(500):
        source.get_samples(1)
    assert len(looked_at) <= 3 * 1500
    assert source.buffer is buffer


def test_a_group_is_in_the_buffer_once_also_after_a_filter_or_a_restart():
    source = make(buffer_filter=deleting)
    groups = source.get_samples(4)
    source.add_samples(groups)
    assert len(source.get_samples(2)) == 2
    source.add_samples(groups[2:])
    again = make(buffer_filter=deleting)
    again.load_state_dict(source.state_dict())
    for one in (source, again):
        for group in list(one.buffer):
            with pytest.raises(ValueError, match="in the buffer already"):
                one.add_samples([group])
