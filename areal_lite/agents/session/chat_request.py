"""Check and normalise the body of a chat completion, which the other APIs turn theirs into. Pure: nothing here knows
tokens or sessions. Its options are in ``request_options``."""

import functools
import json
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self
import orjson
from areal_lite.agents.parsers.call_json import dump_json
from areal_lite.agents.session.answer_grammar import answer_grammar
from areal_lite.agents.session.request_fields import RequestError, joined_text, json_bytes, short, typed, wrong
from areal_lite.agents.session.request_images import ImagePart, RequestImages, check_count, image_parts
from areal_lite.agents.session.request_options import RequestOptions, request_options

MAX_TOOLS = 128
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_RESERVED_TEMPLATE_NAMES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                            "tokenize", "chat_template", "conversation"}  # fmt: skip
_SPACE = b" \t\r\n"
_MESSAGES = b'"messages"'
_FIELD = re.compile(rb"(?<!\\)" + _MESSAGES + rb"[ \t\r\n]*:[ \t\r\n]*\[")  # in a string, its quotes are escaped
_BEFORE_MESSAGE = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*(?=[^\s\]])")
_DECODER = json.JSONDecoder()


class RequestBodyCache(NamedTuple):
    """A JSON body up to the end of its last message. A body that begins like it is read without parsing these messages
    again, as bytes that are equal up to the end of a message hold equal messages."""

    text: bytes
    start: int
    """Index at which its messages begin."""

    def cut_from(self, body: bytes) -> bytes | None:
        """Return ``body`` without these messages; None if it does not begin with them or names the field again."""
        end = len(self.text)
        if not body.startswith(self.text) or body.find(_MESSAGES, end) >= 0:
            return None
        rest = body[end:].lstrip(_SPACE)
        has_more = rest.startswith(b",")
        rest = rest.removeprefix(b",").lstrip(_SPACE)
        if has_more == rest.startswith(b"]"):  # a value that goes on, or a comma too many
            return None
        return self.text[: self.start] + rest


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """The checked messages of a request; a later request that begins with them checks only its new ones."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """For the chat template: call arguments are parsed; content is text or a list of texts and :class:`ImagePart`."""
    keys: list[Hashable] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)
    """The messages as they were sent, without pixels."""
    body: bytes = b""
    """The HTTP body, if the API is chat completions and it has no images."""
    known: RequestBodyCache | None = None
    """The body's beginning in the request that it extends."""
    path: list[Hashable] = field(default_factory=list)
    """Nodes of the history: those of the conversation that it extends; all of them once it is recorded."""

    def extended(self, raw: list[Any], body: bytes) -> "Conversation":
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
    prompts: Sequence[str | list[int]] = ()
    """Prompts without chat template, as text or ids, instead of messages."""
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
    def choices(self) -> list[Self]:
        """The request of each answer, in the order of their indices: it has one prompt at most."""
        requests = [replace(self, prompts=[prompt]) for prompt in self.prompts] if len(self.prompts) > 1 else [self]
        return [request for request in requests for _ in range(self.options.n)]

    @property
    def begun(self) -> str | None:
        """The beginning of the answer, the last message; None if the answer begins with the model's first token."""
        return self.messages[-1]["content"] if self.options.continue_final_message else None

    def without_last(self) -> Self:
        """Return the request without its last message."""
        whole = self.conversation
        rest = Conversation(messages=whole.messages[:-1], keys=whole.keys[:-1], raw=whole.raw[:-1])
        options = self.options.model_copy(update={"continue_final_message": False})
        return replace(self, conversation=rest, extends=None, options=options)

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
    If that is known, it is ``extends``, and ``body`` has only the messages after it. ``sent`` is the whole body."""
    options = request_options(body)
    template_kwargs = options.chat_template_kwargs or {}
    if taken := _RESERVED_TEMPLATE_NAMES & template_kwargs.keys():
        raise RequestError(f"chat_template_kwargs sets {sorted(taken)}: leave these out", param="chat_template_kwargs")
    tools = _tools(body.get("tools"))
    raw = body.get("messages")
    if not isinstance(raw, list) or not (raw or extends):
        raise wrong("messages", raw, "send a list of at least one")
    raw = (images or RequestImages(None)).take(raw, len(extends.raw) if extends else 0)
    if extends is None and (extends := find(raw)) is not None:
        raw = raw[len(extends.raw) :]
    conversation = (extends or Conversation()).extended(raw, sent)
    check_count(conversation.messages)
    last = conversation.messages[-1]
    if options.continue_final_message:
        if last["role"] != "assistant" or not last["content"] or "tool_calls" in last or "reasoning_content" in last:
            raise wrong("continue_final_message", True, "send the text of an answer as the last message, and only that")
    elif not options.add_generation_prompt:
        raise wrong("add_generation_prompt", False, "leave it out, or set continue_final_message")
    return ChatRequest(
        conversation=conversation,
        tools=tools,
        template_kwargs=template_kwargs,
        parse_tools=tools is not None and body.get("tool_choice") != "none",
        grammar=answer_grammar(body, tools),
        options=options,
    )


def parse_message(raw: Any, where: str) -> tuple[dict[str, Any], tuple[Hashable, ...]]:
    """Return one message for the chat template, and its key: of role, text, tool calls and, fourth, reasoning. In keys,
    null, missing and "" are equal, and white space around an assistant's text and in its arguments does not count."""
    if not isinstance(raw, dict):
        raise wrong(where, raw, "send an object with role and content")
    if (role := _ROLES.get(str(raw.get("role")))) is None:
        raise wrong(f"{where}.role", raw.get("role"), f"one of {', '.join(_ROLES)}")
    content, content_key = _content(raw.get("content"), f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := typed(f"{where}.{name}", raw.get(name), str, "send a string")) is not None:
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
    parts = [p if isinstance(p, ImagePart) else {"type": "text", "text": joined_text([p], where)} for p in raw]
    return parts, tuple((part["type"], part.get("text") or part.get("digest")) for part in parts)


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
        if not isinstance(name, str) or not isinstance(arguments, str | dict | list | float | int | None):
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
        typed(f"tools[{index}].function.parameters", function.get("parameters"), dict, "send a JSON schema, an object")
    return raw


def _canonical(value: Any) -> bytes:
    return json_bytes(value, orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def cache_request_body(body: bytes, known: RequestBodyCache | None = None) -> RequestBodyCache | None:
    """Return the beginning of a valid JSON object with at least one message; ``known`` saves time if it begins so. None
    if the field ``messages`` comes twice, or its messages are nested too deeply to find their ends."""
    if known is not None and body.startswith(known.text):
        start, end = known.start, len(known.text)
    elif (field := _FIELD.search(body)) is not None and _is_top_level(body[: field.start()]):
        start = end = field.end()
    else:
        return None
    rest = body[end:].decode("latin-1")  # a character for each byte
    at = 0
    try:
        while (before := _BEFORE_MESSAGE.match(rest, at)) is not None:
            _, at = _DECODER.raw_decode(rest, before.end())
    except (ValueError, RecursionError):
        return None
    return None if body.find(_MESSAGES, end + at) >= 0 else RequestBodyCache(body[: end + at], start)


def _is_top_level(before: bytes) -> bool:
    """Return whether a field that follows is one of the body's object."""
    try:
        orjson.loads(before + b'"":0}')
    except ValueError:
        return False
    return True
