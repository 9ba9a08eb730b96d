"""Each row comes once per epoch, over any sequence of draws, ends and restarts."""

import itertools
import json
import math
import random
import threading
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.rollout_data_source import RolloutDataSource, group_to_json
from areal_lite.data.source.row_streams import IterableRows
from areal_lite.data.source.sample import Sample, SampleStatus
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import CheckpointError, ConfigError, StorageError


def rows(size):
    return [{"n": n, "prompt": f"p{n}", "answer": str(n), "nested": {"list": [n]}} for n in range(size)]


def make(size=5, cls=RolloutDataSource, **settings):
    return cls(rows(size), SourceSettings(**({"seed": 1, "shuffle": True} | settings)))


def of_iterable(rows):
    return RolloutDataSource(IterableRows(rows, SourceSettings()))


def drawn(source, count):
    return [group[0].row["n"] for group in source.get_samples(count)]


def test_s1_a_new_source_starts_at_epoch_0():
    source = make()
    assert (source.epoch_id, source.sample_index, source.sample_offset, source.metadata) == (0, 0, 0, {})


def test_s2_prompt_and_label_come_from_their_columns():
    (group,) = make(1, label_key="answer").get_samples(1)
    assert (group[0].prompt, group[0].label) == ("p0", "0")


def test_s3_epoch_0_is_shuffled_too():
    assert drawn(make(50), 50) != list(range(50))
    assert drawn(make(50, shuffle=False), 50) == list(range(50))


def test_s4_s10_without_a_dataset_samples_are_empty_but_counted():
    source = RolloutDataSource(None, SourceSettings(n_samples_per_prompt=2))
    assert len(source) == 0
    groups = source.get_samples(3)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert all(s.row == {} and s.prompt == "" for group in groups for s in group)


def test_s5_a_request_gives_groups_of_n_samples_of_one_prompt():
    groups = make(4, n_samples_per_prompt=3).get_samples(2)
    assert [len(group) for group in groups] == [3, 3]
    assert all(len({s.row["n"] for s in group}) == 1 for group in groups)


def test_s6_an_exact_fit_does_not_roll_over():
    source = make(4)
    source.get_samples(4)
    assert (source.epoch_id, source.sample_offset) == (0, 4)
    source.get_samples(1)
    assert (source.epoch_id, source.sample_offset) == (1, 1)


def test_s7_the_tail_comes_first_then_the_head_of_the_next_epoch_reshuffled():
    source = make(30)
    first = drawn(source, 20)
    both = drawn(source, 20)
    assert sorted(first + both[:10]) == list(range(30))
    assert (source.epoch_id, source.sample_offset) == (1, 10)
    assert both[10:] == drawn_of_epoch_1(30)[:10]


def drawn_of_epoch_1(size):
    source = make(size)
    source.get_samples(size)
    return drawn(source, size)


def test_s8_no_sample_shares_anything_with_the_dataset_or_a_sibling():
    data = rows(1)
    (group,) = RolloutDataSource(data, SourceSettings(n_samples_per_prompt=3)).get_samples(1)
    group[0].row["nested"]["list"].append(9)
    group[0].row["n"] = 9
    assert data == rows(1)
    assert [s.row for s in group[1:]] == rows(1) * 2


def test_s9_the_index_counts_samples_over_epochs():
    source = make(2, n_samples_per_prompt=2)
    indices = [s.index for group in source.get_samples(5) for s in group]
    assert indices == list(range(10))


def test_s15_the_base_source_refuses_samples():
    source = make()
    with pytest.raises(RuntimeError, match="Cannot add samples to RolloutDataSource. This is a read-only data source"):
        source.add_samples(source.get_samples(1))


def test_sb7_a_source_says_whether_it_takes_samples():
    assert not RolloutDataSource.supports_buffer
    assert RolloutDataSourceWithBuffer.supports_buffer


