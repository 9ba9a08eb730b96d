"""Conversations as the tokens that supervised fine-tuning trains.

Guarantees that every item trains at least one token and is no longer than ``max_length``. How a conversation becomes
tokens: ``chat_tokens``; how rows become items: ``tokenized_dataset``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_lite.data.chat.chat_tokens import ChatTokens, Message, conversation_sequences
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, Item, Row, from_json
from areal_lite.errors import ConfigError


class SFTDataset(BaseDataset[ChatTokens]):
    """One item for each training sequence of the rows, in their order; mostly one a row.

    An item has ``input_ids`` and ``loss_mask``, which is 1 where the token itself is trained; a loss shifts both. A
    longer sequence loses its end.

    A row has messages, or else a prompt and a response. The prompt is text or messages, the response is text. With
    the template, a text prompt is the user's question. Without it both are joined as they are, and the EOS token
    follows the response; nothing follows the contents of messages. Messages and tools may be lists or JSON text.

    Args:
        data_path: Files or rows; this and what is not named here: see :class:`BaseDataset`.
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        max_length: Longest item in tokens.
        messages_key: Column of the conversation.
        prompt_key: Column of what a response answers.
        response_key: Column of the text that is trained.
        tools_key: Column of tool schemas that the template renders; may be missing.
        apply_chat_template: False joins texts as they are.
        template_kwargs: Further variables of the template, or another ``chat_template``.

    Raises:
        ConfigError: If a row is no conversation, with its number from 0, or nothing of any row is trained.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        max_length: int,
        *,
        messages_key: str = "messages",
        prompt_key: str = "prompt",
        response_key: str = "response",
        tools_key: str = "tools",
        apply_chat_template: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        self.truncated = 0
        """Items that lost their end."""
        sequences_of = _Conversation(
            tokenizer=tokenizer,
            messages_key=messages_key,
            prompt_key=prompt_key,
            response_key=response_key,
            tools_key=tools_key,
            apply_chat_template=apply_chat_template,
            template_kwargs=template_kwargs,
        )
        super().__init__(
            data_path, tokenizer, max_length, sequences_of, cache_dir=cache_dir, num_workers=num_workers
        )

    def _item(self, sequences: ChatTokens) -> Item | str:
        ids, mask = (values[: self.max_length] for values in sequences)
        if not any(sequences.loss_mask):
            return "no text of an assistant"
        if not any(mask):
            return "no trained token within max_length"
        self.truncated += len(sequences.input_ids) > self.max_length
        return {"input_ids": torch.tensor(ids, dtype=torch.int32), "loss_mask": torch.tensor(mask)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conversation:
    """The sequences of a row."""

    tokenizer: Any
    messages_key: str
    prompt_key: str
    response_key: str
    tools_key: str
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] | None

    def __call__(self, row: Row) -> list[ChatTokens]:
        return conversation_sequences(
            self.tokenizer,
            self._messages(row),
            from_json(row, self.tools_key),
            apply_chat_template=self.apply_chat_template,
            template_kwargs=self.template_kwargs,
        )

    def _messages(self, row: Row) -> Sequence[Message]:
        if row.get(self.messages_key) is not None:
            return from_json(row, self.messages_key)  # type: ignore[no-any-return]
        prompt, response = row.get(self.prompt_key), row.get(self.response_key)
        if not isinstance(prompt, Sequence) or not isinstance(response, str):
            raise ConfigError(
                f"it has neither {self.messages_key!r} nor both {self.prompt_key!r} (text or messages) and "
                f"{self.response_key!r} (text), but the columns {list(row)}: name the right messages_key, or "
                "prompt_key and response_key"
            )
        if not self.apply_chat_template:
            if self.tokenizer.eos_token is None:
                raise ConfigError("the tokenizer has no EOS token to end a response: set tokenizer.eos_token")
            response += self.tokenizer.eos_token
        question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*question, {"role": "assistant", "content": response}]
