"""Tokenize a conversation into sequences, with a mask of what the assistant wrote.

Guarantees, for any chat template: the ids of a sequence are the template's own for its messages; each assistant
message is trained exactly once, from after the generation prompt to the end of its turn; nothing else is trained.
Knows nothing of datasets, batches or losses.

Method: the template renders the conversation, and its prefix up to each assistant message, as text. The text that an
assistant message adds is the span to train; a fast tokenizer's offsets map its characters to tokens. If a template
rewrites history (e.g. strips thoughts from earlier turns), answers that differ in the full text get their own
sequences.
"""

from __future__ import annotations

import functools
import os.path
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from areal_lite.data.chat.hermes_tools import check_tools_are_rendered, in_hermes_form
from areal_lite.errors import ConfigError

Message = Mapping[str, Any]
"""``role`` and ``content``; also ``tool_calls``, ``reasoning_content``, ... if the template supports them."""

_PROBE = "answer"


class ChatTokens(NamedTuple):
    """One sequence of a conversation, not shifted."""

    input_ids: list[int]
    """``[T]``."""
    loss_mask: list[bool]
    """``[T]`` True where the token itself is trained; never the first token, which nothing predicts."""


class _Turn(NamedTuple):
    message: int
    start: int  # character at which the assistant's text begins
    text: str  # the rendered conversation up to the end of the turn


def conversation_sequences(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
    tools_in_system_prompt: bool = False,
) -> list[ChatTokens]:
    """Return the sequences that train each assistant message of a conversation once, in order.

    Usually there is one sequence, the whole conversation. If the template renders an answer differently once more
    messages follow, there are several: each ends with the last answer it trains, or is the whole conversation.
    Sequences that train nothing are omitted, unless the conversation has no assistant message.

    A turn ends with the special token that the template writes after an answer; what follows it, such as a newline,
    is not trained. If the template has no such token, everything it writes for the message is trained, and the model
    does not learn to stop. A token that crosses the start or end of a span is not trained.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        messages: The conversation; it may begin with the assistant and have consecutive answers.
        tools: Tool schemas for the template; an empty list is the same as None.
        apply_chat_template: False joins the contents unchanged, without roles, end marks or special tokens.
        template_kwargs: Extra variables of the template, or another ``chat_template``.
        tools_in_system_prompt: Write tools, calls and results as text, for templates that do not render them.

    Raises:
        ConfigError: If a message is malformed, the template rejects the messages, omits the tools or a tool call or
            renders an answer's beginning differently from its prompt, or the tokenizer has no offsets.
    """
    _check_messages(messages)
    if not apply_chat_template:
        return [_joined(tokenizer, messages)]
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which has no character offsets: use the model's fast "
            "tokenizer (a folder with tokenizer.json), or apply_chat_template=False"
        )

    if tools_in_system_prompt:
        messages, tools = in_hermes_form(messages, tools), None
    check_tools_are_rendered(tokenizer, tools, template_kwargs or {})
    write = functools.partial(
        _write,
        tokenizer=tokenizer,
        tools=list(tools) if tools else None,
        template_kwargs=template_kwargs or {},
    )
    turns = _turns(messages, write, tokenizer)
    sequences = []
    text, pending = write(messages), turns
    while True:
        trained = [turn for turn in pending if text.startswith(turn.text)]
        if trained or not turns:
            sequences.append(_masked(tokenizer, text, [(turn.start, len(turn.text)) for turn in trained]))
        pending = [turn for turn in pending if turn not in trained]
        if not pending:
            return sequences[::-1]
        text = write(messages[: pending[-1].message + 1])


def tokenize_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    apply_chat_template: bool = True,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return a conversation as one sequence, shifted for next-token prediction.

    For training loops of your own; `areal-lite train` does not use it. Arguments and errors are those of
    :func:`conversation_sequences`.

    Returns:
        Four int64 tensors of ``[T - 1]``: ``states``, all tokens but the last; ``actions``, the next token if it is
        trained, else 0; ``action_mask``, 1 where the next token is trained; ``position_ids``.

    Raises:
        ConfigError: Also if the template splits the conversation into several sequences.
    """
    sequences = conversation_sequences(
        tokenizer, messages, tools, apply_chat_template=apply_chat_template, template_kwargs=template_kwargs
    )
    if len(sequences) > 1:
        raise ConfigError(
            f"the chat template rewrites earlier answers, so this conversation of {len(messages)} messages has "
            f"{len(sequences)} sequences, not one: call conversation_sequences, or use an SFTDataset"
        )
    ids = torch.tensor(sequences[0].input_ids, dtype=torch.long)
    mask = torch.tensor(sequences[0].loss_mask, dtype=torch.long)
    return {
        "states": ids[:-1],
        "actions": (ids * mask)[1:],
        "action_mask": mask[1:],
        "position_ids": torch.arange(len(ids[:-1])),
    }


def _check_messages(messages: Any) -> None:
    """Raise ConfigError unless this is a non-empty list of messages."""
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


def _turns(messages: Sequence[Message], write: Callable[..., str], tokenizer: Any) -> list[_Turn]:
    """Return the span of each assistant message in the conversation rendered up to it."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    after = write([*messages[: answers[0]], {"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)[2]
    mark = next(iter(_special_tokens(tokenizer, after)), None)
    turns = []
    for i in answers:
        text = write(messages[: i + 1])
        prompt = write(messages[:i], prompt=True) if i else _opening(text, write(messages[:1], prompt=True))
        if not text.startswith(prompt):
            same = len(os.path.commonprefix([text, prompt]))
            raise ConfigError(
                f"messages[{i}]: the chat template prompts for this answer with {prompt[same:][:60]!r}, but renders "
                f"{text[same:][:60]!r} there once the answer exists, so prompts would differ from training: set a "
                "template variable (such as enable_thinking) or another chat_template that makes them equal"
            )
        written = text[len(prompt) :]
        _check_tool_calls(i, messages[i], written)
        turns.append(_Turn(i, len(prompt), prompt + written[: _turn_end(tokenizer, written, mark)]))
    return turns


