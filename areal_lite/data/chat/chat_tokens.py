"""Tokenize a conversation into sequences, with a mask of what the assistant wrote.

Guarantees, for any chat template: the ids of a sequence are the template's own for its messages; each assistant
message is trained exactly once, from after the generation prompt to the end of its turn; nothing else is trained.
``chat_text`` finds these texts; here a fast tokenizer's offsets map their characters to tokens. Knows nothing of
datasets, batches or losses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from areal_lite.data.chat.chat_template import Message, special_ids
from areal_lite.data.chat.chat_text import ChatText, render_conversation

__all__ = ["ChatTokens", "Message", "tokenize_messages", "tokens_of"]


class ChatTokens(NamedTuple):
    """One sequence of a conversation, not shifted."""

    input_ids: list[int]
    """``[T]``."""
    loss_mask: list[bool]
    """``[T]`` True where the token itself is trained; never the first token, which nothing predicts."""


def tokenize_messages(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    apply_chat_template: bool = True,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tools_in_system_prompt: bool = False,
) -> list[ChatTokens]:
    """Return the sequences that train each assistant message of a conversation once, in order.

    Usually there is one sequence, the whole conversation. If the template renders an answer differently once more
    messages follow, there are several: each ends with the last answer it trains, or is the whole conversation.
    Sequences that train nothing are omitted, unless the conversation has no assistant message.

    A turn ends with the special token that the template writes after an answer, and an EOS token directly after it;
    what follows, such as a newline, is not trained. If the template has no such token, everything it writes for the
    message is trained. If it writes nothing for contents that are texts, they become lists of parts, and the other way
    round. A token that crosses the start or end of a span is not trained.

    Args:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        messages: The conversation; it may begin with the assistant and have consecutive answers.
        tools: Tool schemas for the template; an empty list is the same as None.
        apply_chat_template: False joins the contents unchanged, without roles, end marks or special tokens.
        template_kwargs: Extra variables of the template, or another ``chat_template``.
        tools_in_system_prompt: Write tools, calls and results as text, for templates that do not render them.

    Raises:
        ConfigError: If a message is malformed, the template rejects the messages, omits the tools, a tool call or the
            text of an answer, or renders an answer's beginning differently from its prompt (except for a thought that
            the prompt opens), or the tokenizer has no offsets.
    """
    texts = render_conversation(
        tokenizer,
        messages,
        tools,
        apply_chat_template=apply_chat_template,
        template_kwargs=template_kwargs,
        tools_in_system_prompt=tools_in_system_prompt,
    )
    return [tokens_of(tokenizer, text) for text in texts]


def tokens_of(tokenizer: Any, rendered: ChatText) -> ChatTokens:
    """Return the tokens of a rendered sequence, with those inside one of its spans trained."""
    if rendered.joints:
        return _tokens_of_pieces(tokenizer, rendered)
    text, spans = rendered.text, rendered.spans
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    special = special_ids(tokenizer, len(tokenizer))
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
    return _never_first(ids, mask)


def _tokens_of_pieces(tokenizer: Any, rendered: ChatText) -> ChatTokens:
    ids: list[int] = []
    mask: list[bool] = []
    for piece in pairwise((*rendered.joints, len(rendered.text))):
        tokens = tokenizer.encode(rendered.text[slice(*piece)], add_special_tokens=False)
        ids += tokens
        mask += [piece in rendered.spans] * len(tokens)
    return _never_first(ids, mask)


def _never_first(ids: list[int], mask: list[bool]) -> ChatTokens:
    return ChatTokens(ids, [False, *mask[1:]] if mask else mask)
