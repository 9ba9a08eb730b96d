"""From messages to token ids with a tokenizer's chat template; holds no conversation.

Guarantees that a later turn is rendered without its history: ``continuation`` renders a stand-in
conversation [user, answer] with the new messages behind it and keeps what follows the answer, so that
it costs the new messages only and includes what the template puts behind an answer (its end token,
a line break).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

from areal_lite.agents.request_error import RequestError
from areal_lite.errors import ConfigError

_STAND_IN = "kJ7qPlaceholderAnswerX3v"
_BASE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _STAND_IN}]
_LONG_TEXT = 200_000
"""Characters from which a text is tokenized in a thread, so that the event loop goes on."""


class ChatRenderer:
    """A tokenizer with its chat template, as sessions use it.

    Args:
        tokenizer: A Hugging Face tokenizer, or an object with its ``apply_chat_template``, ``encode``
            and ``decode``.

    Raises:
        ConfigError: If it has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", "") is None:
            raise ConfigError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template, so messages cannot "
                "become a prompt: use an instruction-tuned model's tokenizer, or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if backend and not (backend.truncation or backend.padding) else None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.stop_ids: list[int] = []
        """Ids an answer ends at: the tokenizer's end token and the chat template's."""
        ends = [tokenizer.eos_token_id]
        # A template that cannot be continued has no such end; every turn is then rendered whole.
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
        """Return the ids of a whole conversation, up to where the answer begins.

        Raises:
            RequestError: If the template refuses the messages.
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
        """Return the ids that follow a sampled answer, up to where the next answer begins.

        Args:
            answer: Sampled ids; an end token they end with is not given again.
            ended: True where the answer stopped by itself, False where it was cut by length.
            messages: The new messages.
            tools: Declared tools.
            template_kwargs: Extra variables of the template.

        Raises:
            RequestError: If the template refuses the messages or cannot be continued.
        """
        ids = await self._ids(self._text_after_answer(messages, tools, template_kwargs))
        if answer and ids and ids[0] in self.special_ids:
            last = answer[-1]
            if last == ids[0] or (ended and last in self.special_ids):
                return ids[1:]
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _text_after_answer(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        text = self._render([*_BASE, *messages], tools, template_kwargs)
        _, found, rest = text.partition(_STAND_IN)
        if not found:
            raise RequestError("the chat template leaves out earlier answers, so it cannot be continued")
        return rest

    def _render(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **template_kwargs
            )
        except Exception as error:  # templates raise what they like: jinja2's errors, TypeError, ...
            raise RequestError(
                f"the chat template refuses these messages: {error}"[:500], param="messages"
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
    """Return the renderer of a tokenizer; the same one for the same tokenizer.

    Raises:
        ConfigError: If it has no chat template.
    """
    return ChatRenderer(tokenizer)
