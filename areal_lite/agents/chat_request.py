"""Check and normalise the body of a chat completion. Pure: nothing here knows tokens or sessions.

Guarantees that no setting of an agent is silently ignored: an unsupported value is an error that names its field.
``ChatRequest.sampling`` keeps temperature, top_p and penalties; ``chat_sampling`` decides whether they apply.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson

T = TypeVar("T")

MAX_MESSAGES = 512
MAX_TOOLS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_IGNORED = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort",
    "safety_identifier", "service_tier", "store", "stream_options", "user", "verbosity",
}  # fmt: skip
"""Fields without effect on the tokens: accepted and ignored."""
_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0, 2), "top_p": (1e-6, 1), "top_k": (-1, 2**31), "min_p": (0, 1),
    "frequency_penalty": (-2, 2), "presence_penalty": (-2, 2), "repetition_penalty": (0, 2),
}  # fmt: skip
"""Fields that change the sampling distribution, with their limits."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "tool_choice": ("auto", "none"),
}
"""Fields accepted with these values only."""
_HINTS = {
    "n": "one answer per call; call again, or raise rollout.group_size, for more",
    "stream": "streaming is not supported; leave stream out and read the whole answer",
    "top_logprobs": "only the log-prob of the sampled token is known; leave top_logprobs out",
    "tool_choice": "the model's choice cannot be forced; use 'auto' or 'none'",
    "functions": "use tools",
}
_READ = {
    "messages", "model", "tools", "max_tokens", "max_completion_tokens", "stop", "seed", "logprobs",
    "chat_template_kwargs",
}  # fmt: skip
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                            "tokenize", "chat_template", "conversation"}  # fmt: skip


class RequestError(Exception):
    """An invalid request, answered with HTTP ``status`` and OpenAI's error object."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return ``{"error": {message, type, param, code}}``."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One checked chat completion request."""

    messages: list[dict[str, Any]]
    """Messages for the chat template: content is a string, arguments of tool calls are parsed."""
    keys: list[Hashable]
    """One key per message; equal keys mean equal messages."""
    model: str = "default"
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, such as ``enable_thinking``."""
    parse_tools: bool = False
    """Whether to parse tool calls in the answer."""
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    logprobs: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling parameters that the agent set: temperature, top_p, ..."""

    @property
    def render_key(self) -> bytes:
        """Key of everything besides the messages that changes the rendered prompt."""
        return _canonical([self.tools, self.template_kwargs]) if self.tools or self.template_kwargs else b""


def parse_chat_request(body: Any) -> ChatRequest:
    """Return the checked request.

    Raises:
        RequestError: With status 400; the message gives field, value and fix.
    """
    if not isinstance(body, dict):
        raise RequestError(f"the body is a {type(body).__name__}: send a JSON object with 'messages'")
    sampling = _sampling(body)
    tools = _tools(body.get("tools"))
    messages, keys = _messages(body.get("messages"))
    limits = [_whole(name, body.get(name), 1) for name in ("max_completion_tokens", "max_tokens")]
    model = _typed("model", body.get("model"), str, "send any string")
    logprobs = _typed("logprobs", body.get("logprobs"), bool, "send true or false")
    return ChatRequest(
        messages=messages,
        keys=keys,
        model=model or "default",
        tools=tools,
        template_kwargs=_template_kwargs(body.get("chat_template_kwargs")),
        parse_tools=tools is not None and body.get("tool_choice") != "none",
        max_tokens=limits[0] or limits[1],
        stop=_stop(body.get("stop")),
        seed=_whole("seed", body.get("seed"), -(2**63)),
        logprobs=bool(logprobs),
        sampling=sampling,
    )


def _sampling(body: dict[str, Any]) -> dict[str, float]:
    """Return the sampling parameters of a body; raise on unknown fields and unsupported values."""
    sampling: dict[str, float] = {}
    for name, value in body.items():
        if name in _READ or name in _IGNORED or value is None:
            continue
        if name in _SAMPLING:
            sampling[name] = _number(name, value, *_SAMPLING[name])
        elif name not in _ALLOWED:
            raise RequestError(
                f"unknown field {_short(name)}: leave it out", param=name[:80], code="unknown_parameter"
            )
        elif value not in _ALLOWED[name] or (isinstance(value, bool) and name in ("n", "top_logprobs")):
            raise RequestError(f"{name} is {_short(value)}: {_HINTS.get(name, 'leave it out')}", param=name)
    return sampling


