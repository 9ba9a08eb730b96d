"""Rows of a generator function: drawn in its order, skipped after a restart, refused where a dataset is needed."""

import dataclasses
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.row_streams import GeneratedRows, generator_of
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError

ROWS = DatasetConfig(path="tests.data.source.test_generated_rows.count", kwargs={"stop": 5}, shuffle=False)


def count(stop, start=0):
    for number in range(start, stop):
        yield {"prompt": f"p{number}", "n": number}


def a_list(stop):
    return [{"n": 0}] * stop


def make(rows=ROWS, **settings):
    return RolloutDataSourceWithBuffer(GeneratedRows(generator_of(rows), SourceSettings(name="count", **settings)))


def drawn(source, number):
    return [group[0].row["n"] for group in source.get_samples(number)]


def test_s4_rows_come_in_the_order_of_the_generator_and_begin_again_when_it_ends():
    source = make(n_samples_per_prompt=2)
    ((first, second),) = source.get_samples(1)
    assert (first.prompt, second.row, second.index) == ("p0", {"prompt": "p0", "n": 0}, 1)
    assert drawn(source, 6) == [1, 2, 3, 4, 0, 1]
    assert source.epoch_id == 1


@pytest.mark.parametrize("before", range(13))
def test_a_resumed_source_gives_owed_rows_then_the_rows_that_were_not_drawn(tmp_path, before):
    source = make()
    groups = source.get_samples(before)
    source.mark_trained(groups[:-1])
    source.save(3, tmp_path)
    resumed = make()
    assert resumed.load(3, tmp_path)
    owed = [groups[-1][0].row["n"]] if groups else []
    assert drawn(resumed, 7) == owed + drawn(source, 7 - len(owed))


def test_mini_batches_are_the_same_after_a_restart():
    class Collating(DecoderOnlyLLMDataPacker):
        def rollout_collate_fn(self, items):
            return [{"with": [other["n"] for other in items]} for _ in items]

    def collated(source, number):
        return [source.rollout_input(group)["with"] for group in source.get_samples(number)]

    source = make(packer=Collating(), mini_batch_size=2)
    assert collated(source, 6) == [[0, 1], [0, 1], [2, 3], [2, 3], [4], [0, 1]]
    resumed = make(packer=Collating(), mini_batch_size=2)
    state = source.state_dict() | {"owed": []}
    resumed.load_state_dict(state)
    assert collated(resumed, 2) == [[0, 1], [2, 3]]


def test_a_generator_with_too_few_rows_is_an_error():
    with pytest.raises(ConfigError, match="the generator count yielded no row: yield at least one"):
        make(dataclasses.replace(ROWS, kwargs={"stop": 0})).get_samples(1)
    source = make()
    source.get_samples(4)
    with pytest.raises(ConfigError, match="ended before row 4, which this run had drawn"):
        make(dataclasses.replace(ROWS, kwargs={"stop": 3})).load_state_dict(source.state_dict())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"path": "rows.jsonl"}, "'rows.jsonl'"),
        ({"path": "tests.data.source.test_generated_rows.a_list"}, "is none: name a function that yields rows"),
        ({"kwargs": {"end": 5}}, "train_dataset.kwargs {'end': 5} do not fit"),
    ],
)
def test_a_path_that_is_no_generator_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        generator_of(dataclasses.replace(ROWS, **changes))
