"""How tokens are sampled: one immutable record that travels with every request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from areal_lite.api.schema import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerationHyperparameters:
    """Sampling parameters of one request."""

    n_samples: Annotated[int, Field(ge=1)] = 1
    """1 in a run, where rollout.group_size says how many episodes a row has; more are for a workflow's own records."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16384
    """Most tokens one answer may have."""

    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before which no stop token ends the answer. Below them the server samples from fewer tokens than
    its log-probs are of."""

    max_tokens: Annotated[int, Field(ge=1)] = 32768
    """Most tokens of prompt and answer together."""

    greedy: bool = False
    """Take the likeliest token; temperature, top_p and top_k are then without effect."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 is greedy. The trainer divides by the same number."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus of this probability mass; 1 is off. Leave it and top_k off while training: the server's log-probs, and
    the trainer's, are of all tokens."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """Only the k likeliest tokens; null is off."""

    stop: list[str] | None = None
    """Strings that end the answer."""

    stop_token_ids: list[int] | None = None
    """Token ids that end the answer, besides the model's own."""

    ignore_eos: bool = False
    """Go on past the model's end token, to ``max_new_tokens``."""

    skip_special_tokens: bool = True
    """Leave special tokens out of text; ids are never changed."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Lowers a token's logit by this times its count so far; 0 is off. The trainer knows nothing of it."""

    seed: int | None = None
    """Seed of this request's sampling, for servers that honour it (SGLang does not); null is random."""

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with ``changes``; an unknown name or bad value raises like the constructor."""
        return dataclasses.replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> GenerationHyperparameters:
        """Return a copy whose ``stop_token_ids`` also hold the tokenizer's end and pad ids."""
        ids = list(self.stop_token_ids or [])
        for extra in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            if extra is not None and extra not in ids:
                ids.append(extra)
        return self.new(stop_token_ids=ids)

    def to_openai_args_dict(
        self,
        exclude_args: Sequence[str] = (),
        api_format: Literal["completions", "responses"] = "completions",
    ) -> dict[str, Any]:
        """Return what an OpenAI client's ``create`` takes of this, by OpenAI's names.

        Args:
            exclude_args: Names of this record's fields to leave out.
            api_format: Which ``create``; they name the answer's length differently.
        """
        length = "max_completion_tokens" if api_format == "completions" else "max_output_tokens"
        named = {
            "n_samples": ("n", self.n_samples),
            "max_new_tokens": (length, self.max_new_tokens),
            "temperature": ("temperature", self.effective_temperature),
            "top_p": ("top_p", self.top_p),
            "stop": ("stop", self.stop),
            "frequency_penalty": ("frequency_penalty", self.frequency_penalty),
            "seed": ("seed", self.seed),
        }
        return {
            name: value
            for key, (name, value) in named.items()
            if key not in exclude_args and value is not None
        }

    @property
    def effective_temperature(self) -> float:
        """The temperature the server is asked for: 0 where ``greedy``."""
        return 0.0 if self.greedy else self.temperature
