"""A conversation becomes token sequences with a mask of what the assistant wrote.

Guarantees, for any chat template: the ids of a sequence are those the template gives for its messages; each
assistant message is trained exactly once, from behind the generation prompt to the end of its turn; nothing
that somebody else wrote is trained. Knows nothing of datasets, batches or losses.

How: the template writes the conversation, and its beginnings up to each assistant message, as text. Where
one is the beginning of the other, the difference is the span to train, in characters, and the offsets of a
fast tokenizer say which tokens lie in it. Where a template rewrites history (thoughts are stripped from
earlier turns), the answers that are not found in the whole get a sequence of their own.
"""

from __future__ import annotations

import functools
import os.path
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from areal_lite.errors import ConfigError

Message = Mapping[str, Any]
"""``role`` and ``content``; where a template knows them also ``tool_calls``, ``reasoning_content``, ..."""

_PROBE = "answer"


class ChatTokens(NamedTuple):
    """One sequence of a conversation, not shifted."""

    input_ids: list[int]
    """``[T]``."""

    loss_mask: list[bool]
    """``[T]`` True where the token itself is trained; never the first, which nothing predicts."""


class _Turn(NamedTuple):
    message: int
    start: int  # character at which the assistant's text begins
    text: str  # what the template writes up to the end of the turn


def conversation_sequences(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    *,
    apply_chat_template: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[ChatTokens]:
    """Return the sequences that train each assistant message of a conversation once, in its order.

    One sequence is usual; it is the whole conversation. A template that writes an answer otherwise once more
    messages follow gives more: each ends with the last answer it trains, or is the whole conversation. A
    sequence that trains nothing is left out, but for a conversation without assistant messages.

    The end of a turn is the special token that the template writes behind an answer; what follows it, such as
    a newline, is not trained. Behind a template without one everything it writes for the message is trained,
    and the model learns no end. A token that begins before a span or goes on behind it is not trained.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        messages: The conversation; it may begin with the assistant, and two answers may follow one another.
        tools: Schemas for the template; an empty list is the same as None.
        apply_chat_template: False joins the contents as they are, without roles, end marks or special tokens.
        template_kwargs: Further variables of the template, or another ``chat_template``.

    Raises:
        ConfigError: If a message is not one, the template refuses the messages, leaves out a tool call, or
            does not begin an answer as it prompts for it, or the tokenizer has no offsets.
    """
    _check_messages(messages)
    if not apply_chat_template:
        return [_joined(tokenizer, messages)]
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} is a slow tokenizer, which does not say which characters a token stands "
            "for: use the model's fast one (a folder with tokenizer.json), or apply_chat_template=False"
        )

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
        found = [turn for turn in pending if text.startswith(turn.text)]
        if found or not turns:
            sequences.append(_masked(tokenizer, text, [(turn.start, len(turn.text)) for turn in found]))
        pending = [turn for turn in pending if turn not in found]
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
    """Return the one sequence of a conversation shifted for next-token prediction.

    Arguments and errors are those of :func:`conversation_sequences`.

    Returns:
        Four int64 tensors of ``[T - 1]``: ``states``, the tokens but the last; ``actions``, the token that
        follows each where it is trained, else 0; ``action_mask``, 1 where it is trained; ``position_ids``.

    Raises:
        ConfigError: Also if the template splits the conversation into several sequences.
    """
    sequences = conversation_sequences(
        tokenizer, messages, tools, apply_chat_template=apply_chat_template, template_kwargs=template_kwargs
    )
    if len(sequences) > 1:
        raise ConfigError(
            f"the chat template rewrites earlier answers, so this conversation of {len(messages)} messages is "
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
    """Raise ConfigError unless this is a list of one message or more; the text says which is none."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(
            f"the messages are {str(messages)[:80]!r}: they must be a list of one {{role, content}} or more"
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
                f"messages[{i}] of role {message['role']!r} has the content {content!r}: it must be text, or parts; "
                "only a message with tool_calls may have none"
            )


def _turns(messages: Sequence[Message], write: Callable[..., str], tokenizer: Any) -> list[_Turn]:
    """Return the span of each assistant message in what the template writes up to it."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    behind = write([*messages[: answers[0]], {"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)[2]
    mark = next(iter(_special_tokens(tokenizer, behind)), None)
    turns = []
    for i in answers:
        text = write(messages[: i + 1])
        prompt = write(messages[:i], prompt=True) if i else _opening(text, write(messages[:1], prompt=True))
        if not text.startswith(prompt):
            same = len(os.path.commonprefix([text, prompt]))
            raise ConfigError(
                f"messages[{i}]: the chat template prompts for this answer with {prompt[same:][:60]!r}, but in its "
                f"place writes {text[same:][:60]!r} once the answer is there, so the model would be asked otherwise "
                "than it was trained: set a variable of the template (such as enable_thinking), or another "
                "chat_template, that keeps them equal"
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
    except Exception as error:  # a template is a program of its own and may raise anything
        raise ConfigError(
            f"the chat template cannot write messages[:{len(messages)}] ({error}): mend the conversation, or use "
            "another template"
        ) from error
    return text


def _opening(text: str, prompted: str) -> str:
    """Return what is before the first answer of ``text``, the conversation's first message.

    A template cannot be asked to prompt for it with no messages; how it prompts is read from ``prompted``, the
    same message and a prompt for the next.
    """
    prompt = prompted[len(os.path.commonprefix([text, prompted])) :]
    at = text.find(prompt)
    return prompt if at < 0 else text[: at + len(prompt)]


def _check_tool_calls(i: int, message: Message, written: str) -> None:
    for call in message.get("tool_calls") or ():
        name = call.get("function", call).get("name") if isinstance(call, Mapping) else call
        if not isinstance(call, Mapping) or not isinstance(name, str) or name not in written:
            raise ConfigError(
                f"messages[{i}] calls the tool {name!r}, but the chat template does not write it: it would be "
                "trained as an answer without the call; use a template that knows tool_calls"
            )


def _turn_end(tokenizer: Any, written: str, mark: str | None) -> int:
    """Return where the turn ends in what the template wrote for it; some end tool calls with another token."""
    if mark is not None and mark not in written:
        mark = next(reversed(_special_tokens(tokenizer, written)), None)
    return len(written) if mark is None else written.rindex(mark) + len(mark)


def _special_tokens(tokenizer: Any, text: str) -> list[str]:
    """Return the special tokens that stand in ``text``, in order."""
    encoded = _encode(tokenizer, text)
    special = _special_ids(tokenizer, len(tokenizer))
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    found = [(tokenizer.convert_ids_to_tokens(i), start, end) for i, (start, end) in pairs if i in special]
    return [token for token, start, end in found if token in text[start:end]]  # an <unk> is in no text


def _masked(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> ChatTokens:
    """Return the tokens of ``text``, those within one of the ordered ``spans`` trained."""
    encoded = _encode(tokenizer, text)
    ids: list[int] = encoded["input_ids"]
    special = _special_ids(tokenizer, len(tokenizer))
    starts = [start for start, _ in spans]
    mask = []
    last_end = 0
    for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True):
        # Some byte-level tokenizers leave a token's leading spaces out of its offsets.
        begin = start if text[last_end:start].strip(" ") else min(start, last_end)
        last_end = end
        span = bisect_right(starts, begin) - 1
        span_end = spans[span][1] if span >= 0 else 0
        # A special token never holds text of two, but may report blanks behind it that it swallowed.
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
                f"messages[{i}] has no text as content: without a chat template only text can be written; set "
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
    """Return the ids of special tokens; ``size``, the tokenizer's length, changes when one is added."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}
