"""Rows of conversations as the tokens that supervised fine-tuning trains.

Guarantees that every item trains at least one token and is no longer than ``max_length``, that items keep the
order of the rows, and that what is left out is counted by reason. How a conversation becomes tokens:
``chat_tokens``; how files become rows: ``row_files``. Knows nothing of batches or packing.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from areal_lite.data.chat_tokens import ChatTokens, Message, conversation_sequences
from areal_lite.errors import ConfigError

logger = logging.getLogger(__name__)

Row = Mapping[str, Any]
Item = dict[str, torch.Tensor]
_CHUNK = 256
"""Rows that go to a worker process at once."""


class BaseDataset(Dataset[Item]):
    """The rows of a run with its tokenizer; a subclass says what an item is.

    Args:
        data_path: What ``row_files.load_dataset`` reads, or the rows: dicts, or a ``datasets.Dataset``.
        tokenizer: The model's Hugging Face tokenizer.
        max_length: Longest item in tokens.
        cache_dir: Folder for copies of remote files and tables of read ones; None is ~/.cache/areal_lite.

    Raises:
        ConfigError: If ``max_length`` is below 2, or there are no rows.
    """

    def __init__(
        self,
        data_path: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        max_length: int,
        cache_dir: str | None = None,
    ) -> None:
        if max_length < 2:
            raise ConfigError(
                f"max_length is {max_length}: the first token of a sequence is never trained, so use 2 or more"
            )
        if not data_path:
            raise ConfigError("there are no rows: give at least one, or the path of a file")
        self.tokenizer = tokenizer
        self.max_length = max_length
        rows: Any = [data_path] if isinstance(data_path, str) else data_path
        if isinstance(rows[0], str):
            from areal_lite.data.row_files import load_dataset

            rows = load_dataset(rows, cache_dir=cache_dir)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def collate_fn(self, batch: Sequence[Item]) -> list[Item]:
        """Return the items as a list: they differ in length, and are packed where devices are known."""
        return list(batch)


class SFTDataset(BaseDataset):
    """One item for each training sequence of the rows, in their order; mostly one a row.

    An item is ``{"input_ids", "loss_mask"}``, two int64 tensors ``[T]``. The mask is 1 where the token itself is
    trained; a loss shifts both. A longer sequence loses its end.

    A row has messages, or else a prompt and a response. The prompt is text or messages, the response is text. With
    the template, a text prompt is the user's question. Without it both are joined as they are, and the EOS token
    follows the response; nothing follows the contents of messages. Messages and tools may be lists or JSON text.

    Everything is tokenized at once, since only then is it known how many items there are: 2 milliseconds
    for a row of 3 answers and 640 tokens, 22 for one of 20 and 4300, in one process. An item takes 5 bytes a token.

    Args:
        data_path: Files or rows, see :class:`BaseDataset`.
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        max_length: Longest item in tokens.
        messages_key: Column of the conversation.
        prompt_key: Column of what a response answers.
        response_key: Column of the text that is trained.
        tools_key: Column of tool schemas that the template renders; may be missing.
        apply_chat_template: False joins texts as they are.
        template_kwargs: Further variables of the template, or another ``chat_template``.
        cache_dir: As for :class:`BaseDataset`.
        num_workers: Processes that tokenize; 0 is this one. Each imports the main module again, so a script
            needs ``if __name__ == "__main__"``.

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
        super().__init__(data_path, tokenizer, max_length, cache_dir)
        self.dropped: Counter[str] = Counter()
        """Sequences that were left out, by reason."""
        self.truncated = 0
        """Items that lost their end."""
        self._items: list[tuple[torch.Tensor, torch.Tensor]] = []
        tokenize = _RowTokenizer(
            tokenizer=tokenizer,
            messages_key=messages_key,
            prompt_key=prompt_key,
            response_key=response_key,
            tools_key=tools_key,
            apply_chat_template=apply_chat_template,
            template_kwargs=template_kwargs,
            padded_columns=padded_columns(self.rows),
        )
        for sequences in _map(tokenize, enumerate(self.rows), num_workers):
            for sequence in sequences:
                self._add(sequence)
        reasons = ", ".join(f"{count} with {reason}" for reason, count in self.dropped.items())
        if not self._items:
            raise ConfigError(
                f"nothing is trained, all sequences of {len(self.rows)} rows are left out: {reasons}; each needs an "
                f"assistant message that begins within max_length={max_length} tokens"
            )
        if self.dropped:
            logger.warning("of %d rows, sequences are left out: %s", len(self.rows), reasons)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        ids, mask = self._items[index]
        return {"input_ids": ids.long(), "loss_mask": mask.long()}

    def _add(self, sequence: ChatTokens) -> None:
        if not any(sequence.loss_mask):
            self.dropped["no text of an assistant"] += 1
        elif not any(sequence.loss_mask[: self.max_length]):
            self.dropped["no trained token within max_length"] += 1
        else:
            self.truncated += len(sequence.input_ids) > self.max_length
            ids = torch.tensor(sequence.input_ids[: self.max_length], dtype=torch.int32)
            self._items.append((ids, torch.tensor(sequence.loss_mask[: self.max_length])))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowTokenizer:
    """What a worker process needs to turn a row into sequences."""

    tokenizer: Any
    messages_key: str
    prompt_key: str
    response_key: str
    tools_key: str
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] | None
    padded_columns: frozenset[str]

    def __call__(self, numbered_row: tuple[int, Row]) -> list[ChatTokens]:
        number, row = numbered_row
        try:
            row = {
                key: without_none(value) if key in self.padded_columns else value
                for key, value in row.items()
            }
            return conversation_sequences(
                self.tokenizer,
                self._messages(row),
                from_json(row, self.tools_key),
                apply_chat_template=self.apply_chat_template,
                template_kwargs=self.template_kwargs,
            )
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from error

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


def from_json(row: Row, key: str) -> Any:
    """Return a column that holds a list, or JSON text of one; ConfigError where its text is no JSON."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{key!r} is the text {value[:80]!r}, which is not JSON ({error}): it must be a list, or JSON text of one"
        ) from error


def padded_columns(rows: Any) -> frozenset[str]:
    """Return the columns in which Arrow gave each record the keys of all others, with None for a value."""
    if not hasattr(rows, "features"):
        return frozenset()
    return frozenset(column.name for column in rows.features.arrow_schema if "struct<" in str(column.type))


def without_none(value: Any) -> Any:
    """Return the value without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_none(entry) for key, entry in value.items() if entry is not None}
    return [without_none(entry) for entry in value] if isinstance(value, list) else value


def _map(
    tokenize: _RowTokenizer, rows: Iterable[tuple[int, Row]], num_workers: int
) -> Iterator[list[ChatTokens]]:
    if num_workers == 0:
        yield from map(tokenize, rows)
        return
    # A forked child of a process with tokenizer and torch threads may hang.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        yield from pool.map(tokenize, rows, chunksize=_CHUNK)