def _messages(raw: Any) -> tuple[list[dict[str, Any]], list[Hashable]]:
    """Return the messages for the chat template, and their keys."""
    if not isinstance(raw, list) or not raw:
        raise RequestError(f"messages is {_short(raw)}: send a list of at least one", param="messages")
    if len(raw) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(raw)} entries: at most {MAX_MESSAGES}", param="messages")
    messages, keys = [], []
    for index, one in enumerate(raw):
        message, key = parse_message(one, f"messages[{index}]")
        messages.append(message)
        keys.append(key)
    return messages, keys


def parse_message(raw: Any, where: str) -> tuple[dict[str, Any], Hashable]:
    """Return one message for the chat template, and its key.

    Messages with equal role, text, reasoning and tool calls have equal keys. Null, missing and "" are equal; white
    space around an assistant's text and in the JSON of its arguments makes no difference.
    """
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is {_short(raw)}: send an object with role and content", param=where)
    role = _ROLES.get(str(raw.get("role")))
    if role is None:
        raise RequestError(
            f"{where}.role is {_short(raw.get('role'))}: one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    content = _text(raw.get("content"), where)
    message: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = _typed(f"{where}.{name}", raw.get(name), str, "send a string")
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


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is {_short(content)}: send a string or text parts", param=f"{where}.content"
        )
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise RequestError(
                f"{where}.content has a part of type {_short(kind)}: only text parts are supported",
                param=f"{where}.content",
            )
        parts.append(text)
    return "\n".join(parts)


def _tool_calls(raw: Any, where: str) -> tuple[list[dict[str, Any]], Hashable]:
    if raw is None or raw == []:
        return [], ()
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise RequestError(f"{where} is {_short(raw)}: send a list of at most {MAX_TOOLS} calls", param=where)
    calls, keys = [], []
    for call in raw:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
            raise RequestError(
                f"{where} has {_short(call)}: send id, function.name, function.arguments", param=where
            )
        if isinstance(arguments, str):
            with contextlib.suppress(
                ValueError, RequestError
            ):  # not JSON, or too deep: the template gets the text
                parsed = orjson.loads(arguments)
                _canonical(parsed)
                arguments = parsed
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        if isinstance(call.get("id"), str):
            calls[-1]["id"] = call["id"]
        keys.append((name, _canonical(arguments)))
    return calls, tuple(keys)


def _tools(raw: Any) -> list[dict[str, Any]] | None:
    if raw is None or raw == []:
        return None
    if not isinstance(raw, list) or len(raw) > MAX_TOOLS:
        raise RequestError(
            f"tools is {_short(raw)}: send a list of at most {MAX_TOOLS} functions", param="tools"
        )
    for index, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"tools[{index}] is {_short(tool)}: send {{'type': 'function', 'function': {{'name': ...}}}}",
                param=f"tools[{index}]",
            )
    return raw


def _template_kwargs(raw: Any) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict) or not all(
        isinstance(v, str | int | float | bool | None) for v in raw.values()
    ):
        raise RequestError(
            f"chat_template_kwargs is {_short(raw)}: send an object of plain values",
            param="chat_template_kwargs",
        )
    if taken := _RESERVED_TEMPLATE_NAMES & raw.keys():
        raise RequestError(
            f"chat_template_kwargs sets {sorted(taken)}: leave these out", param="chat_template_kwargs"
        )
    return raw


def _stop(raw: Any) -> list[str]:
    stop = [raw] if isinstance(raw, str) else [] if raw is None else raw
    if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
        raise RequestError(f"stop is {_short(raw)}: send a string or up to 4 strings", param="stop")
    return stop


def _typed(name: str, value: Any, kind: type[T], hint: str) -> T | None:
    if value is not None and not isinstance(value, kind):
        raise RequestError(f"{name} is {_short(value)}: {hint}", param=name)
    return value


def _whole(name: str, value: Any, minimum: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise RequestError(
            f"{name} is {_short(value)}: send a whole number of at least {minimum}", param=name
        )
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} is {_short(value)}: send a number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}: it must be between {low} and {high}", param=name)
    return value


def _canonical(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        raise RequestError("the tools or arguments are nested too deeply: at most 250 levels") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
