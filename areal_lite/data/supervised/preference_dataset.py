"""Rows with a better and a worse answer as pairs of token sequences.

Guarantees that both sequences of a pair are equal up to the answer, that only the answer is trained, and that both are
at most ``max_length`` long. ``chat_tokens`` tokenizes a conversation; ``tokenized_dataset`` turns rows into items.
"""

from collections.abc import Mapping, Sequence
from typing import Any
import torch
from areal_lite.config.supervised_config import PreferenceDatasetConfig
from areal_lite.data.chat.chat_template import Message
from areal_lite.data.chat.chat_tokens import ChatText, Shortfall, render_conversation, tokens_of
from areal_lite.data.chat.prompt_encoder import from_json
from areal_lite.data.supervised.image_rows import refuse_images
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, Item, Row, Texts, surely_within
from areal_lite.errors import ConfigError


class PreferenceDataset(BaseDataset):
    """One item per pair, in the order of the rows. See :class:`BaseDataset`.

    An item has ``chosen_ids``, ``chosen_mask``, ``rejected_ids`` and ``rejected_mask``; masks are 1 in the last answer.

    The chosen and rejected columns hold text or messages that follow the row's prompt, or the whole conversation. The
    prompt is messages, or text (the user's question). A pair with a sequence that is too long is skipped, since a cut
    answer would be judged without its end; so is a pair of equal answers."""

    config_class = PreferenceDatasetConfig
    config: PreferenceDatasetConfig

    def texts(self, row: Row) -> list[Texts]:
        keys = self.config
        chosen, rejected = (self._conversation(row, key) for key in (keys.chosen_key, keys.rejected_key))
        if chosen[:-1] != rejected[:-1]:
            raise ConfigError(
                f"{keys.chosen_key!r} and {keys.rejected_key!r} differ before their last message: give conversations "
                "that differ only in the last one"
            )
        refuse_images([*chosen, rejected[-1]])
        tools = from_json(row, keys.tools_key)
        return [(self._last_answer(chosen, tools), self._last_answer(rejected, tools))]

    def skip_reason(self, texts: Texts) -> str | None:
        chosen, rejected = texts
        has_mark = Shortfall.NO_END_MARK not in chosen.shortfalls | rejected.shortfalls
        if not (has_mark and all(surely_within(one.text, self.max_length) for one in texts)):
            tokens = [tokens_of(self.tokenizer, one) for one in texts]
            if max(len(ids) for ids, _ in tokens) > self.max_length:
                return "a sequence longer than max_length"
            if not all(any(mask) for _, mask in tokens):
                return "no assistant text"
        return "equal answers" if chosen.text == rejected.text else None

    def item(self, texts: Texts) -> Item:
        item: Item = {}
        for name, one in zip(("chosen", "rejected"), texts, strict=True):
            ids, mask = tokens_of(self.tokenizer, one)
            item |= {f"{name}_ids": torch.tensor(ids), f"{name}_mask": torch.tensor(mask).long()}
        return item

    def _conversation(self, row: Row, answer_key: str) -> list[Message]:
        prompt_key = self.config.prompt_key
        prompt, answer = row.get(prompt_key), row.get(answer_key)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not isinstance(answer, Sequence) or not answer or not all(isinstance(m, Mapping) for m in answer):
            raise ConfigError(
                f"{answer_key!r} is {repr(answer)[:80]}: it must be text or messages; the columns are {list(row)}, "
                "set chosen_key and rejected_key"
            )
        if answer[-1].get("role") != "assistant":
            raise ConfigError(
                f"{answer_key!r} ends with a message of role {answer[-1].get('role')!r}: the last role must be "
                "'assistant'"
            )
        if answer[0].get("role") != "assistant":
            given = [*prompt] if isinstance(prompt, Sequence) and not isinstance(prompt, str) else []
            return [*answer] if given == [*answer[: len(given)]] else [*given, *answer]  # the whole conversation
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence) or not prompt:
            raise ConfigError(
                f"{answer_key!r} is an answer, but {prompt_key!r} is {prompt!r}: give the prompt as text or messages "
                f"(prompt_key), or the whole conversation in {answer_key!r}"
            )
        return [*prompt, *answer]

    def _last_answer(self, messages: Sequence[Message], tools: Any) -> ChatText:
        text = render_conversation(self.tokenizer, messages, tools, self.rendering())[-1]
        return text._replace(spans=text.spans[-1:])
