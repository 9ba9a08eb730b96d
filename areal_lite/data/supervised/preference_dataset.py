"""Rows with a better and a worse answer as pairs of token sequences.

Guarantees that the two of a pair are equal up to the answer, that the answer and nothing else is trained, and that
neither is longer than ``max_length``. How a conversation becomes tokens: ``chat_tokens``; how rows become items:
``tokenized_dataset``. Knows nothing of losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal_lite.data.chat.chat_tokens import ChatTokens, Message, conversation_sequences
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, Item, Row, from_json
from areal_lite.errors import ConfigError

Pair = tuple[ChatTokens, ChatTokens]
"""The better one first."""


class PreferenceDataset(BaseDataset[Pair]):
    """One item for each pair, in the order of the rows.

    An item has ``chosen_ids``, ``chosen_mask``, ``rejected_ids`` and ``rejected_mask``. A mask is 1 where the token
    itself is trained: in the last answer.

    The column of an answer holds text or messages that follow the row's prompt, or else the whole conversation. The
    prompt is text, the user's question, or messages. A pair of which one is too long is left
    out, since an answer cut off would be judged without its end; so is a pair of equals.

    Args:
        data_path: Files or rows; this and what is not named here: see :class:`BaseDataset`.
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        max_length: Longest sequence in tokens.
        prompt_key: Column of what is answered; may be missing.
        chosen_key: Column of the better answer.
        rejected_key: Column of the worse one.
        tools_key: Column of tool schemas that the template renders; may be missing.
        template_kwargs: Further variables of the template, or another ``chat_template``.

    Raises:
        ConfigError: If a row is no such pair, with its number from 0, or all are left out.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        max_length: int,
        *,
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        tools_key: str = "tools",
        template_kwargs: Mapping[str, Any] | None = None,
        cache_dir: str | None = None,
        num_workers: int = 0,
    ) -> None:
        pair_of = _PairOf(
            tokenizer=tokenizer,
            prompt_key=prompt_key,
            answer_keys=(chosen_key, rejected_key),
            tools_key=tools_key,
            template_kwargs=template_kwargs,
        )
        super().__init__(
            data_path, tokenizer, max_length, pair_of, cache_dir=cache_dir, num_workers=num_workers
        )

    def _item(self, sequences: Pair) -> Item | str:
        chosen, rejected = sequences
        if max(len(chosen.input_ids), len(rejected.input_ids)) > self.max_length:
            return "a sequence longer than max_length"
        if chosen.input_ids == rejected.input_ids:
            return "equal answers"
        if not (any(chosen.loss_mask) and any(rejected.loss_mask)):
            return "no text of an assistant"
        item: Item = {}
        for name, (ids, mask) in (("chosen", chosen), ("rejected", rejected)):
            item |= {f"{name}_ids": torch.tensor(ids, dtype=torch.int32), f"{name}_mask": torch.tensor(mask)}
        return item


@dataclass(frozen=True, kw_only=True, slots=True)
class _PairOf:
    """The one pair of a row."""

    tokenizer: Any
    prompt_key: str
    answer_keys: tuple[str, str]
    tools_key: str
    template_kwargs: Mapping[str, Any] | None

    def __call__(self, row: Row) -> list[Pair]:
        chosen, rejected = (self._conversation(row, key) for key in self.answer_keys)
        if chosen[:-1] != rejected[:-1]:
            raise ConfigError(
                "{!r} and {!r} differ before their last message, so that it is not two answers to the same: give "
                "conversations that differ in the last one only".format(*self.answer_keys)
            )
        tools = from_json(row, self.tools_key)
        return [(self._last_answer(chosen, tools), self._last_answer(rejected, tools))]

    def _conversation(self, row: Row, answer_key: str) -> list[Message]:
        prompt, answer = row.get(self.prompt_key), row.get(answer_key)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not isinstance(answer, Sequence) or not answer or not all(isinstance(m, Mapping) for m in answer):
            raise ConfigError(
                f"{answer_key!r} is {repr(answer)[:80]}: it must be text or messages; the columns are {list(row)}, "
                "name the right chosen_key and rejected_key"
            )
        if answer[-1].get("role") != "assistant":
            raise ConfigError(
                f"{answer_key!r} ends with a message of {answer[-1].get('role')!r}: the last one must be the "
                "assistant's"
            )
        if answer[0].get("role") != "assistant":
            return list(answer)  # the whole conversation
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence) or not prompt:
            raise ConfigError(
                f"{answer_key!r} is an answer, but {self.prompt_key!r} is {prompt!r}: give what it answers as text or "
                f"messages there (prompt_key), or the whole conversation in {answer_key!r}"
            )
        return [*prompt, *answer]

    def _last_answer(self, messages: Sequence[Message], tools: Any) -> ChatTokens:
        """Return the sequence that ends with the last answer, in which only that one is trained."""
        ids, mask = conversation_sequences(
            self.tokenizer, messages, tools, template_kwargs=self.template_kwargs
        )[-1]
        end = len(mask) - mask[::-1].index(True) if any(mask) else 0
        start = end
        while start and mask[start - 1]:
            start -= 1
        return ChatTokens(ids, [start <= place < end for place in range(len(mask))])
