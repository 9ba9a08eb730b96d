"""slime's example of a data source as it stands: ``args`` in, groups out, a filter of the user's own."""

import json
from argparse import Namespace
import pytest
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.dynamic_filters import highest_reward_first
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.source_settings import SourceSettings, dataset_of
from areal_lite.errors import ConfigError


def custom_buffer_filter(args, rollout_id, buffer, num_samples):
    """Take the groups of the highest reward first."""
    assert args.n_samples_per_prompt == 2 and rollout_id is None
    sorted_buffer = sorted(buffer, key=lambda x: x[0].reward, reverse=True)
    return sorted_buffer[:num_samples]


@pytest.fixture
def args(tiny_model, tmp_path):
    rows = [{"text": f"What is {n}?", "answer": str(n), "facts": {"level": n}, "functions": None} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Namespace(
        rollout_global_dataset=True,
        hf_checkpoint=str(tiny_model),
        prompt_data=str(tmp_path / "rows.jsonl"),
        rollout_max_prompt_len=None,
        input_key="text",
        label_key="answer",
        metadata_key="facts",
        tool_key="functions",
        apply_chat_template=False,
        rollout_seed=42,
        rollout_shuffle=True,
        n_samples_per_prompt=2,
        buffer_filter_path=None,
        reward_key=None,
        save=str(tmp_path / "save"),
        load=str(tmp_path / "save"),
    )


def test_the_basic_example(args):
    data_source = RolloutDataSourceWithBuffer(args)
    samples = data_source.get_samples(32)
    assert [len(group) for group in samples] == [2] * 32
    first = samples[0][0]
    assert first.prompt == f"What is {first.label}?" and first.metadata == {"level": int(first.label)}
    rejected_samples = samples[:3]
    data_source.add_samples(rejected_samples)
    assert data_source.get_buffer_length() == 3
    assert [group[0].index for group in data_source.get_samples(3)] == [group[0].index for group in rejected_samples]
    data_source.update_metadata({"rejected": 3})
    data_source.save(0)
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load(0)
    assert resumed.get_metadata() == {"rejected": 3}
    owed = resumed.get_samples(32)
    assert sorted(group[0].index for group in owed) == sorted(group[0].index for group in samples)


def test_the_example_of_a_filter(args):
    args.buffer_filter_path = "tests.data.source.test_slime_args.custom_buffer_filter"
    data_source = RolloutDataSourceWithBuffer(args)
    groups = data_source.get_samples(3)
    for group, reward in zip(groups, (0.5, 1.0, 0.0), strict=True):
        for sample in group:
            sample.reward = reward
    data_source.add_samples(groups)
    assert [data_source.get_samples(1)[0][0].reward for _ in range(3)] == [1.0, 0.5, 0.0]


def test_rewards_with_parts_are_compared_by_their_key(args):
    args.reward_key = "accuracy"
    data_source = RolloutDataSourceWithBuffer(args)
    data_source.buffer_filter = highest_reward_first
    groups = data_source.get_samples(3)
    for group, accuracy in zip(groups[:2], (0.0, 1.0), strict=True):
        for sample in group:
            sample.reward = {"accuracy": accuracy, "length": 9 - accuracy}
    assert groups[1][0].get_reward_value(args.reward_key) == 1.0
    data_source.add_samples(groups)
    again = [data_source.get_samples(1)[0][0].reward for _ in range(3)]
    assert [reward and reward["accuracy"] for reward in again] == [1.0, 0.0, None]


def test_the_switch_of_the_chat_template_and_the_longest_prompt(args):
    args.apply_chat_template, args.rollout_shuffle = True, False
    rendered = RolloutDataSource(args).get_samples(1)[0][0].prompt
    assert "What is 0?" in rendered and rendered != "What is 0?" and isinstance(rendered, str)
    args.apply_chat_template, args.rollout_max_prompt_len = False, len("What is 0?")
    assert len(RolloutDataSource(args)) == 10  # the tiny model has one token per byte


def test_missing_arguments_have_slimes_defaults(args):
    needed = {"rollout_global_dataset": False, "n_samples_per_prompt": 2}
    dataset, found = dataset_of(Namespace(**needed))
    assert dataset is None
    assert found == SourceSettings(n_samples_per_prompt=2, seed=42, prompt_key="input", slime_args=found.slime_args)
    del args.apply_chat_template, args.rollout_shuffle, args.rollout_max_prompt_len
    source = RolloutDataSource(args)
    assert (len(source), source.get_samples(1)[0][0].prompt) == (40, "What is 0?")


def test_without_a_dataset_samples_are_empty_and_nothing_is_saved(args):
    args.rollout_global_dataset = False
    data_source = RolloutDataSourceWithBuffer(args)
    assert [sample.index for group in data_source.get_samples(2) for sample in group] == [0, 1, 2, 3]
    data_source.save(0)
    assert not data_source.load(0)


def test_a_missing_argument_is_named(args):
    del args.prompt_data
    with pytest.raises(ConfigError, match="rollout_global_dataset is true, and args has no prompt_data: set it"):
        RolloutDataSource(args)
