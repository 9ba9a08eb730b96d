"""Sampling parameters and answers, as workflows use them."""

from __future__ import annotations
import os
import random
from types import SimpleNamespace
import pytest
from areal_lite.api import GenerationHyperparameters, ModelRequest, ModelResponse


def answer(stop_reason: str, tokens: list[int], tokenizer: object = None) -> ModelResponse:
    return ModelResponse(
        input_tokens=[1],
        output_tokens=tokens,
        output_logprobs=[-1.0] * len(tokens),
        output_versions=[0] * len(tokens),
        stop_reason=stop_reason,
        tokenizer=tokenizer,
    )


def test_sampling_parameters_translate_to_the_names_of_an_openai_client() -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=8, greedy=True, stop=["x"])
    assert gconfig.to_openai_args_dict() == {
        "n": 1,
        "max_completion_tokens": 8,
        "temperature": 0.0,
        "top_p": 1.0,
        "stop": ["x"],
        "frequency_penalty": 0.0,
    }
    assert "n" not in gconfig.to_openai_args_dict(exclude_args=["n_samples"])
    assert gconfig.to_openai_args_dict(exclude_args=None, api_format="openai-agents")["max_tokens"] == 8
    with pytest.raises(KeyError, match="bogus"):
        gconfig.to_openai_args_dict(api_format="bogus")
    assert gconfig.to_openai_args_dict(api_format="responses")["max_output_tokens"] == 8


def test_set_penalties_and_biases_reach_an_openai_client() -> None:
    gconfig = GenerationHyperparameters(presence_penalty=0.5, logit_bias={5: -1.0})
    named = gconfig.to_openai_args_dict()
    assert (named["presence_penalty"], named["logit_bias"]) == (0.5, {"5": -1.0})


def test_an_answer_follows_at_most_one_constraint() -> None:
    schema = '{"type": "object"}'
    assert GenerationHyperparameters(json_schema=schema).is_constrained
    assert not GenerationHyperparameters().is_constrained
    with pytest.raises(ValueError, match="json_schema and regex are both set"):
        GenerationHyperparameters(json_schema=schema, regex="a+")
    with pytest.raises(ValueError, match="regex and ebnf are both set"):
        GenerationHyperparameters(regex="a+").new(ebnf='root ::= "a"')
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        GenerationHyperparameters(json_schema="{")
    with pytest.raises(ValueError, match="a schema is a JSON object"):
        GenerationHyperparameters(json_schema="[]")


def test_a_changed_copy_is_checked_and_leaves_the_original() -> None:
    gconfig = GenerationHyperparameters(temperature=0.5)
    assert (gconfig.new(temperature=0.6).temperature, gconfig.temperature) == (0.6, 0.5)
    with pytest.raises(ValueError, match="temperature"):
        gconfig.new(temperature=-1.0)
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    assert gconfig.new_with_stop_and_pad_token_ids(tokenizer).stop_token_ids == [2, 0]


def test_only_a_sampled_stop_token_is_removed() -> None:
    tokenizer = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    assert answer("stop", [5, 2], tokenizer).output_tokens_without_stop == [5]
    assert answer("length", [5, 2], tokenizer).output_tokens_without_stop == [5, 2]
    assert answer("stop", [5, 6], tokenizer).output_tokens_without_stop == [5, 6]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        _ = answer("stop", [5, 2]).output_tokens_without_stop


def test_request_ids_ignore_the_seed_of_the_program_and_differ_after_a_fork() -> None:
    random.seed(0)
    first = ModelRequest(input_ids=[1]).rid
    random.seed(0)
    assert ModelRequest(input_ids=[1]).rid != first
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, ModelRequest(input_ids=[1]).rid.encode())
        os._exit(0)
    os.waitpid(child, 0)
    rids = {os.read(read, 32).decode(), ModelRequest(input_ids=[1]).rid, first}
    assert len(rids) == 3 and {len(rid) for rid in rids} == {32}
