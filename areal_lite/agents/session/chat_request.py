"""Check and normalise the body of a chat completion. Pure: nothing here knows tokens or sessions.

Guarantees that no setting of an agent is silently ignored: an unsupported value is an error that names its field.
``ChatRequest.sampling`` keeps temperature, top_p and penalties; ``chat_sampling`` decides whether they apply.
The other APIs turn their bodies into this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal_lite.agents.parsers.call_json import dump_json
from areal_lite.agents.session.answer_grammar import answer_grammar
from areal_lite.agents.session.request_body_cache import RequestBodyCache, cache_request_body
from areal_lite.agents.session.request_fields import (
    RequestError,
    is_token_id,
    joined_text,
    json_bytes,
    number,
    short,
    typed,
    whole,
    wrong,
)

MAX_TOOLS = 128
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Fields without effect on the tokens: accepted and ignored."""
_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (1e-6, 1), "top_k": (-1, 2**31), "min_p": (0, 1),
    "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2), "repetition_penalty": (0, 2),
}  # fmt: skip
"""Fields that change the sampling distribution, with their limits."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
}
"""Fields accepted with these values only."""
_HINTS = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "json_schema": "use response_format or guided_json",
    "prediction": "the model samples every token",
    "web_search_options": "no tool runs here; declare a function in tools",
}
_READ = {
    "messages", "model", "tools", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs",
    "chat_template_kwargs", "n", "stream", "stream_options", "top_logprobs", "logit_bias", "response_format",
    "tool_choice", "regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structured_outputs", "stop_token_ids", "min_tokens", "ignore_eos",
}  # fmt: skip
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                            "tokenize", "chat_template", "conversation"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """The checked messages of an earlier request; a request that begins with them checks only its new ones."""

    body: bytes
    """The request's body; empty if the API is not chat completions."""
    known: RequestBodyCache | None
    """The body's beginning in the request that it extends."""
    raw: list[Any]
    messages: list[dict[str, Any]]
    keys: list[Hashable]
    path: list[Hashable]

    @functools.cached_property
    def known_body(self) -> RequestBodyCache | None:
        """The beginning of the body, for requests whose bodies begin alike."""
        return cache_request_body(self.body, self.known) if self.body else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One checked request for answers, from whichever API."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages for the chat template: content is a string, arguments of tool calls are parsed."""
    keys: list[Hashable] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)
    body: bytes = b""
    """The HTTP body, if the API is chat completions."""
    extends: Conversation | None = None
    prompt: str | list[int] | None = None
    """A prompt without chat template, as text or ids, instead of messages."""
    model: str = "default"
    agent: str = ""
    """Name that the client gives to the agent which calls; empty without one."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, such as ``enable_thinking``."""
    parse_tools: bool = False
    grammar: dict[str, str] = field(default_factory=dict)
    """Grammar of the answer by kind, ``json_schema``, ``regex`` or ``ebnf``; empty if free."""
    n: int = 1
    """Answers to sample, each a branch of the conversation."""
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    stream: bool = False
    stream_usage: bool = False
    """True if a stream ends with a chunk of usage."""
    logprobs: bool = False
    top_logprobs: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def render_key(self) -> bytes:
        """Key of everything besides the messages that changes the rendered prompt."""
        return _canonical([self.tools, self.template_kwargs]) if self.tools or self.template_kwargs else b""


def parse_chat_request(
    body: dict[str, Any],
    find: Callable[[list[Any]], Conversation | None] = lambda raw: None,
    *,
    extends: Conversation | None = None,
    sent: bytes = b"",
) -> ChatRequest:
    """Return the checked request; ``find`` finds what an earlier one has checked already.

    If that is known, it is ``extends``, and ``body`` has only the messages after it. ``sent`` is the whole body as it
    was sent, to recognise later bodies by.
    """
    options = request_options(body)
    tools = _tools(body.get("tools"))
    tool_choice = body.get("tool_choice")
    raw = body.get("messages")
    if not isinstance(raw, list) or not (raw or extends):
        raise wrong("messages", raw, "send a list of at least one")
    if extends is None and (extends := find(raw)) is not None:
        raw = raw[len(extends.raw) :]
    known = len(extends.raw) if extends else 0
    new = [parse_message(message, f"messages[{known + index}]") for index, message in enumerate(raw)]
    messages, keys = [message for message, _ in new], [key for _, key in new]
    return ChatRequest(
        messages=extends.messages + messages if extends else messages,
        keys=extends.keys + keys if extends else keys,
        raw=extends.raw + raw if extends else raw,
        body=sent,
        extends=extends,
        tools=tools,
        template_kwargs=_template_kwargs(body.get("chat_template_kwargs")),
        parse_tools=tools is not None and tool_choice != "none",
        grammar=answer_grammar(body, tools),
        logprobs=bool(typed("logprobs", body.get("logprobs"), bool, "send true or false")),
        top_logprobs=whole("top_logprobs", body.get("top_logprobs"), 0, MAX_TOP_LOGPROBS) or 0,
        **options,
    )


