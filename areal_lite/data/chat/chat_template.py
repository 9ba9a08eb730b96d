"""A chat template with its variables: renders messages, and finds what it writes at the end of an answer.

Guarantees that whatever a template, which is a program, raises comes out as a :class:`TemplateError`.
"""

import functools
import json
import os.path
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
import orjson
from areal_lite.errors import ConfigError

Message = Mapping[str, Any]
"""``role`` and ``content``; also ``tool_calls``, ``reasoning_content``, ... if the template supports them."""
PROBE = "probe-of-the-end-mark"
EndOfTurn = Literal["end_mark", "next_role"]
_CALL = {"id": "probe0001", "type": "function", "function": {"name": PROBE, "arguments": {}}}


class TemplateError(ConfigError):
    """A chat template rejected messages, which the text names."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The chat template of a tokenizer or processor with its variables."""

    tokenizer: Any
    tools: list[Any] | None
    variables: dict[str, Any]
    end_of_turn: EndOfTurn = "end_mark"
    _written: dict[tuple[int, bool], str] = field(default_factory=dict)

    def write(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the text of ``messages``, with the prompt for an answer if ``prompt``."""
        settings = {"tools": self.tools, "add_generation_prompt": prompt, **self.variables}
        try:
            return apply_chat_template(self.tokenizer, _with_arguments(messages, _parsed), settings)
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateError(
                f"the chat template cannot write messages[:{len(messages)}] ({type(error).__name__}: {error}): fix the "
                f"conversation, or use another template; they are {str(messages)[:200]}"
            ) from error

    def write_first(self, messages: Sequence[Message], count: int, *, prompt: bool = False) -> str:
        """Return the text of the first ``count`` of the conversation's messages; each is rendered once."""
        key = count, prompt
        if key not in self._written:
            self._written[key] = self.write(messages[:count], prompt=prompt)
        return self._written[key]

    def written(self, messages: Sequence[Message], count: int, mark: "EndMark | None") -> str:
        """Return the text of the first ``count`` messages; an answer at the end has its end mark."""
        own, last = self.write_first(messages, count), messages[count - 1]
        if mark is None or not mark.only_continued or last["role"] != "assistant":
            return own
        if mark.after_calls is not None:  # the next message is prompted alike, whatever the answer
            return own + (mark.after_calls if last.get("tool_calls") else mark.text)
        try:
            text = self.write([*messages[:count], {"role": "user", "content": content_like("x", messages)}])
        except ConfigError:
            return own
        text = text[: text.rindex(mark.text) + len(mark.text)] if mark.text in text else text
        # Some templates take the thoughts out of an answer once a question follows; they train from its own text.
        return text if mark.before is None or text.startswith(own) else own + mark.before + mark.text

    def end_mark(self, question: Sequence[Message]) -> "EndMark | None":
        """Return the end mark of an answer to ``question``; None if there is none."""

        def after_probe(*more: Message) -> str:
            answer = {"role": "assistant", "content": content_like(PROBE, question)}
            _, probe, end = self.write([*question, answer, *more]).rpartition(PROBE)
            if not probe:
                raise left_out("an answer", "its text")
            return end

        last = after_probe()
        user = {"role": "user", "content": content_like("x", question)}
        try:
            continued = after_probe(user)
        except ConfigError:
            continued = last
        same = os.path.commonprefix([last, continued])
        mark = next(iter(_special_tokens(self.tokenizer, last)), None)
        if mark is not None and mark not in same and mark in self.write([user], prompt=True):
            # This is the header of the next message, which some templates always write.
            return EndMark("", last[last.find(mark) :])
        if mark is None:
            mark = next(iter(_special_tokens(self.tokenizer, continued)), None)
            if mark is None:
                return None
            if mark not in self.write([user], prompt=True):
                before = continued.partition(mark)[0]
                return EndMark(mark, "", True, before=before.removeprefix(last) if before.startswith(last) else None)
            return self._next_role(question, continued) if self.end_of_turn == "next_role" else None
        if (eos := self.tokenizer.eos_token) and eos in same:
            mark = same[same.find(mark) : same.find(eos) + len(eos)] or mark
        return EndMark(mark, last.partition(mark)[2])

    def _next_role(self, question: Sequence[Message], continued: str) -> "EndMark":
        """Return what begins the message after an answer, ``continued``, and after one with calls, as an end mark."""

        def header(text: str) -> str:
            token = next(iter(_special_tokens(self.tokenizer, text)), "")
            return text[: text.find(token) + len(token)]

        after_calls = text = header(continued)
        call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        result = {"role": "tool", "tool_call_id": _CALL["id"], "name": PROBE, "content": content_like("x", question)}
        with suppress(ConfigError):  # the template writes no calls
            after_calls = header(self.write([*question, call, result]).removeprefix(self.write([*question, call])))
        return EndMark(text, "", True, after_calls)


class EndMark(NamedTuple):
    """The end that a template writes after an answer."""

    text: str
    """A special token and, if the template always writes an EOS token later, all up to that; empty if there is none."""
    rest: str  # text after the mark in a conversation that ends with an answer
    only_continued: bool = False  # True if it is written only once another message follows
    after_calls: str | None = None  # under the rule next_role: the end after tool calls
    before: str | None = None
    """Text between an answer and a mark that is written only once another message follows; None if it replaces some."""


def content_like(text: str, messages: Sequence[Message]) -> Any:
    """Return a content in the form of those in ``messages``: text, or parts."""
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    return [{"type": "text", "text": text}] if in_parts else text


def end_mark_after(template: ChatTemplate, messages: Sequence[Message]) -> EndMark | None:
    """Return the end mark after an answer to a plain question or, if the template refuses that, to the first one."""
    answer = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if answer is None:
        return None
    variables = orjson.dumps(template.variables, option=orjson.OPT_NON_STR_KEYS, default=str)
    in_parts = not isinstance(content_like("", messages), str)
    try:
        return _plain_end_mark(
            template.tokenizer, repr(template.tokenizer.chat_template), variables, in_parts, template.end_of_turn
        )
    except ConfigError:
        return template.end_mark(messages[:answer])


@functools.lru_cache(maxsize=64)
def _plain_end_mark(
    tokenizer: Any, chat_template: str, variables: bytes, in_parts: bool, end_of_turn: EndOfTurn
) -> EndMark | None:
    content: Any = [{"type": "text", "text": "x"}] if in_parts else "x"
    template = ChatTemplate(tokenizer, None, orjson.loads(variables), end_of_turn)
    return template.end_mark([{"role": "user", "content": content}])


def turn_end(tokenizer: Any, written: str, mark: EndMark | None) -> tuple[int, bool]:
    """Return the end of the turn in its text, and whether it is an end mark; tool calls may end with another token."""
    if mark is None:
        return len(written), False
    if mark.after_calls is not None:
        return len(written), written.endswith((mark.text, mark.after_calls))
    written = written.removesuffix(mark.rest)
    if not (last := mark.text):
        return len(written), False
    if last not in written:
        if not (special := _special_tokens(tokenizer, written)):
            return len(written), False
        last = eos if (eos := tokenizer.eos_token) in special else special[-1]
    return written.rindex(last) + len(last), True


def left_out(whose: str, text: str) -> ConfigError:
    """Return the error of a template that does not write ``text``."""
    return ConfigError(
        f"{whose}: the chat template does not write {text}, so it would not be trained, neither as text nor as a list "
        "of parts: set apply_chat_template_kwargs.chat_template to a template that writes message.content"
    )


def _special_tokens(tokenizer: Any, text: str) -> list[str]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    special = special_ids(tokenizer, len(tokenizer))
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    tokens = [(tokenizer.convert_ids_to_tokens(i), start, end) for i, (start, end) in pairs if i in special]
    return [token for token, start, end in tokens if token in text[start:end]]  # skips <unk>


@functools.lru_cache(maxsize=8)
def special_ids(tokenizer: Any, size: int) -> frozenset[int]:
    """Return the ids of special tokens; ``size``, the tokenizer's length, invalidates the cache when one is added."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def apply_chat_template(tokenizer: Any, messages: list[Any], settings: Mapping[str, Any]) -> str:
    """Return the text of ``messages`` in the first form of a call's arguments that the template takes: objects (or the
    model's text, where that is not JSON), then JSON text (DeepSeek), then objects only; else raises what it raised."""
    forms: list[Callable[[Any], Any]] = [lambda value: value]
    if any(message.get("tool_calls") for message in messages):
        forms.append(lambda value: value if isinstance(value, str) else json.dumps(value or {}, ensure_ascii=False))
        forms.append(lambda value: {"arguments": value} if isinstance(value, str) else value)
    failures = []
    for form in forms:
        try:
            return str(tokenizer.apply_chat_template(_with_arguments(messages, form), tokenize=False, **settings))
        except Exception as error:
            failures.append(error)
    raise failures[0]


def _with_arguments(messages: Sequence[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Return the messages with converted arguments of calls; an empty list of calls is left out."""

    def converted(call: Any) -> Any:
        one = call.get("function", call) if isinstance(call, Mapping) else call  # it may be the function alone
        if not isinstance(one, Mapping) or "arguments" not in one:
            return call
        new = {**one, "arguments": convert(one["arguments"])}
        return new if one is call else {**call, "function": new}

    if not any("tool_calls" in message for message in messages):
        return list(messages)
    made = ({**message, "tool_calls": list(map(converted, message.get("tool_calls") or ()))} for message in messages)
    return [{name: value for name, value in message.items() if value or name != "tool_calls"} for message in made]


def _parsed(arguments: Any) -> Any:
    """Return arguments that are the JSON text of an object, as OpenAI writes them, as that object."""
    with suppress(orjson.JSONDecodeError):
        if isinstance(arguments, str) and isinstance(found := orjson.loads(arguments), dict):
            return found
    return arguments
