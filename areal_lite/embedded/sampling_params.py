"""Sampling parameters in SGLang's words: which are known, their types and their ranges.

Guarantees that a ``SamplingParams`` can be sampled with as it stands. Knows neither torch nor HTTP: a
broken rule is raised as ``BadRequest`` with the JSON body that SGLang would answer with.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any


class BadRequest(Exception):
    """A request that breaks a rule of the wire: HTTP status and JSON body of the answer."""

    def __init__(self, body: dict[str, Any], *, status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status


def rule_broken(message: str, *, status: int = 400) -> BadRequest:
    """Return the error for a value out of range (SGLang: ``{"error": {"message"}}``)."""
    return BadRequest({"error": {"message": message}}, status=status)


def wrong_type(message: str) -> BadRequest:
    """Return the error for a body of the wrong form (SGLang: ``{"object": "error", ...}``)."""
    return BadRequest(
        {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled; defaults are SGLang's."""

    max_new_tokens: int = 128
    """Tokens to sample at most. 0 only scores the prompt."""

    min_new_tokens: int = 0
    """EOS and stop ids cannot be sampled, and stop strings do not count, before this many tokens. A filter
    like top-p: the reported log-probs are those of the unfiltered distribution."""

    temperature: float = 1.0
    """Divides the logits. 0 is greedy, with log-probs of the undivided logits."""

    top_p: float = 1.0
    """Smallest probability mass to sample from, in (0, 1]. 1 is off."""

    top_k: int = -1
    """Number of most probable tokens to sample from. -1 is off."""

    min_p: float = 0.0
    """Least probability, as a share of the most probable token's, in [0, 1]. 0 is off."""

    stop: tuple[str, ...] = ()
    """Texts that end the output; the text is cut before them, the ids are not."""

    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the output, besides the model's own EOS; they hold under ``ignore_eos`` too."""

    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keep the stop token or text in the text."""

    n: int = 1
    """Outputs for this prompt."""

    sampling_seed: int | None = None
    """Makes the sampled tokens a function of prompt, weights and seed, whatever else is in the batch (to float
    tolerance). None: the server draws a seed."""


_INT_RANGES: dict[str, tuple[int, int]] = {
    "max_new_tokens": (0, 2**31),
    "min_new_tokens": (0, 2**31),
    "n": (1, 1024),
    "sampling_seed": (-(2**63), 2**64 - 1),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "no_stop_trim")
# SGLang knows these too. The embedded server takes them only with a value that changes nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "spaces_between_special_tokens": (None, True),
    **dict.fromkeys(
        ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params"),
        (None, "", [], {}),
    ),
}
KNOWN_PARAMS = (*SamplingParams.__dataclass_fields__, *_UNSUPPORTED)


def parse_sampling_params(given: Any, *, vocab_size: int) -> SamplingParams:
    """Check the ``sampling_params`` object of a request.

    Args:
        given: The JSON value; None stands for all defaults. A None under a key is the default as well.
        vocab_size: Stop ids must be below it.

    Raises:
        BadRequest: With SGLang's error body, for unknown names, wrong types and values out of range.
    """
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise wrong_type(f"sampling_params must be an object, got {type(given).__name__}")
    for name in given:
        if name not in KNOWN_PARAMS:
            close = difflib.get_close_matches(name, KNOWN_PARAMS, n=1)
            mend = f" Did you mean `{close[0]}`?" if close else ""
            known = ", ".join(f"`{known}`" for known in KNOWN_PARAMS)
            raise BadRequest({"error": f"unknown field `{name}`, expected one of {known}.{mend}"})
    values = {name: value for name, value in given.items() if value is not None}
    for name, harmless in _UNSUPPORTED.items():
        if values.pop(name, None) not in harmless:
            raise rule_broken(
                f"{name} is not supported by the embedded server; leave it out, or serve with SGLang."
            )
    for name, (low, high) in _INT_RANGES.items():
        if name in values:
            values[name] = _integer(name, values[name], low, high)
    for name in _FLAGS:
        if not isinstance(values.get(name, False), bool):
            raise wrong_type(f"{name} must be true or false, got {values[name]!r}.")
    for name in ("temperature", "top_p", "min_p"):
        if name in values:
            values[name] = _number(name, values[name])
    if values.get("temperature", 1.0) < 0:
        raise rule_broken(f"temperature must be a non-negative finite number, got {given['temperature']}.")
    if not 0 < values.get("top_p", 1.0) <= 1:
        raise rule_broken(f"top_p must be in (0, 1], got {given['top_p']}.")
    if not 0 <= values.get("min_p", 0.0) <= 1:
        raise rule_broken(f"min_p must be in [0, 1], got {given['min_p']}.")
    if "top_k" in values:
        top_k = _integer("top_k", values["top_k"], -(2**63), 2**63)
        if top_k != -1 and top_k < 1:
            raise rule_broken(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        values["top_k"] = top_k if top_k < vocab_size else -1
    values["stop"] = _stop_strings(values.get("stop", ()))
    values["stop_token_ids"] = _stop_ids(values.get("stop_token_ids", ()), vocab_size)
    params = SamplingParams(**values)
    if params.min_new_tokens > params.max_new_tokens:
        raise rule_broken(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
        )
    return params


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(f"{name} must be an integer, got {value!r}.")
    if not low <= value <= high:
        raise rule_broken(f"{name} must be in [{low}, {high}], got {value}.")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise rule_broken(f"{name} must be a finite number, got {value}.")
    return float(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise wrong_type(f"stop must be a string or a list of strings, got {value!r}.")
    return tuple(text for text in texts if text)


def _stop_ids(value: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise wrong_type(f"stop_token_ids must be a list of integers, got {value!r}.")
    return frozenset(_integer("stop_token_ids", token, 0, vocab_size - 1) for token in value)
