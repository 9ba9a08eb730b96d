"""Tokenize a conversation into sequences, with a mask of what the assistant wrote.

Guarantees, for any chat template: the ids of a sequence are the template's own for its messages; each assistant
message is trained exactly once, from after the generation prompt to the end of its turn; nothing else is trained.
What a template leaves out of an answer is an error or a :class:`Shortfall`, never silent.

Method: the template renders the conversation, and its prefix up to each assistant message. The text that an assistant
message adds is its span. If a template rewrites history (e.g. strips thoughts from earlier turns), answers that differ
in the full text get their own sequences. A fast tokenizer's offsets map characters to tokens.
"""

import os.path
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple
from areal_lite.data.chat import chat_template
from areal_lite.data.chat.chat_template import PROBE, ChatTemplate, EndMark, EndOfTurn, Message, content_like
from areal_lite.data.chat.hermes_tools import check_tools_are_rendered, in_hermes_form
from areal_lite.errors import ConfigError

_OTHER_TEMPLATE = "set apply_chat_template_kwargs.chat_template to a copy of the template that"
_THOUGHT_TAG = re.compile(r"[<\[◁][^<>\[\]]*think[^<>\[\]]*[>\]▷]", re.IGNORECASE)
_THOUGHT_END = re.compile(r"[<\[◁][^<>\[\]]*(?:/|end_)think[^<>\[\]]*[>\]▷]", re.IGNORECASE)
_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷]*[>\]▷]")
_OPEN_TAG = re.compile(r"[<\[◁][^<>\[\]◁▷\s]*\Z")
_THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")


class Shortfall(StrEnum):
    """Something of an answer that a chat template does not let train, with the fix."""

    NO_END_MARK = (
        "the chat template writes no end mark after an answer, so the model does not learn to stop: "
        "set end_of_turn: next_role if it stops at the token that begins the next message (as GLM does), or "
        f"{_OTHER_TEMPLATE} writes {{{{ eos_token }}}} after each answer"
    )
    NO_THOUGHT = (
        "the chat template leaves out the thoughts of answers, so they are not trained: "
        f"{_OTHER_TEMPLATE} writes them, or remove them from the rows"
    )
    NO_TEXT_WITH_CALLS = (
        "the chat template leaves out the text of answers with tool calls, so it is not trained: "
        f"{_OTHER_TEMPLATE} writes both, or remove the text from the rows"
    )
    OTHER_PROMPT = (
        "the chat template prompts for an answer with text that it does not write before answers (such as <think>), so "
        "prompts differ from training: set a template variable such as enable_thinking: false in "
        f"apply_chat_template_kwargs, or {_OTHER_TEMPLATE} writes it"
    )


class Rendering(NamedTuple):
    """How conversations become text; arguments of :func:`tokenize_messages`."""

    apply_chat_template: bool = True
    template_kwargs: Mapping[str, Any] = {}
    tools_in_system_prompt: bool = False
    end_of_turn: EndOfTurn = "end_mark"
    """The end of an answer if the template writes no end mark: nothing, or the special token of the next message."""


