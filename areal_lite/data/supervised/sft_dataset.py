"""Conversations as token sequences for supervised fine-tuning.

Guarantees that every item trains at least one token and is at most ``max_length`` long.
``chat_tokens`` tokenizes a conversation; ``tokenized_dataset`` turns rows into items.
"""

from collections.abc import Sequence
import torch
from areal_lite.config.supervised_config import SFTDatasetConfig
from areal_lite.data.chat.chat_template import Message
from areal_lite.data.chat.chat_tokens import ChatText, Shortfall, render_conversation, tokens_of
from areal_lite.data.chat.prompt_encoder import from_json
from areal_lite.data.supervised.image_rows import ImageTokens, expanded, refuse_images, take_images
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, Item, Row, Texts, surely_within
from areal_lite.errors import ConfigError

_LONGEST_TOKEN = 128  # characters of the longest token of a vocabulary


class SFTDataset(BaseDataset):
    """One item per training sequence, in the order of the rows; usually one per row. See :class:`BaseDataset`.

    An item has ``input_ids`` and ``loss_mask``, which is 1 where the token itself is trained; the loss shifts both.
    Sequences longer than ``max_length`` are cut at the end; ``truncated`` of an item is then 1.

    A row has messages, or a prompt (text or messages) and a response (text). With the chat template, a text prompt is
    the user's question. Without it, prompt and response are joined unchanged and the EOS token follows the response;
    messages are joined without an EOS token. Messages and tools may be lists or JSON text.

    Images are parts of messages, ``{"type": "image", "image": ...}``, or take the place of ``<image>`` in a text, from
    the column ``image_key``; an item with some has their spans as ``images``.
    """

    config_class = SFTDatasetConfig
    config: SFTDatasetConfig

    def texts(self, row: Row) -> list[Texts]:
        tools, rendering = from_json(row, self.config.tools_key), self.rendering(self.config.apply_chat_template)
        messages = self._messages(row)
        if self.images is None:
            refuse_images(messages, row, self.config.image_key)
            return [(one,) for one in render_conversation(self.tokenizer, messages, tools, rendering)]
        messages, images = take_images(messages, row, self.config, self.images)
        mark = self.images.processor.placeholder
        return [
            (one._replace(images=images[: one.text.count(mark)]),)
            for one in render_conversation(self.tokenizer, messages, tools, rendering)
        ]

    def skip_reason(self, texts: Texts) -> str | None:
        (text,) = texts
        if not text.spans:
            return "no assistant text"
        start, end = text.spans[0]
        # The end mark is a token of its own; other tokens may cross the start.
        trains = not text.joints and Shortfall.NO_END_MARK not in text.shortfalls
        if trains and not text.images and surely_within(text.text[: min(end, start + _LONGEST_TOKEN)], self.max_length):
            return None
        tokens = self._tokens(text)
        if not any(tokens.loss_mask):
            return "no assistant text"
        return None if any(tokens.cut(self.max_length).loss_mask) else "no trained token within max_length"

    def item(self, texts: Texts) -> Item:
        tokens = self._tokens(texts[0])
        kept = tokens.cut(self.max_length)
        if self.images is not None:
            for image in texts[0].images:
                self.images.store.put(image.png)
        item: Item = {
            "input_ids": torch.tensor(kept.input_ids),
            "loss_mask": torch.tensor(kept.loss_mask).long(),
            "truncated": torch.tensor(int(len(kept.input_ids) < len(tokens.input_ids))),
        }
        return item | {"images": kept.images} if kept.images else item

    def _tokens(self, text: ChatText) -> ImageTokens:
        tokens = tokens_of(self.tokenizer, text)
        return ImageTokens(*tokens) if self.images is None else expanded(tokens, text.images, self.images)

    def _messages(self, row: Row) -> Sequence[Message]:
        keys = self.config
        if row.get(keys.messages_key) is not None:
            return from_json(row, keys.messages_key)  # type: ignore[no-any-return]
        given = row.get(keys.prompt_key), row.get(keys.response_key)
        prompt, response = (
            str(one) if type(one) in (int, float) else one for one in given
        )  # a CSV's digits are numbers
        if not isinstance(prompt, Sequence) or not isinstance(response, str):
            raise ConfigError(
                f"it has neither {keys.messages_key!r} nor both {keys.prompt_key!r} (text or messages) and "
                f"{keys.response_key!r} (text), but the columns {list(row)}: set messages_key, or prompt_key and "
                "response_key"
            )
        if not keys.apply_chat_template:
            if self.tokenizer.eos_token is None:
                raise ConfigError("the tokenizer has no EOS token to end a response: set tokenizer.eos_token")
            response += self.tokenizer.eos_token
        question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return [*question, {"role": "assistant", "content": response}]
