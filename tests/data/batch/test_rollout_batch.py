"""From rows to what workflows get, and from their trajectories to the batch that trains."""

from __future__ import annotations
from pathlib import Path
from typing import Any
import pytest
import torch
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.batch.training_batch import check_training_batch, training_sequences
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.packer.data_packer import UnpreparedRow, rollout_inputs, row_of, training_batch
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.source.dynamic_filters import nonzero_reward_std
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError, TrainingError
from tests.fixtures.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def packer(tmp_path_factory: pytest.TempPathFactory) -> DecoderOnlyLLMDataPacker:
    packer = DecoderOnlyLLMDataPacker()
    folder: Path = build_tiny_model(tmp_path_factory.mktemp("tokenizer"))
    packer.setup(tokenizer=load_tokenizer(str(folder)), config=DatasetConfig(path="rows.jsonl"))
    return packer


def result(status: EpisodeStatus = EpisodeStatus.ACCEPTED, **changes: Any) -> Group:
    tensors = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [0, 0, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]),
        "loss_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]),
        "logprobs": torch.tensor([[0.0, -1.0, -2.0, 0.0], [0.0, 0.0, 0.0, -3.0]]),
        "versions": torch.tensor([[-1, 4, 6, -1], [-1, -1, -1, 5]]),
        "rewards": torch.tensor([1.0, 0.5]),
    }
    trajectory = {key: value for key, value in (tensors | changes).items() if value is not None}
    return Group(task_id=7, group_id="seven", status=status, data={}, trajectories=[trajectory_of(trajectory, [])])


def test_padding_on_either_side_is_removed() -> None:
    first, second = samples_of(result())
    assert first.input_ids.tolist() == [5, 6, 7]
    assert first.loss_mask.tolist() == [False, True, True]
    assert first.logprobs is not None
    assert first.logprobs.tolist() == [0.0, -1.0, -2.0]
    assert (first.reward, first.group_id, first.task_id) == (1.0, "seven", "7")
    assert second.input_ids.tolist() == [8, 9]
    assert second.num_trained_tokens == 1


def test_only_accepted_groups_train() -> None:
    assert samples_of(result(EpisodeStatus.REJECTED)) == samples_of(result(EpisodeStatus.FAILED)) == []


def test_log_probs_and_versions_may_be_missing() -> None:
    first, _ = samples_of(result(logprobs=None, versions=None))
    assert first.logprobs is None
    assert first.staleness(9) is None


def test_staleness_counts_from_the_oldest_trained_token() -> None:
    first, second = samples_of(result())
    assert (first.staleness(6), second.staleness(6)) == (2, 1)


@pytest.mark.parametrize("key", ["loss_mask", "rewards"])
def test_a_missing_reward_or_loss_mask_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"task 7: the trajectory has no '{key}'"):
        samples_of(result(**{key: None}))


def test_a_batch_trains_exactly_the_tokens_that_were_sampled(packer: DecoderOnlyLLMDataPacker) -> None:
    batch = training_batch(packer, [result(), result(EpisodeStatus.FAILED), result()])
    check_training_batch(batch)
    assert len(batch) == 4
    assert batch.batch["loss_mask"].sum() == 2 * 3
    assert batch.batch["input_ids"].shape == (4, 3)
    assert batch.non_tensor_batch["group_ids"].tolist() == ["seven"] * 4


def test_nothing_accepted_is_an_error(packer: DecoderOnlyLLMDataPacker) -> None:
    with pytest.raises(TrainingError, match="no accepted episode"):
        training_batch(packer, [result(EpisodeStatus.REJECTED)])


def test_dict_rows_reach_the_workflow_unchanged(packer: DecoderOnlyLLMDataPacker) -> None:
    rows = [{"question": "1+1", "answer": 2}]
    assert rollout_inputs(packer, rows) == rows


def test_the_packers_text_becomes_the_prompt(packer: DecoderOnlyLLMDataPacker) -> None:
    class Shouting(DecoderOnlyLLMDataPacker):
        def get_rollout_input(self, item: Any) -> str:
            return str(item["prompt"]).upper()

        def rollout_collate_fn(self, items: list[Any]) -> list[Any]:
            return [f"{item}!" for item in items]

    rows = [{"prompt": "a", "answer": 1}]
    assert rollout_inputs(Shouting(), rows) == [{"prompt": "A!", "answer": 1}]
    source = RolloutDataSource(rows, SourceSettings(packer=Shouting()))
    (group,) = source.get_samples(1)
    assert source.rollout_input(group) == {"prompt": "A!", "answer": 1}
    assert group[0].row == rows[0]
    assert rollout_inputs(packer, ["text"]) == [{"prompt": "text"}]


@pytest.mark.parametrize(
    ("row", "item", "prepared_from"),
    [
        ({"prompt": "a", "answer": 1}, "A", {"prompt": "A", "answer": 1}),
        ([{"role": "user", "content": "a"}], "A", [{"role": "user", "content": "a"}]),
        ([{"role": "user", "content": "a"}], {"prompt": "A"}, {"prompt": "A"}),
        ("a", "A", "a"),
    ],
)
def test_a_prompt_is_prepared_from_what_its_text_was_made_of(row: Any, item: Any, prepared_from: Any) -> None:
    class Changing(DecoderOnlyLLMDataPacker):
        def get_rollout_input(self, given: Any) -> Any:
            return item

    packer = Changing()
    packer.prepare_prompt = lambda source: {"from": source, "prompt": "not used"}
    (given,) = rollout_inputs(packer, [row])
    assert isinstance(given, UnpreparedRow)
    assert given["prompt"] == "A"
    assert given.prepared() == {**given, "from": prepared_from}


def test_the_row_of_a_group_is_that_of_its_samples_or_the_workflows_input() -> None:
    group = result()
    assert row_of(group) == {}
    (group.samples,) = RolloutDataSource([{"prompt": "a"}]).get_samples(1)
    assert row_of(group) == {"prompt": "a"}


def test_a_collate_that_changes_the_number_of_inputs_is_refused(packer: DecoderOnlyLLMDataPacker) -> None:
    class Losing(DecoderOnlyLLMDataPacker):
        def rollout_collate_fn(self, items: list[Any]) -> list[Any]:
            return items[1:]

    with pytest.raises(ConfigError, match="Losing.rollout_collate_fn made 1 inputs of 2"):
        rollout_inputs(Losing(), [{}, {}])


def samples_of(episode: Group) -> list[TokenSequence]:
    packer = DecoderOnlyLLMDataPacker()
    return [packer.get_policy_input(row_of(episode), one) for one in training_sequences([episode])]


def test_the_filter_of_equal_rewards_counts_episodes_and_not_their_sequences() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.5])  # the first episode has two sequences, rewarded 1 and 0
    assert nonzero_reward_std({"rewards": rewards}).keep
    assert not nonzero_reward_std({"rewards": rewards, "member_idx": [0, 0, 1]}).keep
    assert nonzero_reward_std({"rewards": rewards, "member_idx": [0, 1, 1]}).keep
    assert nonzero_reward_std({"rewards": rewards, "member_idx": [0, 0, 1], "episode_rewards": [1.0, 1.0, 0.5]}).keep
    assert not nonzero_reward_std({"rewards": rewards, "member_idx": [0, 1, 1], "episode_rewards": [1.0] * 3}).keep
