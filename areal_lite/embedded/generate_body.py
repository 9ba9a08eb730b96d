"""Check the JSON body of ``/generate`` and turn it into a request.

Guarantees that the scheduler can run the request. Takes what the clients of this package send: one prompt of token ids
with one answer. Token ids outside the vocabulary, which crash a real SGLang server, are an error here.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal_lite.embedded.bad_request import invalid_value, wrong_type
from areal_lite.embedded.decoder.image_prompt import image_prompt
from areal_lite.embedded.generation_request import GenerationRequest
from areal_lite.embedded.grammar import Grammar
from areal_lite.embedded.sampling_params import SamplingParams, parse_sampling_params

if TYPE_CHECKING:
    from areal_lite.embedded.model_runner import ModelRunner

_UNSUPPORTED = (
    *("text", "input_embeds", "image_data", "audio_data", "video_data", "return_hidden_states"),
    *("return_prompt_token_ids", "return_text_in_logprobs"),
)


def parse_generate(
    body: Any, *, grammar: Callable[[SamplingParams], Grammar | None], runner: ModelRunner, draw: random.Random
) -> GenerationRequest:
    """Check a ``/generate`` body, whose unknown fields are ignored as in SGLang, and return its request. ``grammar``
    compiles its constraint; ``draw`` gives a seed to a request without one. Raises BadRequest with what to answer."""
    if not isinstance(body, dict):
        raise wrong_type(f"the body must be a JSON object, got {type(body).__name__}.")
    unsupported = [name for name in _UNSUPPORTED if body.get(name)]
    unsupported += ["logprob_start_len"] if body.get("logprob_start_len") not in (None, -1) else []
    if unsupported:
        raise invalid_value(
            f"{unsupported[0]} is not supported by the embedded server; leave it out, or serve with SGLang."
        )
    params = parse_sampling_params(body.get("sampling_params"), runner.vocab_size)
    prompt = _prompt(body.get("input_ids"), runner.vocab_size)
    _check_length(len(prompt), params.max_new_tokens, runner.context_length)
    rid = uuid.uuid4().hex if body.get("rid") is None else body["rid"]
    if not isinstance(rid, str) or not rid:
        raise wrong_type(f"rid must be a string; got {rid!r}.")
    return_logprob = _flag(body, "return_logprob")
    top, continued = _count(body, "top_logprobs_num", runner.vocab_size), _count(body, "num_continued", len(prompt) - 1)
    constraint = grammar(params)
    if constraint is not None and (fault := constraint.advance(prompt[len(prompt) - continued :])):
        raise invalid_value(f"the {continued} continued tokens do not fit the constraint: {fault}")
    return GenerationRequest(
        rid=rid,
        prompt=prompt,
        params=params,
        seed=draw.getrandbits(64) if params.sampling_seed is None else params.sampling_seed % 2**64,
        return_logprob=return_logprob,
        top_logprobs_num=top if return_logprob else 0,
        stream=_flag(body, "stream"),
        incremental=_flag(body, "incremental_streaming_output"),
        num_continued=continued,
        grammar=constraint,
        images=image_prompt(body, prompt, runner.image_processor),
    )


def _prompt(prompt: Any, vocab_size: int) -> list[int]:
    if prompt is None:
        raise invalid_value("input_ids should be provided.")
    if not isinstance(prompt, list):
        raise wrong_type(f"input_ids: must be list or null; got {type(prompt).__name__}.")
    if not prompt:
        raise invalid_value("input_ids cannot be empty.")
    if any(type(token) is not int for token in prompt):
        odd = next(token for token in prompt if type(token) is not int)
        raise wrong_type(f"input_ids: elements must be int; got {type(odd).__name__}. Send one call per prompt.")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        odd = min(prompt) if min(prompt) < 0 else max(prompt)
        raise invalid_value(
            f"input_ids holds {odd}, which is not in the vocabulary [0, {vocab_size}); was the prompt tokenized "
            "with this model's tokenizer?"
        )
    return prompt


def _check_length(length: int, max_new_tokens: int, context: int) -> None:
    total = length + max_new_tokens
    if total > context:
        raise invalid_value(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {total} tokens: {length} tokens from the input messages and {max_new_tokens} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )


def _count(body: dict[str, Any], name: str, largest: int) -> int:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise wrong_type(f"{name} must be int, got {value!r}.")
    if not 0 <= (value or 0) <= largest:
        raise invalid_value(f"{name} must be in [0, {largest}] for this prompt and model, got {value}.")
    return value or 0


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_type(f"{name} must be true or false, got {value!r}.")
    return bool(value)
