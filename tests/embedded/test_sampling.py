"""The sampler draws from the right distribution and filters like SGLang."""

from __future__ import annotations
from typing import Any
import pytest
import torch
from areal_lite.embedded.bad_request import BadRequest
from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.sampling import _sample, sample
from areal_lite.embedded.sampling_params import SamplingParams, parse_sampling_params
from areal_lite.models.kernels.score_kernels import score_library

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
    frequencies = draw(torch.tensor(PROBABILITIES).log(), 5_000, **params)
    assert set(frequencies.nonzero()[:, 0].tolist()) == set(support)
    torch.testing.assert_close(frequencies, expected / expected.sum(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"logit_bias": {1: 2.0, 3: -50.0}}, [0.0, 2.0, 0.0, -50.0]),
        ({"presence_penalty": 1.0}, [-1.0, 0.0, -1.0, 0.0]),
        ({"frequency_penalty": 0.5}, [-1.0, 0.0, -0.5, 0.0]),
        ({"frequency_penalty": 0.5, "presence_penalty": 1.0}, [-2.0, 0.0, -1.5, 0.0]),
    ],
)
def test_penalties_and_biases_change_the_choice_and_not_the_logprobs(
    params: dict[str, Any], expected: list[float]
) -> None:
    """The answer so far has id 0 twice, once of them before it was continued, and id 2 once."""
    logits = torch.tensor(PROBABILITIES).log()
    requests = [
        GenerationRequest(
            rid=str(seed),
            prompt=[1, 0],
            num_continued=1,
            params=SamplingParams(temperature=0.8, **params),
            seed=seed,
            output_ids=[0, 2],
        )
        for seed in range(5_000)
    ]
    sampled = sample(logits.expand(len(requests), -1), requests, frozenset())
    frequencies = torch.bincount(torch.tensor(sampled.tokens), minlength=4) / len(requests)
    wanted = ((logits + torch.tensor(expected)) / 0.8).softmax(-1)
    torch.testing.assert_close(frequencies, wanted, atol=0.03, rtol=0)
    plain = (logits / 0.8).log_softmax(-1)
    torch.testing.assert_close(torch.tensor(sampled.logprobs), plain[sampled.tokens])


@pytest.mark.skipif(score_library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("width", [1, 5, 128, 129, 1000, 40_000])
def test_compiled_samples_are_those_of_torch_whatever_the_other_requests_ask(width: int) -> None:
    temperatures = [0.0, 0.3, 1.0, 2.5] * 20
    requests = [
        GenerationRequest(rid=str(i), prompt=[0], params=SamplingParams(temperature=temperature), seed=i)
        for i, temperature in enumerate(temperatures)
    ]
    logits = (torch.randn(len(requests), width, generator=torch.Generator().manual_seed(width)) * 4).bfloat16()
    logits[::8] = logits[::8].round()  # the most probable id is not the only one
    sampled, plain = sample(logits, requests, frozenset()), _sample(logits, requests, frozenset())
    assert sampled.tokens == plain.tokens
    torch.testing.assert_close(torch.tensor(sampled.logprobs), torch.tensor(plain.logprobs), atol=1e-5, rtol=1e-5)
    for request in requests[1::3]:
        request.top_logprobs_num = 1  # torch samples for these
    mixed = sample(logits, requests, frozenset())
    assert mixed.tokens == sampled.tokens
    assert [len(top) for top in mixed.top] == [i % 3 == 1 for i in range(len(requests))]
    assert all(mixed.logprobs[i] == sampled.logprobs[i] for i in range(len(requests)) if i % 3 != 1)


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 1}, {"top_p": 0.5}, {"min_p": 1.0}, {"logit_bias": {0: 50.0}}, {"min_new_tokens": 1}],
)
def test_logits_in_bfloat16_are_shaped_and_filtered_too(changes: dict[str, Any]) -> None:
    logits = torch.tensor(PROBABILITIES).log()
    frequencies, half = (draw(given, 500, **changes) for given in (logits.bfloat16().float(), logits.bfloat16()))
    assert torch.equal(frequencies, half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), -float("nan"), torch.inf])
def test_logits_that_are_no_numbers_are_refused(broken: float, temperature: float, dtype: torch.dtype) -> None:
    params = SamplingParams(temperature=temperature)
    requests = [GenerationRequest(rid=str(i), prompt=[0], params=params, seed=i) for i in range(3)]
    logits = torch.zeros(3, 300, dtype=dtype)
    logits[1, 1:] = -torch.inf  # ids that are excluded are not broken
    assert sample(logits, requests, frozenset()).tokens[1] == 0
    for places, number in ((slice(None), -torch.inf), (7, broken)):
        logits[1] = 0.0
        logits[1, places] = number
        with pytest.raises(FloatingPointError, match="the model's logits are not numbers: its weights are NaN"):
            sample(logits, requests, frozenset())


def test_a_repetition_penalty_divides_positive_logits_and_multiplies_negative_ones() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    request = GenerationRequest(
        rid="r",
        prompt=[3],
        params=SamplingParams(temperature=0, repetition_penalty=2.0),
        seed=0,
        output_ids=[0],
    )
    assert sample(logits, [request], frozenset()).tokens == [1]  # 2.0 became 1.0; the prompt's id is not penalized
    request.output_ids = [1, 2]
    assert sample(logits, [request], frozenset()).tokens == [0]
    negative = torch.tensor([[-1.0, -1.5, -9.0]])
    assert sample(negative, [request], frozenset()).tokens == [0]
    request.output_ids = [0]
    assert sample(negative, [request], frozenset()).tokens == [1]  # -1.0 became -2.0


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
    assert error.value.body["error"].startswith("unknown field `max_new_token`, expected one of `max_new_tokens`")
    assert error.value.body["error"].endswith("; did you mean 'max_new_tokens'?")