def test_s16_s17_without_a_dataset_or_a_directory_nothing_is_saved_or_loaded(tmp_path):
    RolloutDataSource(None).save(1, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert RolloutDataSource(None, SourceSettings(shuffle=True)).load(1, tmp_path) is False  # S-B11 too
    assert make().load(1, None) is False
    with pytest.raises(ConfigError, match=r"save\(1\): no directory is given: pass one"):
        make().save(1)


def test_s16_s19_a_saved_step_is_loaded_by_its_number(tmp_path):
    source = make(7)
    source.mark_trained(source.get_samples(3))
    source.update_metadata({"note": [1]})
    source.save(4, tmp_path)
    assert (tmp_path / "rollout" / "global_dataset_state_dict_4.json").is_file()
    resumed = make(7)
    assert resumed.load(4, tmp_path) is True
    assert resumed.get_metadata() == {"note": [1]}
    assert [s[0].index for s in resumed.get_samples(2)] == [3, 4]


def test_s17_missing_keys_default_to_a_fresh_start():
    source = make(3)
    source.get_samples(2)
    source.load_state_dict({})
    assert (source.epoch_id, source.sample_offset, source.sample_index, source.metadata) == (0, 0, 0, {})
    assert source.get_samples(1)[0][0].group_index == 0


@given(size=st.integers(1, 5), before=st.integers(0, 12), shuffle=st.booleans())
def test_s18_the_order_after_a_load_is_that_of_the_saved_epoch(size, before, shuffle):
    source = make(size, shuffle=shuffle)
    source.mark_trained(source.get_samples(before))
    state = json.loads(json.dumps(source.state_dict()))
    resumed = make(size, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert drawn(resumed, 12) == drawn(source, 12)


@given(size=st.integers(1, 4), requests=st.lists(st.integers(0, 12), max_size=5), shuffle=st.booleans())
def test_sb1_every_epoch_gives_each_row_once_for_any_requests(size, requests, shuffle):
    source = make(size, shuffle=shuffle)
    seen = []
    for count in requests:
        got = drawn(source, count)
        assert len(got) == count
        assert 0 <= source.sample_offset <= size
        seen += got
    epochs = [seen[i : i + size] for i in range(0, len(seen), size)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs if len(epoch) == size)
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert source.epoch_id == max(0, -(-len(seen) // size) - 1)


def test_sb2_a_dataset_without_rows_is_refused():
    with pytest.raises(ConfigError, match="the dataset empty.jsonl has no rows"):
        RolloutDataSource([], SourceSettings(name="empty.jsonl"))


def test_sb10_the_order_depends_on_seed_and_epoch_only():
    state = random.getstate()
    first = drawn(make(50), 100)
    assert random.getstate() == state
    assert drawn(RolloutDataSource(rows(50), SourceSettings(shuffle=True)), 100) == first
    random.seed(7)
    assert drawn(make(50), 100) == first
    assert first[:50] != first[50:]
    assert drawn(make(50, seed=2), 50) != first[:50]
    second_epoch_of_1, first_epoch_of_2 = first[50:], drawn(make(50, seed=2), 50)
    assert second_epoch_of_1 != first_epoch_of_2


def test_sb12_a_missing_state_is_an_error_if_strict(tmp_path):
    with pytest.raises(CheckpointError, match="there is no data state .*_9.json"):
        make().load(9, tmp_path)
    assert make().load(9, tmp_path, strict=False) is False


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (make(6), "rows was 5 and is 6"),
        (make(seed=2), "seed was 1 and is 2"),
        (make(shuffle=False), "shuffle was True and is False"),
        (make(n_samples_per_prompt=2), "n_samples_per_prompt was 1 and is 2"),
        (make(name="b"), "dataset was '' and is 'b'"),
        (RolloutDataSource([{"n": -n} for n in range(5)], SourceSettings(seed=1, shuffle=True)), "content was"),
    ],
)
def test_sb13_a_state_of_other_data_is_refused_with_the_difference(other, said):
    with pytest.raises(ConfigError, match=f"made with other data: .*{said}"):
        other.load_state_dict(make().state_dict())


def test_a_source_without_a_name_takes_the_state_of_equal_rows_from_elsewhere():
    source = make(name="rows.jsonl")
    source.get_samples(2)
    moved = make()
    moved.load_state_dict(source.state_dict())
    assert moved.sample_offset == 2


def test_sb8_owed_groups_are_handed_out_first_after_a_restart(tmp_path):
    source = make(9, n_samples_per_prompt=2)
    trained, lost = source.get_samples(3), source.get_samples(2)
    source.mark_trained(trained)
    source.save(1, tmp_path)
    resumed = make(9, n_samples_per_prompt=2)
    resumed.load(1, tmp_path)
    again = resumed.get_samples(2)
    assert [[s.to_dict() for s in g] for g in again] == [[s.to_dict() for s in g] for g in lost]
    seen = {g[0].row["n"] for g in trained} | {g[0].row["n"] for g in again} | set(drawn(resumed, 4))
    assert seen == set(range(9))


def test_sb9_the_state_is_json_written_whole_or_not_at_all(tmp_path):
    source = make()
    source.save(1, tmp_path)
    path = tmp_path / "rollout" / "global_dataset_state_dict_1.json"
    before = path.read_bytes()
    assert orjson.loads(before)["schema"] == 1
    source.get_metadata()["bad"] = object()
    with pytest.raises(ConfigError, match="not JSON"):
        source.save(1, tmp_path)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_a_state_that_cannot_be_written_or_read_is_an_error(tmp_path):
    (tmp_path / "rollout").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="cannot be written"):
        make().save(1, tmp_path)
    broken = tmp_path / "b" / "rollout"
    broken.mkdir(parents=True)
    (broken / "global_dataset_state_dict_1.json").write_bytes(b'{"epoch_id": 1')
    with pytest.raises(CheckpointError, match="cannot be read"):
        make().load(1, tmp_path / "b")


def test_a_state_of_another_schema_is_refused():
    with pytest.raises(ConfigError, match="schema 2"):
        make().load_state_dict({"schema": 2})


def test_sb19_threads_share_an_epoch_without_loss_or_repeat():
    source, given_out = make(2000), []

    def draw():
        for _ in range(50):
            given_out.extend(drawn(source, 10))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given_out) == list(range(2000))
    assert source.num_owed == 2000


