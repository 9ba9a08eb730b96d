"""Turn messages into token ids with a tokenizer's chat template. Stores no conversation.

Guarantees that a later turn is rendered without its history: ``continuation`` renders a placeholder conversation
[user, answer] plus the new messages, and keeps the text after the answer. So the cost depends on the new messages
only, and the text includes what the template writes after an answer (its end token, a line break).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

from areal_lite.agents.request_fields import RequestError
from areal_lite.errors import ConfigError

_PLACEHOLDER = "kJ7qPlaceholderAnswerX3v"
_BASE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PLACEHOLDER}]
_LONG_TEXT = 200_000
"""Texts of this many characters are tokenized in a thread, so the event loop is not blocked."""


class ChatRenderer:
    """A tokenizer with its chat template.

    Args:
        tokenizer: A Hugging Face tokenizer, or an object with the methods ``apply_chat_template``, ``encode`` and
            ``decode``.

    Raises:
        ConfigError: If the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", "") is None:
            raise ConfigError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template to render messages "
                "with: use an instruction-tuned model's tokenizer, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if backend and not (backend.truncation or backend.padding) else None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._adds_bos = list(tokenizer.encode("x"))[:1] == [getattr(tokenizer, "bos_token_id", None)]
        self.stop_ids: list[int] = []
        """Ids that end an answer: the end tokens of the tokenizer and of the chat template."""
        ends = [tokenizer.eos_token_id]
        # A template that cannot be continued has no end token; then each turn renders the whole conversation.
        with contextlib.suppress(RequestError):
            ends += self._encode(self._text_after_answer([], None, {}))[:1]
        for token in ends:
            if token in self.special_ids and token not in self.stop_ids:
                self.stop_ids.append(token)

    async def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Return the ids of a whole conversation, up to the start of the answer.

        Raises:
            RequestError: If the template rejects the messages.
        """
        return await self._ids(self._render(messages, tools, template_kwargs))

    async def continuation(
        self,
        answer: list[int],
        ended: bool,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Return the ids after a sampled answer, up to the start of the next answer.

        Args:
            answer: Sampled ids. If they include the end token, it is not repeated.
            ended: True if the answer stopped by itself, False if the length limit cut it.
            messages: The new messages.
            tools: Declared tools.
            template_kwargs: Extra variables for the template.

        Raises:
            RequestError: If the template rejects the messages or cannot be continued.
        """
        ids = await self._ids(self._text_after_answer(messages, tools, template_kwargs))
        if answer and ids and ids[0] in self.special_ids:
            last = answer[-1]
            if last == ids[0] or (ended and last in self.special_ids):
                return ids[1:]
        return ids

    async def plain(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text without chat template; ``begins`` adds the tokenizer's opening token."""
        ids = await self._ids(text)
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return [bos, *ids] if begins and bos is not None and self._adds_bos else ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _text_after_answer(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        text = self._render([*_BASE, *messages], tools, template_kwargs)
        _, placeholder, rest = text.partition(_PLACEHOLDER)
        if not placeholder:
            raise RequestError("the chat template leaves out earlier answers, so it cannot be continued")
        return rest

    def _render(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **template_kwargs
            )
        except Exception as error:  # templates raise anything: jinja2 errors, TypeError, ...
            raise RequestError(
                f"the chat template rejects these messages: {error}"[:500], param="messages"
            ) from error
        return str(text)

    async def _ids(self, text: str) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                return self._encode(text)
            return await asyncio.to_thread(self._encode, text)
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise RequestError(
                f"the messages cannot be tokenized: {error}"[:500], param="messages"
            ) from error

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=8)
def chat_renderer(tokenizer: Any) -> ChatRenderer:
    """Return the cached renderer of a tokenizer.

    Raises:
        ConfigError: If the tokenizer has no chat template.
    """
    return ChatRenderer(tokenizer)
