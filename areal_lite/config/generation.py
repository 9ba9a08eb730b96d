"""Sampling parameters: one immutable record per request."""

import json
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Self
from pydantic import Field
from pydantic.dataclasses import dataclass
from areal_lite.config.schema import STRICT, Count, Positive

CONSTRAINTS = ("json_schema", "regex", "ebnf")
_LENGTHS = {"completions": "max_completion_tokens", "responses": "max_output_tokens", "openai-agents": "max_tokens"}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerationHyperparameters:
    """Sampling parameters of one request."""

    n_samples: Positive = 1
    """Must be 1 in a YAML; group_size sets the episodes per row."""
    max_new_tokens: Positive = 16384
    """Maximum tokens of an answer."""
    min_new_tokens: Count = 0
    """Suppress stop tokens until the answer has this many tokens. The trainer's log-probs ignore it."""
    max_tokens: Positive = 32768
    """Maximum tokens of prompt and answer together."""
    greedy: bool = False
    """Always take the most likely token; temperature, top_p, top_k and min_p are ignored."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature, also applied by the trainer; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 disables it. The trainer replays top_p, top_k and min_p on its own log-probs."""
    top_k: Positive | None = None
    """Sample from the k most likely tokens; null disables it."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from the tokens with at least this fraction of the most likely token's probability; 0 disables it."""
    stop: list[str] | None = None
    """Stop strings."""
    stop_token_ids: list[int] | None = None
    """Stop token ids, in addition to the model's own."""
    ignore_eos: bool = False
    """Generate up to max_new_tokens, ignoring the end token."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text; token ids keep them."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtract this times a token's count from its logit; 0 disables it. The trainer's log-probs ignore it."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtract this from the logit of each token already sampled; 0 disables it. The trainer's log-probs ignore it."""
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Divide a positive logit, or multiply a negative one, of each token already sampled; 1 disables it. vLLM includes
    the prompt's tokens. The trainer's log-probs ignore it."""
    logit_bias: dict[int, float] | None = None
    """Token id to the number added to its logit. The trainer's log-probs ignore it."""
    json_schema: str | None = None
    """JSON schema, as text, that the answer must satisfy. Use at most one of json_schema, regex and ebnf. The embedded
    server reports log-probs without the constraint, as the trainer computes them; SGLang and vLLM report them
    renormalized over the allowed tokens, so a forced token has log-prob 0."""
    regex: str | None = None
    """Regular expression that the whole answer must match."""
    ebnf: str | None = None
    """Grammar that the answer must follow, with the rule root: `root ::= "yes" | "no"`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further sampling parameters, sent as they are under the server's own names."""
    seed: int | None = None
    """Sampling seed of this request, for servers that support it (SGLang does not). Null is random."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both set: an answer follows one of them. Remove the others")
        if self.json_schema is not None:
            try:
                schema = json.loads(self.json_schema)
            except ValueError as error:
                raise ValueError(f"json_schema is not JSON ({error}): give the schema as JSON text") from None
            if not isinstance(schema, dict | bool):
                raise ValueError(f"json_schema is {self.json_schema!r}: a schema is a JSON object")

    @property
    def is_constrained(self) -> bool:
        """Whether a schema, a regex or a grammar limits the answer."""
        return self.json_schema is not None or self.regex is not None or self.ebnf is not None

    def new(self, **changes: Any) -> Self:
        """Return a copy with ``changes``, validated like the constructor's arguments."""
        return type(self)(**{**vars(self), **changes})  # dataclasses.replace() takes twice the time

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """Return a copy whose ``stop_token_ids`` include the tokenizer's end and pad ids."""
        ids = list(self.stop_token_ids or [])
        for extra in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if extra is not None and extra not in ids:
                ids.append(extra)
        return self.new(stop_token_ids=ids)

    def to_openai_args_dict(
        self, exclude_args: Sequence[str] | None = None, api_format: str = "completions"
    ) -> dict[str, Any]:
        """Return the keyword arguments of an OpenAI client's ``create``, or of ``ModelSettings`` of its Agents SDK
        (``api_format`` "openai-agents"), without the fields ``exclude_args``; raises KeyError for another format."""
        biases = None if self.logit_bias is None else {str(token): bias for token, bias in self.logit_bias.items()}
        named = {
            "n_samples": ("n", self.n_samples),
            "max_new_tokens": (_LENGTHS[api_format], self.max_new_tokens),
            "temperature": ("temperature", self.effective_temperature),
            "top_p": ("top_p", self.top_p),
            "stop": ("stop", self.stop),
            "frequency_penalty": ("frequency_penalty", self.frequency_penalty),
            "presence_penalty": ("presence_penalty", self.presence_penalty or None),
            "logit_bias": ("logit_bias", biases),
            "seed": ("seed", self.seed),
        }
        return {
            to: value for key, (to, value) in named.items() if key not in (exclude_args or ()) and value is not None
        }

    @property
    def is_truncated(self) -> bool:
        """Whether top_p, top_k or min_p limits which tokens are sampled."""
        return not self.greedy and (self.top_p < 1 or self.top_k is not None or self.min_p > 0)

    @property
    def effective_temperature(self) -> float:
        """Temperature sent to the server: 0 if ``greedy``."""
        return 0.0 if self.greedy else self.temperature


_frozen = GenerationHyperparameters.__setattr__
GenerationHyperparameters.__setattr__ = (  # type: ignore[method-assign]  # AReaL's workflows set n_samples
    lambda self, name, value: (object.__setattr__ if name == "n_samples" else _frozen)(self, name, value)
)