class ChatText(NamedTuple):
    """One sequence of a conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]  # first character and end of each text to train, in order
    shortfalls: frozenset[Shortfall] = frozenset()
    joints: tuple[int, ...] = ()
    """Characters at which a new token begins in any case; only without a chat template."""
    images: tuple[Any, ...] = ()
    """Canonical images of its placeholders, in order; the ids hold one placeholder for each."""


class _Turn(NamedTuple):
    message: int
    start: int  # character at which the assistant's text begins
    text: str  # the rendered conversation up to the end of the turn
    shortfalls: frozenset[Shortfall]


class ChatTokens(NamedTuple):
    """One sequence of a conversation, not shifted."""

    input_ids: list[int]  # ``[T]``
    loss_mask: list[bool]
    """``[T]`` True where the token itself is trained; never the first token, which nothing predicts."""


def tokenize_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    apply_chat_template: bool = True,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[ChatTokens]:
    """Return the sequences that train each assistant message of a conversation once, in order.

    Usually there is one sequence, the whole conversation. If the template renders an answer differently once more
    messages follow, there are several: each ends with the last answer it trains, or is the whole conversation.
    Sequences that train nothing are omitted, unless the conversation has no assistant message.

    A turn ends with the special token that the template writes after an answer, and an EOS token directly after it;
    what follows, such as a newline, is not trained. If the template has no such token, everything it writes for the
    message is trained. If it writes nothing for contents that are texts, they become lists of parts, and the other way
    round. A token that crosses the start or end of a span is not trained. Raises ConfigError if a message is malformed,
    the template rejects the messages, omits the tools, a tool call or the text of an answer, or renders an answer's
    beginning differently from its prompt (except for a thought that the prompt opens), or the tokenizer has no offsets.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        messages: The conversation; it may begin with the assistant and have consecutive answers.
        tools: Tool schemas for the template; an empty list is the same as None.
        apply_chat_template: False joins the contents unchanged, without roles, end marks or special tokens.
        template_kwargs: Extra variables of the template, or another ``chat_template``.
    """
    rendering = Rendering(apply_chat_template, template_kwargs or {})
    return [tokens_of(tokenizer, text) for text in render_conversation(tokenizer, messages, tools, rendering)]


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    rendering: Rendering = Rendering(),  # noqa: B008 -- it cannot change
) -> list[ChatText]:
    """Return the texts of :func:`tokenize_messages`, with its errors."""
    _check_messages(messages)
    if not rendering.apply_chat_template:
        return [_joined(messages)]
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which has no character offsets: use the model's fast "
            "tokenizer (a folder with tokenizer.json), or apply_chat_template=False"
        )
    if rendering.tools_in_system_prompt:
        messages, tools = in_hermes_form(messages, tools), None
    variables = dict(rendering.template_kwargs)
    check_tools_are_rendered(tokenizer, tools, variables)
    errors = []
    for form in _forms(messages):
        try:
            template = ChatTemplate(tokenizer, list(tools) if tools else None, variables, rendering.end_of_turn)
            return _sequences(form, template)
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def _forms(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """Return the messages with contents as texts and as parts, their own form first; only parts if one is no text."""
    texts, parts = [], []
    for message in messages:
        content = message.get("content")
        is_text = isinstance(content, str)
        texts.append({**message, "content": _text(message)} if isinstance(content, list | tuple) else message)
        parts.append({**message, "content": [{"type": "text", "text": content}]} if is_text else message)
    if texts == list(messages):
        return [texts, parts]
    plain = all(_is_text(part) for message in parts for part in message.get("content") or ())
    return [parts, texts] if plain else [parts]


def _sequences(messages: Sequence[Message], template: ChatTemplate) -> list[ChatText]:
    mark = chat_template.end_mark_after(template, messages)
    turns = _turns(messages, template, mark)
    shortfalls = frozenset[Shortfall]().union(*(turn.shortfalls for turn in turns))
    sequences = []
    text, pending = template.written(messages, len(messages), mark), turns
    while True:
        trained = [turn for turn in pending if text.startswith(turn.text)]
        if trained or not turns:
            sequences.append(ChatText(text, tuple((turn.start, len(turn.text)) for turn in trained), shortfalls))
        pending = [turn for turn in pending if turn not in trained]
        if not pending:
            return sequences[::-1]
        text = template.written(messages, pending[-1].message + 1, mark)
        if not text.startswith(pending[-1].text):
            text = pending[-1].text


def _turns(messages: Sequence[Message], template: ChatTemplate, mark: EndMark | None) -> list[_Turn]:
    turns = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text, start, is_prompted = _with_start(messages, i, template, mark)
        before = start
        answer = _THOUGHT_END.split(_text(message))[-1]
        if not _is_written(answer, text[start:]) and i:  # its beginning may be in the prompt
            before = min(start, len(os.path.commonprefix([text, template.write_first(messages, i)])))
        shortfalls = _shortfalls(i, message, text[before:])
        end, is_marked = chat_template.turn_end(template.tokenizer, text[start:], mark)
        if not is_marked:
            shortfalls.add(Shortfall.NO_END_MARK)
        if not is_prompted:
            shortfalls.add(Shortfall.OTHER_PROMPT)
        turns.append(_Turn(i, start, text[: start + end], frozenset(shortfalls)))
    return turns


def _with_start(
    messages: Sequence[Message], i: int, template: ChatTemplate, mark: EndMark | None
) -> tuple[str, int, bool]:
    """Return the text up to an answer, where the answer starts in it, and whether its whole prompt is before that. The
    text is the prompt and the answer if the template writes the question differently once the answer is there."""
    text = template.written(messages, i + 1, mark)
    if i == 0:
        return text, _start_of_first(text, template.write_first(messages, 1, prompt=True)), True
    prompt = template.write_first(messages, i, prompt=True)
    if text.startswith(prompt):
        return text, len(prompt), True
    shown = template.write([*messages[:i], {"role": "assistant", "content": content_like(PROBE, messages)}])
    same = len(_OPEN_TAG.sub("", os.path.commonprefix([prompt, text, shown])))
    lead = shown[same : max(same, shown.rfind(PROBE))]
    # The longest end of the prompt, from a tag on, that is also before the answer.
    headers = [prompt[tag.start() :] for tag in _TAG.finditer(prompt, same)]
    ends = (lead.find(header) + len(header) for header in headers if header in lead)
    found = next((end for end in ends if text.startswith(lead[:end], same)), None)
    start = same + (found or 0)
    question = _text(messages[i - 1]).strip()
    if not question or question not in (lead if found is None else lead[:found]):
        return text, start, False
    if found is not None:
        return prompt + text[start:], len(prompt), True
    raise ConfigError(
        f"messages[{i}]: the chat template prompts for this answer with {prompt[same:][:60]!r}, but renders "
        f"{text[same:][:60]!r} there once the answer exists, so prompts would differ from training: set a "
        "template variable (such as enable_thinking) or another chat_template that makes them equal"
    )


def _start_of_first(text: str, prompted: str) -> int:
    """Return where the answer starts in ``text``, a conversation that begins with the assistant. Without messages no
    prompt can be rendered, so it is taken from ``prompted``: the same message followed by a prompt for the next."""
    prompt = prompted[len(os.path.commonprefix([text, prompted])) :]
    for wanted in (prompt, _THOUGHT_TAG.split(prompt)[0]):
        if wanted and (at := text.find(wanted)) >= 0:
            return at + len(wanted)
    return 0


def _shortfalls(i: int, message: Message, written: str) -> set[Shortfall]:
    calls = message.get("tool_calls") or ()
    for call in calls:
        name = call.get("function", call).get("name") if isinstance(call, Mapping) else call
        if not isinstance(call, Mapping) or not isinstance(name, str) or name not in written:
            raise ConfigError(
                f"messages[{i}] calls the tool {name!r}, but the chat template does not render it, so the call would "
                "not be trained: set tools_in_system_prompt to true, or use a template that supports tool_calls"
            )
    shortfalls = set()
    *thoughts, answer = _THOUGHT_END.split(_text(message))
    thoughts += [str(message.get(key) or "") for key in _THOUGHT_KEYS]
    if not all(_is_written(_THOUGHT_TAG.sub("", thought), written) for thought in thoughts):
        shortfalls.add(Shortfall.NO_THOUGHT)
    content = message.get("content")
    if not _is_written(answer, written) or (isinstance(content, list) and content and str(content) in written):
        if not calls:
            raise chat_template.left_out(f"messages[{i}]", f"its text {answer.strip()[:60]!r}")
        shortfalls.add(Shortfall.NO_TEXT_WITH_CALLS)
    return shortfalls


def _is_written(text: str, written: str) -> bool:
    text = text.strip()
    return text in written or "".join(text.split()) in "".join(written.split())


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if _is_text(part))


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _joined(messages: Sequence[Message]) -> ChatText:
    text, joints, spans = "", [], []
    for i, message in enumerate(messages):
        if not isinstance(content := message.get("content"), str):
            raise ConfigError(
                f"messages[{i}] has content that is not text: without a chat template only text is supported; set "
                "apply_chat_template=True"
            )
        joints.append(len(text))
        text += content
        if message["role"] == "assistant":
            spans.append((joints[-1], len(text)))
    return ChatText(text, tuple(spans), joints=tuple(joints))


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(
            f"the messages are {str(messages)[:80]!r}: they must be a non-empty list of {{role, content}}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(
                f"messages[{i}] is {str(message)[:80]!r}: it must have 'role' (system, user, assistant, tool) and "
                "'content'"
            )
        content = message.get("content")
        if not isinstance(content, str | Sequence) and not (content is None and message.get("tool_calls")):
            raise ConfigError(
                f"messages[{i}] of role {message['role']!r} has content {content!r}: it must be text or a list of "
                "parts; only a message with tool_calls may have none"
            )


def tokens_of(tokenizer: Any, rendered: ChatText) -> ChatTokens:
    """Return the tokens of a rendered sequence, with those inside one of its spans trained."""
    text, spans = rendered.text, rendered.spans
    ids: list[int] = []
    mask: list[bool] = []
    if rendered.joints:
        for piece in pairwise((*rendered.joints, len(text))):
            tokens = tokenizer.encode(text[slice(*piece)], add_special_tokens=False)
            ids += tokens
            mask += [piece in spans] * len(tokens)
        return _never_first(ids, mask)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    special = chat_template.special_ids(tokenizer, len(tokenizer))
    starts = [start for start, _ in spans]
    last_end = 0
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        # Some byte-level tokenizers exclude a token's leading spaces from its offsets.
        begin = start if text[last_end:start].strip(" ") else min(start, last_end)
        last_end = end
        span = bisect_right(starts, begin) - 1
        span_end = spans[span][1] if span >= 0 else 0
        # A special token never crosses spans, but its offsets may include blanks after it.
        mask.append(begin < span_end and (end <= span_end or token in special))
    return _never_first(ids, mask)


def _never_first(ids: list[int], mask: list[bool]) -> ChatTokens:
    return ChatTokens(ids, [False, *mask[1:]] if mask else mask)
