"""The options of a request for answers: their names, types, limits and defaults, and the sampling that they ask for.

Guarantees that no setting of an agent is silently ignored: an unknown option or an unsupported value is an error that
names it. An agent may shorten an answer (max_tokens, stop) and set its seed. While training, the run alone sets what
changes the distribution, because the trainer divides logits by the run's temperature; the agent's values are warned of.
"""

import functools
import logging
from typing import Annotated, Any, Literal
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from areal_lite.agents.session.request_fields import RequestError, short, wrong
from areal_lite.config.generation import GenerationHyperparameters

logger = logging.getLogger(__name__)
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
READ_ELSEWHERE = {
    "messages", "tools", "response_format", "tool_choice", "regex", "ebnf", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "structured_outputs",
}  # fmt: skip
"""Fields of a chat completion that :mod:`.chat_request` and :mod:`.answer_grammar` read."""
IGNORED = {
    "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Fields without effect on the tokens: accepted and ignored."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias",
)  # fmt: skip
"""Options that change the distribution of tokens; None if not given."""
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "json_schema": "use response_format or guided_json",
    "prediction": "the model samples every token",
    "web_search_options": "no tool runs here; declare a function in tools",
    "stop": "send a string or up to 4 strings",
    "stop_token_ids": "send a list of token ids",
    "chat_template_kwargs": "send an object of plain values",
    "logit_bias": "send an object of token ids and numbers from -100 to 100",
    **dict.fromkeys(("modalities", "echo"), "leave it out"),
}
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
"""Tokenizers raise on larger numbers."""
_Positive = Annotated[int, Field(ge=1)]
_Stops = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=4),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class RequestOptions(BaseModel):
    """Options by their names in a chat completion; the other APIs give theirs by these names. None where nothing is
    given: pydantic copies a default that can change, which took half of a request's checks."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str = "default"
    metadata: Any = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    """Answers to sample, each a branch of the conversation."""
    max_completion_tokens: _Positive | None = None
    """Goes before ``max_tokens``, its older name."""
    max_tokens: _Positive | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: _Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[float, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0, le=2)] | None = None
    logit_bias: dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None = None

    modalities: tuple[Literal["text"]] | None = Field(default=None, strict=False)
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["auto", "none"] = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message is the beginning of the answer."""
    echo: Literal[False] = False

    @property
    def agent(self) -> str:
        """Name that the client gives to the agent which calls; empty without one."""
        name = self.metadata.get("agent") if isinstance(self.metadata, dict) else None
        return name if isinstance(name, str) else ""

    def gconfig(
        self,
        run: GenerationHyperparameters,
        grammar: dict[str, str],
        *,
        choice: int,
        prompt_tokens: int,
        agent_samples: bool,
    ) -> GenerationHyperparameters:
        """Return the sampling parameters of one answer: the run's, with what the agent may change. ``choice`` is its
        index among ``n``, each with its own seed. ``agent_samples`` applies what changes the distribution."""
        room = run.max_tokens - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens and gconfig.max_tokens is {run.max_tokens}, which leaves no "
                "room for an answer: shorten the messages, or raise gconfig.max_tokens",
                param="messages",
                code="context_length_exceeded",
            )
        max_new_tokens = min(self.max_completion_tokens or self.max_tokens or room, run.max_new_tokens, room)
        changes: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": min(max(run.min_new_tokens, self.min_tokens), max_new_tokens),
            "ignore_eos": run.ignore_eos or self.ignore_eos,
            **grammar,
        }
        for name in ("stop", "stop_token_ids"):
            if asked := getattr(self, name):
                changes[name] = [*(getattr(run, name) or []), *asked]
        if (seed := run.seed if self.seed is None else self.seed) is not None:
            changes["seed"] = seed + choice
        changes |= self._distribution(run, agent_samples)
        changes = {name: value for name, value in changes.items() if getattr(run, name) != value}
        return run.new(**changes) if changes else run

    def _distribution(self, run: GenerationHyperparameters, agent_samples: bool) -> dict[str, Any]:
        given = self.model_fields_set
        asked = {name: value for name in _SAMPLING if name in given and (value := getattr(self, name)) != {}}
        used = {"temperature": run.effective_temperature, "top_k": run.top_k or -1}
        changes = {name: value for name, value in asked.items() if value != used.get(name, getattr(run, name))}
        if changes and not agent_samples:
            warn_once(", ".join(f"{name}={value}"[:80] for name, value in changes.items()))
            return {}
        if "temperature" in changes:
            changes["greedy"] = False
        if "top_k" in changes:
            changes["top_k"] = int(changes["top_k"]) if changes["top_k"] >= 1 else None
        return changes


@functools.lru_cache(maxsize=64)
def warn_once(ignored: str) -> None:
    """Warn about ignored parameters, once per process instead of once per episode."""
    logger.warning(
        "the agent sets %s: ignored, because the trainer assumes the distribution of the run's gconfig", ignored
    )


def request_options(body: dict[str, Any]) -> RequestOptions:
    """Return the options of a body; null is an option left out; raises RequestError for the first wrong one."""
    others = READ_ELSEWHERE | IGNORED
    given = {name: value for name, value in body.items() if value is not None and name not in others}
    try:
        return RequestOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        hint = _HINTS.get(name, "leave it out")
        raise RequestError(f"unknown field {short(name)}: {hint}", param=name[:80], code="unknown_parameter")
    rule = first["msg"].replace("Input should be", "it must be")
    rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    raise wrong(name, given[name], _HINTS.get(name, rule))