def request_options(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a :class:`ChatRequest` that all APIs share."""
    sampling: dict[str, float] = {}
    options: dict[str, Any] = {"sampling": sampling}
    for name, value in body.items():
        if value is None:
            continue
        if name in _OPTIONS:
            field_name, check = _OPTIONS[name]
            options[field_name] = check(value)
        elif name in _SAMPLING:
            sampling[name] = number(name, value, *_SAMPLING[name])
        elif name in _ALLOWED:
            if value not in _ALLOWED[name]:
                raise wrong(name, value, f"{_HINTS.get(name, 'leave it out')}")
        elif name not in _READ and name not in _IGNORED:
            hint = _HINTS.get(name, "leave it out")
            raise RequestError(f"unknown field {short(name)}: {hint}", param=name[:80], code="unknown_parameter")
    if body.get("max_completion_tokens") is not None:
        options["max_tokens"] = whole("max_completion_tokens", body["max_completion_tokens"], 1)
    return options


def _agent(metadata: Any) -> str:
    agent = metadata.get("agent") if isinstance(metadata, dict) else None
    return agent if isinstance(agent, str) else ""


def _flag(name: str) -> Callable[[Any], bool | None]:
    return lambda value: typed(name, value, bool, "send true or false")


def _has_usage(stream_options: Any) -> bool:
    options = typed("stream_options", stream_options, dict, "send an object") or {}
    return options.get("include_usage") is True


def parse_message(raw: Any, where: str) -> tuple[dict[str, Any], Hashable]:
    """Return one message for the chat template, and its key.

    Messages with equal role, text, reasoning and tool calls have equal keys. Null, missing and "" are equal; white
    space around an assistant's text and in the JSON of its arguments makes no difference.
    """
    if not isinstance(raw, dict):
        raise wrong(where, raw, "send an object with role and content")
    role = _ROLES.get(str(raw.get("role")))
    if role is None:
        raise wrong(f"{where}.role", raw.get("role"), f"one of {', '.join(_ROLES)}")
    content = joined_text(raw.get("content"), f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = typed(f"{where}.{name}", raw.get(name), str, "send a string")
        if value is not None:
            message[name] = value
    if role != "assistant":
        return message, (role, content, message.get("name"), message.get("tool_call_id"))
    calls, call_keys = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = calls
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if not isinstance(reasoning, str):
        return message, (role, content.strip(), call_keys)
    message["reasoning_content"] = reasoning
    return message, (role, content.strip(), call_keys, reasoning.strip())


def without_reasoning(key: Hashable) -> Hashable:
    """Return the key of an assistant message whose reasoning the client leaves out."""
    assert isinstance(key, tuple)
    return key[:3]


def _tool_calls(raw: Any, where: str) -> tuple[list[dict[str, Any]], Hashable]:
    if raw is None or raw == []:
        return [], ()
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise wrong(where, raw, f"send a list of at most {MAX_TOOLS} calls")
    calls, keys = [], []
    for call in raw:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
            raise RequestError(f"{where} has {short(call)}: send id, function.name, function.arguments", param=where)
        arguments, key = _arguments(arguments)
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        if isinstance(call.get("id"), str):
            calls[-1]["id"] = call["id"]
        keys.append((name, key))
    return calls, tuple(keys)


def _arguments(given: Any) -> tuple[Any, bytes]:
    """Return a call's arguments for the chat template, and their key: text if they are not JSON or nested deeply."""
    try:
        value = orjson.loads(given) if isinstance(given, str) else given
        return value, _canonical(value)
    except (ValueError, RequestError) as error:
        text = given if isinstance(given, str) else dump_json(given)
        if text is None:
            raise RequestError("the arguments of a tool call are nested too deeply: at most 500 levels") from error
        return text, _canonical(text)


def _tools(raw: Any) -> list[dict[str, Any]] | None:
    if raw is None or raw == []:
        return None
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise wrong("tools", raw, f"send a list of at most {MAX_TOOLS} functions")
    for index, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"tools[{index}]", tool, "send {'type': 'function', 'function': {'name': ...}}")
    return raw


def _template_kwargs(raw: Any) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(isinstance(v, str | int | float | bool | None) for v in raw.values()):
        raise wrong("chat_template_kwargs", raw, "send an object of plain values")
    if taken := _RESERVED_TEMPLATE_NAMES & raw.keys():
        raise RequestError(f"chat_template_kwargs sets {sorted(taken)}: leave these out", param="chat_template_kwargs")
    return raw


def _stop(raw: Any) -> list[str]:
    stop = [raw] if isinstance(raw, str) else raw
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
        raise wrong("stop", raw, "send a string or up to 4 strings")
    return stop


def _stop_token_ids(raw: Any) -> list[int]:
    if not isinstance(raw, list) or not all(is_token_id(token) for token in raw):
        raise wrong("stop_token_ids", raw, "send a list of token ids")
    return raw


def _logit_bias(raw: Any) -> dict[int, float]:
    try:
        return {int(token): number("logit_bias", value, -100, 100) for token, value in raw.items()}
    except (AttributeError, ValueError):
        raise wrong("logit_bias", raw, "send an object of token ids and numbers from -100 to 100") from None


_OPTIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "model": ("model", lambda value: typed("model", value, str, "send any string") or "default"),
    "metadata": ("agent", _agent),
    "n": ("n", lambda value: whole("n", value, 1, MAX_CHOICES)),
    "max_tokens": ("max_tokens", lambda value: whole("max_tokens", value, 1)),
    "min_tokens": ("min_tokens", lambda value: whole("min_tokens", value, 0)),
    "stop": ("stop", _stop),
    "stop_token_ids": ("stop_token_ids", _stop_token_ids),
    "ignore_eos": ("ignore_eos", _flag("ignore_eos")),
    "seed": ("seed", lambda value: whole("seed", value, -(2**63))),
    "stream": ("stream", _flag("stream")),
    "stream_options": ("stream_usage", _has_usage),
    "logit_bias": ("logit_bias", _logit_bias),
}
"""Field of :class:`ChatRequest` and check of its value, per field of a body."""


def _canonical(value: Any) -> bytes:
    return json_bytes(value, orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