def test_a_dropped_group_is_counted_and_owed_no_longer():
    source = make()
    (group,) = source.get_samples(1)
    source.drop(group, "all rewards are 0")
    source.drop(group, "again")
    assert (source.num_owed, source.dropped) == (0, {"all rewards are 0": 1})
    resumed = make()
    resumed.load_state_dict(source.state_dict())
    assert resumed.dropped == {"all rewards are 0": 1}


def test_marking_an_old_hand_out_does_not_end_a_newer_one_of_the_same_group():
    for cls in (RolloutDataSource, RolloutDataSourceWithBuffer):
        source = make(cls=cls)
        (first,) = source.get_samples(1)
        source.give_back([first])
        (again,) = source.get_samples(1)
        assert again[0].group_index == first[0].group_index
        source.mark_trained([first])
        source.drop(first, "of another time")
        assert (source.num_owed, source.dropped) == (1, {})
        source.mark_trained([again])
        assert source.num_owed == 0


class Fragile(list):
    """Rows, one of which cannot be read until it is repaired."""

    broken = None

    def __getitem__(self, place):
        if place == self.broken:
            raise OSError("disk")
        return super().__getitem__(place)


@pytest.mark.parametrize("cls", [RolloutDataSource, RolloutDataSourceWithBuffer])
def test_an_error_while_drawing_loses_no_row(cls):
    data = Fragile(rows(200))
    source = cls(data)
    source.give_back(source.get_samples(2))
    data.broken = 150
    with pytest.raises(OSError, match="disk"):
        [source.get_samples(30) for _ in range(5)]
    assert source.num_owed == 120
    data.broken = None
    assert drawn(source, 80) == list(range(120, 200))


def test_a_row_that_is_no_row_is_refused_and_loses_no_row_before_it():
    message = "a row of the dataset is 17: each row must be a dict of columns, text, or a list of messages"
    with pytest.raises(ConfigError, match=message):
        RolloutDataSource([17])
    source = of_iterable([{"n": 0}, 17])
    with pytest.raises(ConfigError, match=message):
        source.get_samples(2)
    assert drawn(source, 1) == [0]
    with pytest.raises(ConfigError, match="17"):
        source.get_samples(1)


CONVERSATION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.parametrize("row", ["What is 2+2?", CONVERSATION])
def test_d10_d11_a_row_may_be_text_or_a_conversation(row, tmp_path):
    source = RolloutDataSource([row, row], SourceSettings(n_samples_per_prompt=2))
    ((sample, _),) = groups = source.get_samples(1)
    assert (sample.row, sample.prompt, sample.label) == (row, row, None)
    assert source.rollout_input(groups[0]) == {"prompt": row}
    source.save(1, tmp_path)
    resumed = RolloutDataSource([row, row], SourceSettings(n_samples_per_prompt=2))
    resumed.load(1, tmp_path)
    assert resumed.get_samples(1)[0][0].row == row


