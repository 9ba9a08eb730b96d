"""Sampling parameters of SGLang's ``/generate``: their names, types and ranges.

Guarantees that the sampler can use a ``SamplingParams`` without further checks. Knows neither torch nor HTTP: a bad
value raises ``BadRequest`` with the JSON body that SGLang would answer.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal_lite.servers.dialects.sglang_errors import BadRequest, invalid_value, wrong_type


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample one request; the defaults are SGLang's."""

    max_new_tokens: int = 128
    """Most tokens to sample."""
    min_new_tokens: int = 0
    """Before this many tokens, EOS and stop ids cannot be sampled and stop strings are ignored. Like top-p this filters
    the choice only: reported log-probs are those of the unfiltered distribution."""
    temperature: float = 1.0
    """Divides the logits. 0 is greedy; log-probs are then those of the undivided logits."""
    top_p: float = 1.0
    """Smallest probability mass to sample from, in (0, 1]. 1 is off."""
    top_k: int = -1
    """Sample from this many most probable tokens. -1 is off."""
    min_p: float = 0.0
    """Smallest probability relative to the most probable token, in [0, 1]. 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from an id's logit for each time the output has it."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of ids that the output has."""
    repetition_penalty: float = 1.0
    """Divides positive logits of ids that the output has, and multiplies negative ones. 1 is off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """``(id, number added to its logit)``."""
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    """At most one of these three constrains the output. Like penalties and biases, it filters the choice only."""
    stop: tuple[str, ...] = ()
    """Texts that end the output. The returned text ends before them; the returned ids include them."""
    stop_token_ids: frozenset[int] = frozenset()
    """Ids that end the output besides the model's own EOS, also under ``ignore_eos``."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    """Keep the stop token or stop text in the returned text."""
    sampling_seed: int | None = None
    """With a seed, prompt, weights and seed decide the sampled tokens whatever else is in the batch (to float
    tolerance). None: the server draws a seed."""

    @property
    def constraint(self) -> tuple[str, str] | None:
        """Name and text of the constraint."""
        for name in CONSTRAINTS:
            if (text := getattr(self, name)) is not None:
                return name, text
        return None

    @property
    def has_penalties(self) -> bool:
        """True if ids of the output change the logits."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


CONSTRAINTS = ("json_schema", "regex", "ebnf")
Check = Callable[[str, Any], Any]
"""Takes a parameter's name and value, returns the value to use, or raises ``BadRequest``."""


def parse_sampling_params(given: Any, vocab_size: int) -> SamplingParams:
    """Check the ``sampling_params`` object of a request.

    Args:
        given: The JSON value. None, here or as the value of a key, means the default.
        vocab_size: Stop ids must be below it.

    Raises:
        BadRequest: With SGLang's error body, for unknown names, wrong types and values out of range.
    """
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise wrong_type(f"sampling_params must be an object, got {type(given).__name__}")
    _check_names(given)
    values = {name: value for name, value in given.items() if value is not None}
    for name, defaults in _UNSUPPORTED.items():
        if values.pop(name, None) not in defaults:
            raise invalid_value(f"{name} is not supported by the embedded server; leave it out, or serve with SGLang.")
    for name, check in _CHECKS:
        if name in values:
            values[name] = check(name, values[name])
    if "top_k" in values:
        values["top_k"] = _top_k(values["top_k"], vocab_size)
    values["logit_bias"] = _logit_bias(values.get("logit_bias") or {}, vocab_size)
    for name in CONSTRAINTS:
        values[name] = _constraint(name, values.get(name))
    if len(given_constraints := [name for name in CONSTRAINTS if values[name] is not None]) > 1:
        raise invalid_value(f"{' and '.join(given_constraints)} are both given; give one of them.")
    values["stop"] = _stop_strings(values.get("stop", ()))
    values["stop_token_ids"] = _stop_ids(values.get("stop_token_ids", ()), vocab_size)
    params = SamplingParams(**values)
    if params.min_new_tokens > params.max_new_tokens:
        raise invalid_value(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
        )
    return params


