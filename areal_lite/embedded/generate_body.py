"""Check the JSON body of ``/generate`` and turn it into requests.

Guarantees that the scheduler can run each request. Token ids outside the vocabulary, which crash a real SGLang server,
are an error here.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.grammar import Grammar
from areal_lite.embedded.sampling_params import SamplingParams, parse_sampling_params
from areal_lite.servers.dialects.sglang_errors import invalid_value, wrong_type

_UNSUPPORTED = ("input_embeds", "image_data", "audio_data", "video_data", "return_hidden_states")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Sizes of the served model."""

    context_length: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateCall:
    """One call of ``/generate``, with its requests in the order of the reply."""

    requests: list[GenerationRequest]
    owners: list[str]
    """The caller's rid of each request, which aborts it; the ``n`` outputs of a prompt share one."""
    as_list: bool
    stream: bool
    incremental: bool
    """Events of a stream hold new tokens only."""

    return_prompt_token_ids: bool
    return_text_in_logprobs: bool


class _PromptOptions(NamedTuple):
    rid: str
    params: SamplingParams
    return_logprob: bool
    logprob_start: int
    top_logprobs_num: int
    num_continued: int


def parse_generate(
    body: Any,
    *,
    encode: Callable[[str], list[int]],
    grammar: Callable[[SamplingParams], Grammar | None],
    limits: Limits,
    draw: random.Random,
) -> GenerateCall:
    """Check a ``/generate`` body and create its requests.

    Args:
        body: The parsed JSON. Unknown top-level fields are ignored, as in SGLang.
        encode: Text to token ids.
        grammar: Compiles the constraint of a request.
        draw: Source of seeds for requests without one.

    Raises:
        BadRequest: With the status and JSON body to answer.
    """
    if not isinstance(body, dict):
        raise wrong_type(f"the body must be a JSON object, got {type(body).__name__}.")
    for name in _UNSUPPORTED:
        if body.get(name):
            raise invalid_value(f"{name} is not supported by the embedded server; leave it out, or serve with SGLang.")
    prompts, is_batch = _prompts(body, encode)
    options = _options(body, len(prompts), is_batch, limits)
    stream, incremental = _flag(body, "stream"), _flag(body, "incremental_streaming_output")
    requests: list[GenerationRequest] = []
    owners: list[str] = []
    for prompt, option in zip(prompts, options, strict=True):
        _check_prompt(prompt, limits)
        _check_length(prompt, option.params.max_new_tokens, limits)
        _check_logprob_options(prompt, option, limits)
        requests += _requests(prompt, option, draw, stream=stream, grammar=grammar(option.params))
        owners += [option.rid] * option.params.n
    as_list = is_batch or len(requests) > 1
    if stream and as_list:
        raise invalid_value("stream is for one prompt with n = 1; send one call per output, or omit stream.")
    return GenerateCall(
        requests=requests,
        owners=owners,
        as_list=as_list,
        stream=stream,
        incremental=incremental,
        return_prompt_token_ids=_flag(body, "return_prompt_token_ids"),
        return_text_in_logprobs=_flag(body, "return_text_in_logprobs"),
    )


def _options(body: dict[str, Any], count: int, is_batch: bool, limits: Limits) -> list[_PromptOptions]:
    """Return the options of each prompt; the body gives one value for all prompts, or a list."""
    sampling = body.get("sampling_params")
    params = [
        parse_sampling_params(given, vocab_size=limits.vocab_size)
        for given in _per_prompt("sampling_params", sampling, count, is_batch and isinstance(sampling, list))
    ]
    rids = _rids(body.get("rid"), count, is_batch)
    return_logprob = _per_prompt_typed(body, "return_logprob", bool, False, count)
    starts = _per_prompt_typed(body, "logprob_start_len", int, -1, count)
    tops = _per_prompt_typed(body, "top_logprobs_num", int, 0, count)
    continued = _per_prompt_typed(body, "num_continued", int, 0, count)
    return list(map(_PromptOptions, rids, params, return_logprob, starts, tops, continued))


def _requests(
    prompt: list[int], option: _PromptOptions, draw: random.Random, *, stream: bool, grammar: Grammar | None
) -> list[GenerationRequest]:
    """Return the ``n`` requests of one prompt, each with a seed of its own."""
    params = option.params
    if grammar is not None and (fault := grammar.advance(prompt[len(prompt) - option.num_continued :])):
        raise invalid_value(f"the {option.num_continued} continued tokens do not fit the constraint: {fault}")
    seeds = [
        draw.getrandbits(64)
        if params.sampling_seed is None
        else (params.sampling_seed + copy * 0xD1342543DE82EF95) % 2**64
        for copy in range(params.n)
    ]
    return [
        GenerationRequest(
            rid=option.rid if params.n == 1 else f"{option.rid}_{copy}",
            prompt=prompt,
            params=params,
            seed=seed,
            return_logprob=option.return_logprob,
            logprob_start=option.logprob_start if option.return_logprob and option.logprob_start >= 0 else None,
            top_logprobs_num=option.top_logprobs_num if option.return_logprob else 0,
            stream=stream,
            num_continued=option.num_continued,
            grammar=grammar and grammar.copy(),
        )
        for copy, seed in enumerate(seeds)
    ]