class Collating(DecoderOnlyLLMDataPacker):
    """Tells each row which rows were collated with it."""

    def rollout_collate_fn(self, items):
        return [{**item, "with": [other["n"] for other in items]} for item in items]


def collating(**settings):
    return make(10, packer=Collating(), mini_batch_size=4, shuffle=False, **settings)


def collated(source, count):
    return [source.rollout_input(group)["with"] for group in source.get_samples(count)]


def test_d4_rows_become_workflow_input_in_mini_batches():
    source = collating()
    assert collated(source, 3) == [[0, 1, 2, 3]] * 3
    assert collated(source, 7) == [[0, 1, 2, 3], *[[4, 5, 6, 7]] * 4, *[[8, 9]] * 2]
    assert collated(source, 1) == [[0, 1, 2, 3]]  # of the next epoch
    group = collating().get_samples(6)[5]
    source.give_back([group])
    assert collated(source, 1) == [[4, 5, 6, 7]]


def test_without_mini_batches_each_row_becomes_workflow_input_alone():
    assert collated(make(10, packer=Collating(), shuffle=False), 3) == [[0], [1], [2]]


def test_a_fresh_sample_is_saved_without_columns_and_a_finished_one_keeps_its_reward():
    source = make()
    ((sample,),) = groups = source.get_samples(1)
    (saved,) = group_to_json(groups[0])
    assert not {"tokens", "reward", "row"} & saved.keys()
    sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    (saved,) = group_to_json(groups[0])
    assert (saved["tokens"], saved["reward"]) == ([], 1.0)


def test_mini_batches_are_the_same_after_a_restart_and_owed_rows_are_one_of_their_own():
    source = collating()
    source.mark_trained(source.get_samples(5))
    resumed = collating()
    source.get_samples(2)
    resumed.load_state_dict(source.state_dict())
    assert collated(resumed, 2) == [[5, 6]] * 2
    assert collated(resumed, 2) == [[4, 5, 6, 7], [8, 9]]


