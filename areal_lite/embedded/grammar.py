"""Constrained decoding: which ids may follow, so that an answer satisfies a JSON schema, a regex or a grammar.

Guarantees that an answer that ends by itself satisfies its constraint. Imports llguidance with the first one.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any
import numpy as np
import numpy.typing as npt
from areal_lite.embedded.bad_request import invalid_value
from areal_lite.embedded.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_JSON_LAYOUT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as SGLang's and vLLM's flags give: a small model fills its budget with free white space."""


class Grammar:
    """The constraint of one answer, at the position after its latest id."""

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> "Grammar":
        """Return a copy that advances on its own."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return ``[vocab]``, True for the ids that may follow; an end id may follow a complete answer."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def advance(self, ids: list[int]) -> str | None:
        """Move past these ids; return why that is impossible, or None."""
        # One by one: ``consume_tokens`` refuses an end id after a complete answer.
        for token in ids:
            if not self._matcher.consume_token(token):
                return self._matcher.get_error().partition("\n")[0] or f"id {token} is not allowed"
        return None

    @property
    def is_complete(self) -> bool:
        """True if only an end id may follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Turns constraints into grammars over one tokenizer. For one thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """Prepare; the first constraint loads the library and its view of the vocabulary, about a second. The
        tokenizer is a fast one; ``eos_ids`` may follow a complete answer."""
        self._hf_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(64)(self._compile)

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """Return a request's grammar, None if unconstrained; BadRequest if it is invalid or llguidance is missing."""
        constraint = params.constraint
        return None if constraint is None else self._compiled(*constraint).copy()

    def _compile(self, name: str, text: str) -> Grammar:
        try:
            from llguidance import LLMatcher, grammar_from, hf
        except ImportError:
            raise invalid_value(
                f"{name} needs llguidance on the server: pip install llguidance, or leave {name} out."
            ) from None
        try:
            if self._tokenizer is None:
                eos = sorted(self._eos_ids) or None
                self._tokenizer = hf.from_tokenizer(self._hf_tokenizer, n_vocab=self._vocab_size, eos_token=eos)
            if name == "json_schema":
                grammar = LLMatcher.grammar_from_json_schema(text, defaults=_JSON_LAYOUT)
            else:
                grammar = grammar_from("gbnf" if name == "ebnf" else "regex", text)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        except Exception as error:  # the library raises many kinds for texts it cannot read
            raise invalid_value(f"{name} cannot be used: {error}") from error
        if matcher.is_error():
            raise invalid_value(f"{name} cannot be used: {matcher.get_error()}")
        return Grammar(matcher, self._vocab_size)
