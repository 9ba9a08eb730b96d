from __future__ import annotations
import dataclasses
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from torch import Tensor
from areal_lite.api.trajectory import TokenSequence
from areal_lite.errors import ConfigError
from areal_lite.servers.weights.weight_folder import write_model
from areal_lite.trainer.forward.microbatches import plan_blocks
from areal_lite.trainer.forward.packed_model import pack
from areal_lite.trainer.forward.scalar_model import ValueScorer, ending, load_reward_model, rewards_of
from tests.trainer.supervised_data import reward_trainer
from tests.trainer.training_data import drawn_batch, sequence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    model = load_reward_model(str(tiny), device=CPU, new_head=True)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight)
    return model


def alone(model: Any, one: TokenSequence) -> Tensor:
    return model(input_ids=torch.from_numpy(one.input_ids)[None]).logits[0, 0]


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_rewards_equal_those_of_transformers(model: Any, max_tokens: int) -> None:
    batch = drawn_batch(5)
    batch += [sequence([*one.input_ids, 7, 8], [1], group=one.group_id) for one in batch]  # untrained tokens at the end
    batch.append(sequence(batch[0].input_ids[:3], [1], group=batch[0].group_id))  # the beginning of another
    rewards = rewards_of(ValueScorer(model), batch, max_tokens=max_tokens)
    assert not rewards.requires_grad
    with torch.no_grad():
        expected = torch.stack([alone(model, one) for one in batch])
    torch.testing.assert_close(rewards, expected, atol=1e-5, rtol=1e-5)
    assert len(np.unique(rewards.numpy().round(4))) == len(batch)


def test_an_answer_is_read_up_to_its_end_mark_in_training_as_in_a_run(tiny: Path) -> None:
    ids, mask = torch.tensor([3, 4, 5, 6, 7]), torch.tensor([0, 0, 1, 1, 0])  # the template writes 7 after it
    item = {"chosen_ids": ids, "chosen_mask": mask, "rejected_ids": ids[:4], "rejected_mask": mask[:4]}
    for one in reward_trainer(tiny)._sequences([item]):
        assert (one.input_ids[:-1].tolist(), one.loss_mask.tolist()) == ([3, 4, 5, 6], [False] * 4 + [True])


def test_no_sequences_give_no_rewards(model: Any) -> None:
    assert rewards_of(ValueScorer(model), [], max_tokens=10).tolist() == []


def test_a_reward_depends_on_the_last_token(model: Any) -> None:
    batch = [sequence([5, 6, last], [1]) for last in (7, 8)]
    first, second = rewards_of(ValueScorer(model), batch, max_tokens=100).tolist()
    assert abs(first - second) > 1e-3


def test_an_empty_sequence_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="True at the first token"):
        rewards_of(ValueScorer(model), [sequence([], [])], max_tokens=10)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_of_a_pair_equals_that_of_its_sequences_alone(tiny: Path, recompute: bool) -> None:
    model = load_reward_model(str(tiny), device=CPU, gradient_checkpointing=recompute, new_head=True)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight)
    pair = [sequence([5, 6, 7, 8], [2, 3]), sequence([5, 6, 9], [2])]
    pair = [dataclasses.replace(one, token_rewards=np.ones(len(one))) for one in pair]  # which it replaces
    scorer, endings = ValueScorer(model), [ending(one) for one in pair]
    ((block,),) = plan_blocks(endings, [0, 1], max_tokens=100, balance_length=100)  # the prompt is computed once
    assert (block.sequences, block.shared, block.length) == ((0, 1), (0, 2), 5)
    gradients = []
    for chosen, rejected in (
        scorer(pack(endings, [block], device=CPU)),
        [alone(model, one) for one in pair],
    ):
        model.zero_grad()
        (-torch.nn.functional.logsigmoid(chosen - rejected)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_a_saved_reward_model_keeps_its_head(model: Any, tmp_path: Path) -> None:
    write_model(model, tmp_path, torch.float32)
    again = load_reward_model(str(tmp_path), device=CPU)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_a_language_model_is_not_a_trained_reward_model(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="has no reward head.*a trained one"):
        load_reward_model(str(tiny), device=CPU)
    model = load_reward_model(str(tiny), device=CPU, new_head=True)
    assert not model.score.weight.any()
    assert not model.training