def test_mini_batches_are_the_same_after_a_restart_over_many_rows():
    def source():
        return make(150, packer=Collating(), mini_batch_size=4, shuffle=False)

    before, resumed = source(), source()
    before.mark_trained(before.get_samples(5))
    resumed.load_state_dict(before.state_dict())
    first, second = collated(resumed, 70), collated(resumed, 75)
    starts = [number // 4 * 4 for number in range(5, 150)]
    assert first + second == [list(range(start, min(start + 4, 150))) for start in starts]


def test_a_packer_that_collates_nothing_gets_each_row_when_it_is_needed():
    seen = []

    class Seeing(DecoderOnlyLLMDataPacker):
        def get_rollout_input(self, item):
            seen.append(item["n"])
            return item

    source = make(10, packer=Seeing(), mini_batch_size=4, shuffle=False)
    source.rollout_input(source.get_samples(3)[2])
    assert seen == [2]


def test_metadata_come_from_their_column_and_keep_what_was_added():
    data = [{"prompt": "p", "facts": {"level": 3}}, {"prompt": "q", "facts": None}]
    source = RolloutDataSource(data, SourceSettings(n_samples_per_prompt=2, metadata_key="facts"))
    (first, second), (third, _) = source.get_samples(2)
    assert (first.metadata, second.metadata, third.metadata) == ({"level": 3}, {"level": 3}, {})
    first.metadata["seen"] = True
    resumed = RolloutDataSource(data, SourceSettings(n_samples_per_prompt=2, metadata_key="facts"))
    resumed.load_state_dict(source.state_dict())
    assert resumed.get_samples(1)[0][0].metadata == {"level": 3, "seen": True}
    with pytest.raises(ConfigError, match=r"the column 'prompt' \(metadata_key\) of a row is 'p': it must be a dict"):
        RolloutDataSource(data, SourceSettings(metadata_key="prompt")).get_samples(1)


def test_metadata_are_json_values_and_copied_on_load():
    source = make()
    for bad in ({"x": math.nan}, {"x": [np.float32("inf")]}, {"x": {1}}):
        with pytest.raises(ValueError, match="give JSON values"):
            source.update_metadata(bad)
    assert source.get_metadata() == {}
    state = source.state_dict() | {"metadata": {"seen": [1]}}
    source.load_state_dict(state)
    source.get_metadata()["seen"].append(2)
    assert state["metadata"] == {"seen": [1]}


def test_returned_rows_are_drawn_first_and_pending_again():
    source = make(4, n_samples_per_prompt=2)
    first, second = source.get_samples(2)
    first[0].append([1], sampled=True)
    source.give_back([first])
    assert source.num_owed == 1
    again, third = source.get_samples(2)
    assert [s.index for s in again] == [0, 1]
    assert [len(s.tokens) for s in again] == [0, 0]
    assert third[0].index == 4


def test_new_rows_of_a_growing_dataset_are_drawn_in_the_next_epoch():
    class Growing:
        def __init__(self):
            self.rows = rows(3)

    dataset = Growing()
    source = RolloutDataSource(dataset, SourceSettings(shuffle=True))
    source.get_samples(1)
    dataset.rows += [{"n": 3}]
    assert 3 not in drawn(source, 2)
    assert sorted(drawn(source, 4)) == [0, 1, 2, 3]


def test_a_resumed_epoch_has_the_rows_that_it_began_with():
    class Growing:
        def __init__(self, size):
            self.rows = Rows(rows(size))

    class Rows(list):
        on_disk = property(lambda self: self[:4])

    dataset = Growing(4)
    source = RolloutDataSource(dataset, SourceSettings(shuffle=True))
    source.get_samples(2)
    dataset.rows += rows(6)[4:]
    resumed = RolloutDataSource(Growing(6), SourceSettings(shuffle=True))
    resumed.load_state_dict(source.state_dict())
    assert len(resumed) == 4
    assert sorted(drawn(resumed, 4)) == [0, 1, 2, 3]  # the two owed ones first
    assert sorted(drawn(resumed, 6)) == list(range(6))


def test_a_used_source_forgets_what_it_has_read_when_it_loads_a_state():
    saved, used = make(9), make(9)
    expected = drawn(saved, 5)
    state = saved.state_dict()
    drawn(used, 2)
    used.load_state_dict(state)
    assert used.num_owed == 0
    assert drawn(used, 9) == [*expected, *drawn(saved, 4)]


def test_owed_groups_are_handed_out_in_the_order_of_their_numbers():
    source = make(6)
    first, second, third = source.get_samples(3)
    source.give_back([first])
    source.get_samples(1)  # now the first was handed out last
    resumed = make(6)
    resumed.load_state_dict(source.state_dict())
    again = resumed.get_samples(3)
    assert [group[0].group_index for group in again] == [0, 1, 2]
    assert [group[0].row for group in again] == [group[0].row for group in (first, second, third)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(3, 7))
def test_a_resumed_source_hands_out_owed_groups_by_number_then_returned_ones_as_they_came(data, count):
    source = make(9)
    taken = source.get_samples(count)
    given_back = data.draw(st.permutations(taken))[: data.draw(st.integers(0, count))]
    for group in given_back:
        source.give_back([group])
    owed = [group for group in taken if group not in given_back]
    resumed = make(9)
    resumed.load_state_dict(source.state_dict())
    again = resumed.get_samples(count)
    assert [group[0].group_index for group in again] == [group[0].group_index for group in (*owed, *given_back)]


def test_rows_that_are_not_json_are_saved_by_position(tmp_path):
    source = RolloutDataSource([{"image": object(), (1, 2): 3}], SourceSettings(seed=1))
    source.get_samples(1)
    source.save(1, tmp_path)
    resumed = RolloutDataSource([{"image": object(), (1, 2): 3}], SourceSettings(seed=1))
    resumed.load(1, tmp_path)
    assert resumed.get_samples(1)[0][0].row[(1, 2)] == 3


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="n_samples_per_prompt is 0"):
        make(n_samples_per_prompt=0)
    with pytest.raises(ValueError, match="num_samples is -1"):
        make().get_samples(-1)


def test_the_source_is_an_endless_iterable_of_groups():
    source = make(2, shuffle=False)
    assert [group[0].row["n"] for group in itertools.islice(source, 5)] == [0, 1, 0, 1, 0]
    assert source.num_owed == 5


