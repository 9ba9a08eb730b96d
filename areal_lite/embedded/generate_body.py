"""Check the JSON body of ``/generate`` and turn it into a request.

Guarantees that the scheduler can run the request. Takes what the clients of this package send: one prompt of token ids
with one answer. Token ids outside the vocabulary, which crash a real SGLang server, are an error here.
"""

import dataclasses
import random
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.embedded.bad_request import STRICT, checked, invalid_value, wrong_type
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


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class _Fields:
    input_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)]
    rid: Annotated[str, Field(min_length=1)] = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    return_logprob: bool = False
    top_logprobs_num: Annotated[int, Field(ge=0)] = 0
    stream: bool = False
    incremental_streaming_output: bool = False
    num_continued: Annotated[int, Field(ge=0)] = 0


def parse_generate(
    body: Any, *, grammar: Callable[[SamplingParams], Grammar | None], runner: "ModelRunner", draw: random.Random
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
    fields = checked_prompt(body, runner, new_tokens=params.max_new_tokens)
    prompt, continued = fields.input_ids, fields.num_continued
    for name, most in (("top_logprobs_num", runner.vocab_size), ("num_continued", len(prompt) - 1)):
        if (count := getattr(fields, name)) > most:
            raise invalid_value(f"{name} must be in [0, {most}] for this prompt and model, got {count}.")
    constraint = grammar(params)
    if constraint is not None and (fault := constraint.advance(prompt[len(prompt) - continued :])):
        raise invalid_value(f"the {continued} continued tokens do not fit the constraint: {fault}")
    return GenerationRequest(
        rid=fields.rid,
        prompt=prompt,
        params=params,
        seed=draw.getrandbits(64) if params.sampling_seed is None else params.sampling_seed % 2**64,
        return_logprob=fields.return_logprob,
        top_logprobs_num=fields.top_logprobs_num if fields.return_logprob else 0,
        stream=fields.stream,
        incremental=fields.incremental_streaming_output,
        num_continued=continued,
        grammar=constraint,
        images=image_prompt(body, prompt, runner.image_processor),
    )


def checked_prompt(body: dict[str, Any], runner: "ModelRunner", *, new_tokens: int) -> _Fields:
    """Return the fields of a body whose prompt the model can read, with ``new_tokens`` after it; raises BadRequest."""
    if isinstance(ids := body.get("input_ids"), list) and any(isinstance(one, list) for one in ids[:1]):
        raise wrong_type("input_ids is a list of prompts: send one call per prompt.")
    fields = checked(_Fields, body)
    prompt = fields.input_ids
    if odd := [token for token in (min(prompt), max(prompt)) if not 0 <= token < runner.vocab_size]:
        raise invalid_value(
            f"input_ids holds {odd[0]}, which is not in the vocabulary [0, {runner.vocab_size}); was the prompt "
            "tokenized with this model's tokenizer?"
        )
    if (total := len(prompt) + new_tokens) > runner.context_length:
        raise invalid_value(
            f"Requested token count exceeds the model's maximum context length of {runner.context_length} tokens. You "
            f"requested a total of {total} tokens: {len(prompt)} tokens from the input messages and "
            f"{new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )
    return fields
