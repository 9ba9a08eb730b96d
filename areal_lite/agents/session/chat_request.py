"""Check and normalise the body of a chat completion. Pure: nothing here knows tokens or sessions.

The other APIs turn their bodies into this one. Its options are in ``request_options``.
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
    joined_text,
    json_bytes,
    short,
    typed,
    wrong,
)
from areal_lite.agents.session.request_images import ImagePart, RequestImages, check_count, image_parts
from areal_lite.agents.session.request_options import RequestOptions, request_options

MAX_TOOLS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                            "tokenize", "chat_template", "conversation"}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """The checked messages of a request; a later request that begins with them checks only its new ones."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages for the chat template: arguments of tool calls are parsed; content is a string, or a list of texts and
    :class:`ImagePart`."""
    keys: list[Hashable] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)
    """The messages as they were sent, without pixels."""
    body: bytes = b""
    """The HTTP body, if the API is chat completions and it has no images."""
    known: RequestBodyCache | None = None
    """The body's beginning in the request that it extends."""
    path: list[Hashable] = field(default_factory=list)
    """Nodes of the history: those of the conversation that it extends; all of them once it is recorded."""

    def extended(self, raw: list[Any], body: bytes) -> Conversation:
        """Check the messages ``raw`` and return the conversation with them at its end."""
        parsed = [parse_message(message, f"messages[{len(self.raw) + i}]") for i, message in enumerate(raw)]
        messages = self.messages + [message for message, _ in parsed]
        return Conversation(
            messages=messages,
            keys=self.keys + [key for _, key in parsed],
            raw=self.raw + raw,
            body=b"" if image_parts(messages) else body,
            known=self.known_body,
            path=self.path,
        )

    @functools.cached_property
    def known_body(self) -> RequestBodyCache | None:
        """The beginning of the body, for requests whose bodies begin alike."""
        return cache_request_body(self.body, self.known) if self.body else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One checked request for answers, from whichever API."""

    conversation: Conversation = field(default_factory=Conversation)
    extends: Conversation | None = None
    """The earlier conversation that it begins with."""
    prompt: str | list[int] | None = None
    """A prompt without chat template, as text or ids, instead of messages."""
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template, such as ``enable_thinking``."""
    parse_tools: bool = False
    grammar: dict[str, str] = field(default_factory=dict)
    """Grammar of the answer by kind, ``json_schema``, ``regex`` or ``ebnf``; empty if free."""
    options: RequestOptions

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.conversation.messages

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
    images: RequestImages | None = None,
) -> ChatRequest:
    """Return the checked request; ``find`` finds what an earlier one has checked already, ``images`` takes its images.

    If that is known, it is ``extends``, and ``body`` has only the messages after it. ``sent`` is the whole body as it
    was sent, to recognise later bodies by.
    """
    options = request_options(body)
    tools = _tools(body.get("tools"))
    tool_choice = body.get("tool_choice")
    raw = body.get("messages")
    if not isinstance(raw, list) or not (raw or extends):
        raise wrong("messages", raw, "send a list of at least one")
    raw = (images or RequestImages(None)).take(raw, len(extends.raw) if extends else 0)
    if extends is None and (extends := find(raw)) is not None:
        raw = raw[len(extends.raw) :]
    conversation = (extends or Conversation()).extended(raw, sent)
    check_count(conversation.messages)
    return ChatRequest(
        conversation=conversation,
        extends=extends,
        tools=tools,
        template_kwargs=_template_kwargs(body.get("chat_template_kwargs")),
        parse_tools=tools is not None and tool_choice != "none",
        grammar=answer_grammar(body, tools),
        options=options,
    )


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
    content, content_key = _content(raw.get("content"), f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        value = typed(f"{where}.{name}", raw.get(name), str, "send a string")
        if value is not None:
            message[name] = value
    if role != "assistant":
        return message, (role, content_key, message.get("name"), message.get("tool_call_id"))
    if not isinstance(content, str):
        raise RequestError(f"{where} is an answer with an image: models answer with text", param=where)
    calls, call_keys = _tool_calls(raw.get("tool_calls"), f"{where}.tool_calls")
    if calls:
        message["tool_calls"] = calls
    reasoning = raw.get("reasoning_content") or raw.get("reasoning")
    if not isinstance(reasoning, str):
        return message, (role, content.strip(), call_keys)
    message["reasoning_content"] = reasoning
    return message, (role, content.strip(), call_keys, reasoning.strip())


def _content(raw: Any, where: str) -> tuple[str | list[Any], Hashable]:
    """Return the content for the chat template, and its key: of an image, its digest."""
    if not isinstance(raw, list) or not any(isinstance(part, ImagePart) for part in raw):
        text = joined_text(raw, where)
        return text, text
    parts = [
        part if isinstance(part, ImagePart) else {"type": "text", "text": joined_text([part], where)} for part in raw
    ]
    return parts, tuple((part["type"], part.get("text") or part.get("digest")) for part in parts)


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


def _canonical(value: Any) -> bytes:
    return json_bytes(value, orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