def _check_names(given: dict[str, Any]) -> None:
    for name in given:
        if name not in KNOWN_PARAMS:
            close = difflib.get_close_matches(name, KNOWN_PARAMS, n=1)
            hint = f" Did you mean `{close[0]}`?" if close else ""
            known = ", ".join(f"`{known}`" for known in KNOWN_PARAMS)
            raise BadRequest({"error": f"unknown field `{name}`, expected one of {known}.{hint}"})


def _integer(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(f"{name} must be an integer, got {value!r}.")
        if not low <= value <= high:
            raise invalid_value(f"{name} must be in [{low}, {high}], got {value}.")
        return value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(f"{name} must be true or false, got {value!r}.")
    return value


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise invalid_value(f"{name} must be a finite number, got {value}.")
    return value


def _in_range(is_valid: Callable[[float], bool], rule: str) -> Check:
    def check(name: str, value: Any) -> float:
        if not is_valid(value):
            raise invalid_value(f"{name} must be {rule}, got {value}.")
        return float(value)

    return check


def _top_k(value: Any, vocab_size: int) -> int:
    top_k: int = _integer(-(2**63), 2**63)("top_k", value)
    if top_k != -1 and top_k < 1:
        raise invalid_value(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    return top_k if top_k < vocab_size else -1


def _logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise wrong_type(f"logit_bias must be an object of token ids and numbers, got {value!r}.")
    biases = []
    for text, bias in value.items():
        if not text.isdecimal() or int(text) >= vocab_size:
            raise invalid_value(f"logit_bias has the key {text!r}; keys are ids in [0, {vocab_size}).")
        biases.append((int(text), float(_number("logit_bias", bias))))
    return tuple(biases)


def _constraint(name: str, value: Any) -> str | None:
    if value and not isinstance(value, str):
        raise wrong_type(f"{name} must be a string, got {value!r}.")
    return value or None


def _stop_strings(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise wrong_type(f"stop must be a string or a list of strings, got {value!r}.")
    return tuple(text for text in texts if text)


def _stop_ids(value: Any, vocab_size: int) -> frozenset[int]:
    if not isinstance(value, list | tuple):
        raise wrong_type(f"stop_token_ids must be a list of integers, got {value!r}.")
    check = _integer(0, vocab_size - 1)
    return frozenset(check("stop_token_ids", token) for token in value)


_CHECKS: tuple[tuple[str, Check], ...] = (
    ("max_new_tokens", _integer(1, 2**31)),
    ("min_new_tokens", _integer(0, 2**31)),
    ("sampling_seed", _integer(-(2**63), 2**64 - 1)),
    ("ignore_eos", _flag),
    ("skip_special_tokens", _flag),
    ("no_stop_trim", _flag),
    ("temperature", _number),
    ("top_p", _number),
    ("min_p", _number),
    ("frequency_penalty", _number),
    ("presence_penalty", _number),
    ("repetition_penalty", _number),
    ("temperature", _in_range(lambda value: value >= 0, "a non-negative finite number")),
    ("top_p", _in_range(lambda value: 0 < value <= 1, "in (0, 1]")),
    ("min_p", _in_range(lambda value: 0 <= value <= 1, "in [0, 1]")),
    ("frequency_penalty", _in_range(lambda value: -2 <= value <= 2, "in [-2, 2]")),
    ("presence_penalty", _in_range(lambda value: -2 <= value <= 2, "in [-2, 2]")),
    ("repetition_penalty", _in_range(lambda value: 0 < value <= 2, "in (0, 2]")),
)
"""Run in this order; the first failure is the answer."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "spaces_between_special_tokens": (None, True),
    **dict.fromkeys(("stop_regex", "structural_tag", "custom_params"), (None, "", [], {})),
}
"""Parameters that only SGLang supports, each with its accepted values: those without any effect."""
KNOWN_PARAMS = (*SamplingParams.__dataclass_fields__, *_UNSUPPORTED)
