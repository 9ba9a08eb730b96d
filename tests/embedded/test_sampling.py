"""The sampler draws from the right distribution and filters like SGLang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.sampling import sample
from areal_lite.embedded.sampling_params import BadRequest, SamplingParams, parse_sampling_params

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]


def draw(logits: torch.Tensor, count: int, **params: Any) -> torch.Tensor:
    """Return how often each id was drawn for ``count`` seeds."""
    requests = [
        GenerationRequest(rid=str(seed), prompt=[0], params=SamplingParams(**params), seed=seed)
        for seed in range(count)
    ]
    tokens = sample(logits.expand(count, -1), requests, frozenset({0})).tokens
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0]) / count


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.65}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"min_p": 0.45}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.35}, [0]),
        ({"min_new_tokens": 1}, [1, 2, 3]),
    ],
)
def test_samples_follow_the_renormalised_distribution_of_the_kept_ids(
    params: dict[str, Any], support: list[int]
) -> None:
    expected = torch.zeros(4)
    expected[support] = torch.tensor(PROBABILITIES)[support]
    frequencies = draw(torch.tensor(PROBABILITIES).log(), 20_000, **params)
    assert set(frequencies.nonzero()[:, 0].tolist()) == set(support)
    torch.testing.assert_close(frequencies, expected / expected.sum(), atol=0.015, rtol=0)


def test_the_tail_of_a_large_vocabulary_keeps_its_probability() -> None:
    """Half of the mass is in the first id, half in 50,001 equal ones; the size is not a multiple of the block."""
    probabilities = torch.full((50_002,), 0.5 / 50_001)
    probabilities[0] = 0.5
    frequencies = draw(probabilities.log(), 400)
    assert abs(float(frequencies[0]) - 0.5) < 0.08
    assert abs(float(frequencies[40_000:].sum()) - 0.1) < 0.05


def test_top_p_covers_more_ids_than_the_first_top_k_pass() -> None:
    drawn = int((draw(torch.zeros(4000), 2000, top_p=0.9) > 0).sum())
    assert drawn > 1024  # 3,600 ids make up 0.9; 2,000 draws hit about 1,530 of them


def test_an_unknown_parameter_error_suggests_a_close_name() -> None:
    with pytest.raises(BadRequest) as error:
        parse_sampling_params({"max_new_token": 3}, vocab_size=10)
    assert error.value.body["error"].startswith(
        "unknown field `max_new_token`, expected one of `max_new_tokens`"
    )
    assert error.value.body["error"].endswith("Did you mean `max_new_tokens`?")