def test_an_iterable_starts_over_and_an_iterator_ends():
    again = of_iterable(rows(2))
    assert drawn(again, 5) == [0, 1, 0, 1, 0]
    assert (again.epoch_id, again.sample_offset) == (2, 1)
    assert len(again.get_samples(1)[0]) == 1
    once = of_iterable(iter(rows(2)))
    assert drawn(once, 5) == [0, 1]
    assert once.get_samples(1) == []
    with pytest.raises(ConfigError, match="no position to save"):
        again.state_dict()


@given(sizes=st.lists(st.integers(0, 3), max_size=5), count=st.integers(0, 12))
def test_a_loader_of_lists_gives_its_rows_one_by_one(sizes, count):
    numbers = iter(range(100))
    batches = [[{"n": next(numbers)} for _ in range(size)] for size in sizes]
    flat = [row["n"] for batch in batches for row in batch]
    expected = list(itertools.islice(itertools.cycle(flat), count))
    assert drawn(of_iterable(batches), count) == expected
    assert drawn(of_iterable(iter(batches)), count) == flat[:count]


def test_an_error_of_an_iterable_loses_no_row_before_it():
    class Broken:
        left = rows(2)

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise OSError("net")
            return self.left.pop(0)

    source = of_iterable(Broken())
    with pytest.raises(OSError, match="net"):
        source.get_samples(4)
    assert drawn(source, 4) == [0, 1]


class Restarts(RuleBasedStateMachine):
    """Any sequence of draws, ends, returns, saves and restarts, against a simple model."""

    @initialize(size=st.integers(1, 5), members=st.integers(1, 3), shuffle=st.booleans())
    def start(self, size, members, shuffle):
        self.settings = {"n_samples_per_prompt": members, "shuffle": shuffle, "seed": 3}
        self.size = size
        self.source = make(size, cls=RolloutDataSourceWithBuffer, **self.settings)
        self.in_hand = {}  # group index -> group
        self.ended = []  # rows in the order of their groups' numbers
        self.rows_of = {}
        self.saved = None

    @rule(data=st.data())
    def get(self, data):
        count = data.draw(st.integers(1, 3 * self.size))
        groups = self.source.get_samples(count)
        assert len(groups) == count
        for group in groups:
            number = group[0].group_index
            assert number not in self.in_hand, "handed out twice"
            assert number not in self.ended, "handed out after its end"
            assert len({s.index for s in group}) == self.settings["n_samples_per_prompt"]
            row = group[0].row["n"]
            assert self.rows_of.setdefault(number, row) == row
            self.in_hand[number] = group

    @rule(data=st.data(), how=st.sampled_from(["train", "drop", "give back", "abort"]))
    def end(self, data, how):
        if not self.in_hand:
            return
        number = data.draw(st.sampled_from(sorted(self.in_hand)))
        group = self.in_hand.pop(number)
        if how == "train":
            self.source.mark_trained([group])
            self.ended.append(number)
        elif how == "drop":
            self.source.drop(group, "test")
            self.ended.append(number)
        else:
            if how == "abort":
                group[0].append([number % 7], sampled=True, versions=[1], logprobs=[-1.0], stop_reason="abort")
                group[0].status = Sample.Status.ABORTED
            self.source.add_samples([group])

    @rule()
    def save(self):
        self.saved = (orjson.dumps(self.source.state_dict()), list(self.ended), dict(self.rows_of))

    @rule()
    def crash_and_load(self):
        if self.saved is None:
            return
        state, self.ended, self.rows_of = self.saved[0], list(self.saved[1]), dict(self.saved[2])
        self.source = make(self.size, cls=RolloutDataSourceWithBuffer, **self.settings)
        self.source.load_state_dict(orjson.loads(state))
        self.in_hand = {}

    @invariant()
    def each_row_once_per_epoch(self):
        if not hasattr(self, "source"):
            return
        numbers = sorted(self.rows_of)
        assert numbers == list(range(len(numbers)))
        epochs = [numbers[i : i + self.size] for i in range(0, len(numbers), self.size)]
        for epoch in epochs:
            seen = [self.rows_of[number] for number in epoch]
            assert len(set(seen)) == len(seen)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "source"):
            return
        held = {g[0].group_index for g in [*self.source.buffer, *self.source._returned]}
        assert held | set(self.in_hand) | set(self.ended) == set(self.rows_of)


TestRestarts = Restarts.TestCase
TestRestarts.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
