"""Rows with a better and a worse answer as pairs of token sequences.

Guarantees that the two of a pair are equal up to the answer, that the answer and nothing else is trained, that
neither is longer than ``max_length``, and that what is left out is counted by reason. How a conversation becomes
tokens: ``chat_tokens``. Knows nothing of losses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal_lite.data.chat_tokens import ChatTokens, Message, conversation_sequences
from areal_lite.data.sft_dataset import BaseDataset, Item, Row, from_json, padded_columns, without_none
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)


class PreferenceDataset(BaseDataset):
    """One item for each pair, in the order of the rows.

    An item is ``{"chosen_ids", "chosen_mask", "rejected_ids", "rejected_mask"}``, int64 tensors ``[T]``. A mask is 1
    where the token itself is trained: in the last answer.

    The column of an answer holds text or messages that follow the row's prompt, or else the whole conversation. The
    prompt is text, the user's question, or messages. A pair of which one is too long is left out, since an answer cut
    off would be judged without its end; so is a pair of equals.

    Args:
        data_path: Files or rows, see :class:`BaseDataset`.
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
    ) -> None:
        super().__init__(data_path, tokenizer, max_length)
        self.dropped: Counter[str] = Counter()
        """Pairs that were left out, by reason."""
        self._items: list[tuple[ChatTokens, ChatTokens]] = []
        padded = padded_columns(self.rows)
        for number, padded_row in enumerate(self.rows):
            row = {key: without_none(value) if key in padded else value for key, value in padded_row.items()}
            try:
                chosen, rejected = (_conversation(row, prompt_key, key) for key in (chosen_key, rejected_key))
                if chosen[:-1] != rejected[:-1]:
                    raise ConfigError(
                        f"{chosen_key!r} and {rejected_key!r} differ before their last message, so that it is not two "
                        "answers to the same: give conversations that differ in the last one only"
                    )
                tools = from_json(row, tools_key)
                pair = tuple(
                    _last_answer(
                        conversation_sequences(tokenizer, messages, tools, template_kwargs=template_kwargs)
                    )
                    for messages in (chosen, rejected)
                )
            except ConfigError as error:
                raise ConfigError(f"row {number}: {error}") from error
            self._add(*pair)
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not self._items:
            raise ConfigError(
                f"all {len(self.rows)} pairs are left out: {reasons}: raise max_length={max_length}, or mend the rows"
            )
        if self.dropped:
            logger.warning("of %d pairs, some are left out: %s", len(self.rows), reasons)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        chosen, rejected = self._items[index]
        return {
            "chosen_ids": torch.tensor(chosen.input_ids),
            "chosen_mask": torch.tensor(chosen.loss_mask).long(),
            "rejected_ids": torch.tensor(rejected.input_ids),
            "rejected_mask": torch.tensor(rejected.loss_mask).long(),
        }

    def _add(self, chosen: ChatTokens, rejected: ChatTokens) -> None:
        if max(len(chosen.input_ids), len(rejected.input_ids)) > self.max_length:
            self.dropped["a sequence longer than max_length"] += 1
        elif chosen.input_ids == rejected.input_ids:
            self.dropped["equal answers"] += 1
        elif not (any(chosen.loss_mask) and any(rejected.loss_mask)):
            self.dropped["no text of an assistant"] += 1
        else:
            self._items.append((chosen, rejected))


def _conversation(row: Row, prompt_key: str, answer_key: str) -> list[Message]:
    prompt, answer = row.get(prompt_key), row.get(answer_key)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, Sequence) or not answer or not all(isinstance(m, Mapping) for m in answer):
        raise ConfigError(
            f"{answer_key!r} is {repr(answer)[:80]}: it must be text or messages; the columns are {list(row)}, "
            "name the right chosen_key and rejected_key"
        )
    if answer[-1].get("role") != "assistant":
        raise ConfigError(
            f"{answer_key!r} ends with a message of {answer[-1].get('role')!r}: the last one must be the assistant's"
        )
    if answer[0].get("role") != "assistant":
        return list(answer)  # the whole conversation
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt:
        raise ConfigError(
            f"{answer_key!r} is an answer, but {prompt_key!r} is {prompt!r}: give what it answers as text or messages "
            f"there (prompt_key), or the whole conversation in {answer_key!r}"
        )
    return [*prompt, *answer]


def _last_answer(sequences: Sequence[ChatTokens]) -> ChatTokens:
    """Return the sequence that ends with the last answer, in which only that one is trained."""
    ids, mask = sequences[-1]
    end = len(mask) - mask[::-1].index(True) if any(mask) else 0
    start = end
    while start and mask[start - 1]:
        start -= 1
    return ChatTokens(ids, [start <= place < end for place in range(len(mask))])
