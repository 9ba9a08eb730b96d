"""The options of a request for answers: their names, types, limits and defaults.

Guarantees that no setting of an agent is silently ignored: an unknown option or an unsupported value is an error that
names it. Options that change the distribution of tokens are None if not given; ``chat_sampling`` decides whether they
apply.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from areal_lite.agents.session.request_fields import RequestError, short, wrong

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
READ_ELSEWHERE = {
    "messages", "tools", "chat_template_kwargs", "response_format", "tool_choice", "regex", "ebnf", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
}  # fmt: skip
"""Fields of a chat completion that :mod:`.chat_request` and :mod:`.answer_grammar` read."""
IGNORED = {
    "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier",
    "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Fields without effect on the tokens: accepted and ignored."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "json_schema": "use response_format or guided_json",
    "prediction": "the model samples every token",
    "web_search_options": "no tool runs here; declare a function in tools",
    "stop": "send a string or up to 4 strings",
    "stop_token_ids": "send a list of token ids",
    "logit_bias": "send an object of token ids and numbers from -100 to 100",
    **dict.fromkeys(("modalities", "add_generation_prompt", "continue_final_message", "echo"), "leave it out"),
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
    """Options by their names in a chat completion; the other APIs give theirs by these names.

    None where nothing is given: pydantic copies a default that can change, which took half of a request's checks.
    """

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
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["auto", "none"] = "auto"
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    echo: Literal[False] = False

    @property
    def agent(self) -> str:
        """Name that the client gives to the agent which calls; empty without one."""
        name = self.metadata.get("agent") if isinstance(self.metadata, dict) else None
        return name if isinstance(name, str) else ""

    @property
    def stream_usage(self) -> bool:
        """True if a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.get("include_usage") is True

    @property
    def sampling(self) -> dict[str, float]:
        """The given options that change the distribution."""
        return {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}


def request_options(body: dict[str, Any]) -> RequestOptions:
    """Return the options of a body; null is an option left out; raises RequestError for the first wrong one."""
    given = {
        name: value
        for name, value in body.items()
        if value is not None and name not in READ_ELSEWHERE and name not in IGNORED
    }
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
