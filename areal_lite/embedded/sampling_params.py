"""Sampling parameters of SGLang's ``/generate``: their names, types and ranges.

Guarantees that the sampler can use a ``SamplingParams`` without further checks. Knows neither torch nor HTTP: a bad
value raises ``BadRequest`` with the JSON body that SGLang would answer.
"""

import dataclasses
from typing import Annotated, Any
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass
from areal_lite.embedded.bad_request import STRICT, BadRequest, checked, invalid_value, wrong_type
from areal_lite.errors import did_you_mean


def _check_top_k(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("it must be -1 (disable) or at least 1")
    return value


_Constraint = Annotated[str | None, BeforeValidator(lambda text: text or None)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_Bias = Annotated[float, Field(ge=-1e30, le=1e30)]
_TokenId = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class SamplingParams:
    """How to sample one request; the defaults are SGLang's."""

    max_new_tokens: Annotated[int, Field(ge=1, le=2**31)] = 128  # most tokens to sample
    min_new_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Before this many tokens, EOS and stop ids cannot be sampled and stop strings are ignored. Like top-p this filters
    the choice only: reported log-probs are those of the unfiltered distribution."""
    temperature: Annotated[float, Field(ge=0), AfterValidator(lambda value: value if value >= 1e-6 else 0.0)] = 1.0
    """Divides the logits. 0, as is less than 1e-6, is greedy; log-probs are then those of the undivided logits."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # smallest probability mass to sample from, in (0, 1]. 1 is off.
    top_k: Annotated[int, AfterValidator(_check_top_k)] = -1  # sample from this many most probable tokens. -1 is off.
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Smallest probability relative to the most probable token, in [0, 1]. 0 is off."""
    frequency_penalty: _Penalty = 0.0  # subtracted from an id's logit for each time the output has it
    presence_penalty: _Penalty = 0.0  # subtracted from the logits of ids that the output has
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divides positive logits of ids that the output has, and multiplies negative ones. 1 is off."""
    logit_bias: dict[Annotated[_TokenId, Field(strict=False)], _Bias] = dataclasses.field(default_factory=dict)
    """Numbers added to the logits of ids."""
    json_schema: _Constraint = None
    regex: _Constraint = None
    ebnf: _Constraint = None
    """At most one of these three constrains the output. Like penalties and biases, it filters the choice only."""
    stop: Annotated[
        tuple[str, ...],
        Field(strict=False),
        BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
        AfterValidator(lambda texts: tuple(filter(None, texts))),
    ] = ()
    """Texts that end the output. The returned text ends before them; the returned ids include them."""
    stop_token_ids: Annotated[frozenset[_TokenId], Field(strict=False)] = frozenset()
    """Ids that end the output besides the model's own EOS; under ``ignore_eos`` neither does."""
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False  # keep the stop token or stop text in the returned text
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Prompt, weights and seed decide the tokens, whatever the batch, to float tolerance. None: the server draws it."""

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

    @property
    def has_filters(self) -> bool:
        """True if only the most probable ids are sampled."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


CONSTRAINTS = ("json_schema", "regex", "ebnf")


def parse_sampling_params(given: Any, vocab_size: int) -> SamplingParams:
    """Check the ``sampling_params`` object of a request; None, also as the value of a key, means the default. Raises
    BadRequest with SGLang's error body, for unknown names, wrong types and values out of range."""
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise wrong_type(f"sampling_params must be an object, got {type(given).__name__}")
    if unknown := [name for name in given if name not in KNOWN_PARAMS]:
        known = ", ".join(f"`{known}`" for known in KNOWN_PARAMS)
        hint = did_you_mean(unknown[0], KNOWN_PARAMS)
        raise BadRequest({"error": f"unknown field `{unknown[0]}`, expected one of {known}{hint}"})
    for name, defaults in _UNSUPPORTED.items():
        if given.get(name) not in defaults:
            raise invalid_value(f"{name} is not supported by the embedded server; leave it out, or serve with SGLang.")
    params = checked(SamplingParams, given)
    if len(given_constraints := [name for name in CONSTRAINTS if getattr(params, name) is not None]) > 1:
        raise invalid_value(f"{' and '.join(given_constraints)} are both given; give one of them.")
    if odd := [token for token in (*params.stop_token_ids, *params.logit_bias) if token >= vocab_size]:
        raise invalid_value(f"stop_token_ids or logit_bias has {odd[0]}: ids are in [0, {vocab_size}).")
    if params.top_k >= vocab_size:
        params = dataclasses.replace(params, top_k=-1)
    if params.min_new_tokens > params.max_new_tokens:
        raise invalid_value(
            f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
        )
    return params


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "spaces_between_special_tokens": (None, True),
    **dict.fromkeys(("stop_regex", "structural_tag", "custom_params"), (None, "", [], {})),
}
"""Parameters that only SGLang supports, each with its accepted values: those without any effect."""
KNOWN_PARAMS = (*SamplingParams.__dataclass_fields__, *_UNSUPPORTED)