def _prompts(body: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    text, input_ids = body.get("text"), body.get("input_ids")
    if text is None and input_ids is None:
        raise invalid_value("Either text, input_ids or input_embeds should be provided.")
    if text is not None and input_ids is not None:
        raise invalid_value("text and input_ids are both given; give one of them.")
    if input_ids is not None:
        if not isinstance(input_ids, list):
            raise wrong_type(f"input_ids: must be list or null; got {type(input_ids).__name__}.")
        if not input_ids:
            raise invalid_value("input_ids cannot be empty.")
        is_batch = isinstance(input_ids[0], list)
        return (input_ids if is_batch else [input_ids]), is_batch
    texts: list[Any] = text if isinstance(text, list) else [text]
    if not texts or not all(isinstance(one, str) for one in texts):
        raise wrong_type("text: must be a string or a list of strings that is not empty.")
    return [encode(one) for one in texts], isinstance(text, list)


def _check_prompt(prompt: list[int], limits: Limits) -> None:
    if not isinstance(prompt, list):
        raise wrong_type(f"input_ids: a batch must hold lists only; got {type(prompt).__name__}.")
    if not prompt:
        raise invalid_value("input_ids cannot be empty.")
    if any(type(token) is not int for token in prompt):
        odd = next(token for token in prompt if type(token) is not int)
        raise wrong_type(f"input_ids: elements must be int or list; got {type(odd).__name__}.")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        odd = min(prompt) if min(prompt) < 0 else max(prompt)
        raise invalid_value(
            f"input_ids holds {odd}, which is not in the vocabulary [0, {limits.vocab_size}); was the prompt tokenized "
            "with this model's tokenizer?"
        )


def _check_length(prompt: list[int], max_new_tokens: int, limits: Limits) -> None:
    context, length = limits.context_length, len(prompt)
    if length > context or (length == context and max_new_tokens > 0):
        raise invalid_value(
            f"The input ({length} tokens) is longer than the model's context length ({context} tokens)."
        )
    total = length + max_new_tokens
    if total > context:
        raise invalid_value(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {length} tokens from the input messages and {max_new_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )


def _check_logprob_options(prompt: list[int], option: _PromptOptions, limits: Limits) -> None:
    start, top = option.logprob_start, option.top_logprobs_num
    if not -1 <= start < len(prompt):
        raise invalid_value(
            f"logprob_start_len must be -1 (off) or in [0, {len(prompt)}) for this prompt, got {start}."
        )
    if not 0 <= option.num_continued < len(prompt):
        raise invalid_value(f"num_continued must be in [0, {len(prompt)}) for this prompt, got {option.num_continued}.")
    if not 0 <= top <= limits.vocab_size:
        raise invalid_value(f"top_logprobs_num must be in [0, {limits.vocab_size}], got {top}.")


def _rids(given: Any, count: int, is_batch: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    one = [given] if count == 1 else [f"{given}_{i}" for i in range(count)]
    rids = given if isinstance(given, list) else one
    if not all(isinstance(rid, str) and rid for rid in rids) or (isinstance(given, list) and not is_batch):
        raise wrong_type(f"rid must be a string, or for a batch a list of strings; got {given!r}.")
    if len(rids) != count:
        raise invalid_value(f"rid has {len(rids)} entries for {count} prompts; give one per prompt.")
    twice = sorted({rid for rid in rids if rids.count(rid) > 1}) if len(set(rids)) < count else []
    if twice:
        raise invalid_value(f"Duplicate request IDs detected within the request: {twice}")
    return rids


def _per_prompt(name: str, value: Any, count: int, is_list: bool) -> list[Any]:
    if not is_list:
        return [value] * count
    if len(value) != count:
        raise invalid_value(f"{name} has {len(value)} entries for {count} prompts; give one or {count}.")
    return list(value)


def _per_prompt_typed(body: dict[str, Any], name: str, kind: type, default: Any, count: int) -> list[Any]:
    given = body.get(name)
    values = _per_prompt(name, default if given is None else given, count, isinstance(given, list))
    if any(type(value) is not kind for value in values):
        raise wrong_type(f"{name} must be {kind.__name__}, got {given!r}.")
    return values


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(f"{name} must be true or false, got {value!r}.")
    return bool(value)