def _write(
    messages: Sequence[Message],
    *,
    prompt: bool = False,
    tokenizer: Any,
    tools: list[Any] | None,
    template_kwargs: Mapping[str, Any],
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **template_kwargs
        )
    except Exception as error:  # a template is a program and may raise anything
        raise ConfigError(
            f"the chat template cannot write messages[:{len(messages)}] ({error}): fix the conversation, or use "
            "another template"
        ) from error
    return text


def _opening(text: str, prompted: str) -> str:
    """Return the text before the answer in ``text``, a conversation that begins with the assistant.

    A template cannot render a prompt without messages, so the prompt is taken from ``prompted``: the same message
    followed by a prompt for the next.
    """
    prompt = prompted[len(os.path.commonprefix([text, prompted])) :]
    at = text.find(prompt)
    return prompt if at < 0 else text[: at + len(prompt)]


def _check_tool_calls(i: int, message: Message, written: str) -> None:
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name") if isinstance(call, Mapping) else call
        if not isinstance(call, Mapping) or not isinstance(name, str) or name not in written:
            raise ConfigError(
                f"messages[{i}] calls the tool {name!r}, but the chat template does not render it, so the call would "
                "not be trained: set tools_in_system_prompt to true, or use a template that supports tool_calls"
            )


def _turn_end(tokenizer: Any, written: str, mark: str | None) -> int:
    """Return the end of the turn in its rendered text; some templates end tool calls with another token."""
    if mark is not None and mark not in written:
        mark = next(reversed(_special_tokens(tokenizer, written)), None)
    return len(written) if mark is None else written.rindex(mark) + len(mark)


def _special_tokens(tokenizer: Any, text: str) -> list[str]:
    """Return the special tokens in ``text``, in order."""
    encoded = _encode(tokenizer, text)
    special = _special_ids(tokenizer, len(tokenizer))
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    tokens = [(tokenizer.convert_ids_to_tokens(i), start, end) for i, (start, end) in pairs if i in special]
    return [token for token, start, end in tokens if token in text[start:end]]  # skips <unk>


def _masked(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> ChatTokens:
    """Return the tokens of ``text`` with those inside one of the ordered ``spans`` trained."""
    encoded = _encode(tokenizer, text)
    ids: list[int] = encoded["input_ids"]
    special = _special_ids(tokenizer, len(tokenizer))
    starts = [start for start, _ in spans]
    mask = []
    last_end = 0
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        # Some byte-level tokenizers exclude a token's leading spaces from its offsets.
        begin = start if text[last_end:start].strip(" ") else min(start, last_end)
        last_end = end
        span = bisect_right(starts, begin) - 1
        span_end = spans[span][1] if span >= 0 else 0
        # A special token never crosses spans, but its offsets may include blanks after it.
        mask.append(begin < span_end and (end <= span_end or token in special))
    if mask:
        mask[0] = False
    return ChatTokens(ids, mask)


def _joined(tokenizer: Any, messages: Sequence[Message]) -> ChatTokens:
    ids: list[int] = []
    mask: list[bool] = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise ConfigError(
                f"messages[{i}] has content that is not text: without a chat template only text is supported; set "
                "apply_chat_template=True"
            )
        tokens = tokenizer.encode(message["content"], add_special_tokens=False)
        ids += tokens
        mask += [message["role"] == "assistant"] * len(tokens)
    if mask:
        mask[0] = False
    return ChatTokens(ids, mask)


def _encode(tokenizer: Any, text: str) -> Any:
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)


@functools.lru_cache(maxsize=8)
def _special_ids(tokenizer: Any, size: int) -> frozenset[int]:
    """Return the ids of special tokens; ``size``, the tokenizer's length, invalidates the cache when one is added."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
