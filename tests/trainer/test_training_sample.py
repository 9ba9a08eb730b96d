from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_lite.api.episode import EpisodeResult, EpisodeStatus
from areal_lite.data.training_sample import training_samples
from areal_lite.errors import ConfigError
from tests.trainer.training_data import sample


def result(status: EpisodeStatus = EpisodeStatus.ACCEPTED, **changes: Any) -> EpisodeResult:
    tensors = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [0, 0, 8, 9]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]),
        "loss_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]]),
        "logprobs": torch.tensor([[0.0, -1.0, -2.0, 0.0], [0.0, 0.0, 0.0, -3.0]]),
        "versions": torch.tensor([[-1, 4, 6, -1], [-1, -1, -1, 5]]),
        "rewards": torch.tensor([1.0, 0.5]),
    }
    trajectory = {key: value for key, value in (tensors | changes).items() if value is not None}
    return EpisodeResult(task_id=7, group_id="seven", status=status, data={}, trajectory=trajectory)


def test_rows_lose_their_padding_on_either_side() -> None:
    first, second = training_samples([result()])
    assert first.input_ids.tolist() == [5, 6, 7]
    assert first.loss_mask.tolist() == [False, True, True]
    assert first.behaviour_logprobs is not None
    assert first.behaviour_logprobs.tolist() == [0.0, -1.0, -2.0]
    assert (first.reward, first.group_id, first.task_id) == (1.0, "seven", "7")
    assert second.input_ids.tolist() == [8, 9]
    assert second.num_trained_tokens == 1


def test_only_accepted_results_train() -> None:
    assert training_samples([result(EpisodeStatus.REJECTED), result(EpisodeStatus.FAILED)]) == []


def test_log_probs_and_versions_may_be_missing() -> None:
    first, _ = training_samples([result(logprobs=None, versions=None)])
    assert first.behaviour_logprobs is None
    assert first.staleness(9) is None


def test_staleness_counts_from_the_oldest_trained_token() -> None:
    first, second = training_samples([result()])
    assert (first.staleness(6), second.staleness(6)) == (2, 1)


@pytest.mark.parametrize("key", ["loss_mask", "rewards"])
def test_what_training_cannot_do_without_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"task 7: the trajectory has no '{key}'"):
        training_samples([result(**{key: None})])


def test_the_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        sample([1, 2], [0])


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="versions has 1 entries but input_ids has 2"):
        sample([1, 2], [1], versions=np.array([0]).tolist())
