"""Turn messages into token ids with a tokenizer's chat template, and ids into an answer's text. Stores no conversation.

Guarantees that a later turn is rendered without its history: ``continuation`` renders a placeholder conversation
[user, answer] plus the new messages, and keeps the text after the answer. So the cost depends on the new messages
only, and the text includes what the template writes after an answer (its end token, a line break).
"""

import asyncio
import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
import orjson
from areal_lite.agents.parsers.answer_parser import AnswerParser, answer_parser
from areal_lite.agents.parsers.response_template import ResponseTemplateParser, has_usable_template
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.agents.session.request_images import image_parts
from areal_lite.api.image_span import Images
from areal_lite.data.chat.chat_template import apply_chat_template
from areal_lite.data.chat.hermes_tools import drops_tools, in_hermes_form
from areal_lite.data.chat.tokenizer import check_chat_template
from areal_lite.data.vision.image_encoder import ImageEncoder
from areal_lite.errors import ConfigError

_PLACEHOLDER = "kJ7qPlaceholderAnswerX3v"
_BASE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PLACEHOLDER}]
_LONG_TEXT = 20_000
"""Texts of this many characters are tokenized in a thread, so the event loop is not blocked."""
_PROMPTS_KEPT = 256
"""Rendered prompts kept in memory: the episodes of a group begin with the same one."""


class Rendered(NamedTuple):
    """Ids of messages, with all tokens of their images."""

    ids: list[int]
    images: Images = ()


@functools.cache
def _tokenizers() -> ThreadPoolExecutor:
    """Return the threads that tokenize long texts; they leave the event loop a core of its own."""
    return ThreadPoolExecutor(min(32, max(1, len(os.sched_getaffinity(0)) - 1)), thread_name_prefix="tokenizer")


os.register_at_fork(after_in_child=_tokenizers.cache_clear)  # a fork has no threads


class ChatRenderer:
    """A tokenizer with its chat template, and what encodes the images of a model that reads them."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        tools_in_system_prompt: bool = False,
        images: ImageEncoder | None = None,
    ) -> None:
        check_chat_template(tokenizer)
        self.tokenizer = tokenizer
        self.images = images
        self._tools_in_system_prompt = tools_in_system_prompt
        if tools_in_system_prompt:
            tool_parser = tool_parser or "hermes"
        self.answer_parser: AnswerParser | ResponseTemplateParser = answer_parser(
            _template_text(tokenizer), tool_parser=tool_parser, reasoning_parser=reasoning_parser
        )
        if tool_parser is None and has_usable_template(tokenizer):
            self.answer_parser = ResponseTemplateParser(
                tokenizer.response_template, splits_reasoning=reasoning_parser != "none"
            )
        self._prompts: OrderedDict[bytes, Rendered] = OrderedDict()
        """Ids and images of the latest short prompts, by messages, tools and template variables."""
        self._depends_on_time = "strftime_now" in _template_text(tokenizer)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if backend and not (backend.truncation or backend.padding) else None
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special_ids = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self._adds_bos = list(tokenizer.encode("x"))[:1] == [getattr(tokenizer, "bos_token_id", None)]
        self._takes_parts = images is not None and _drops_strings(tokenizer)
        ends = [tokenizer.eos_token_id]
        # A template that cannot be continued has no end token; then each turn renders the whole conversation.
        with contextlib.suppress(RequestError):
            ends += self._encode(self._text_after_answer([], None, {}))[:1]
        self.stop_ids: list[int] = [token for token in dict.fromkeys(ends) if token in self.special_ids]
        if images is not None:  # a placeholder that is sampled is no image
            self.stop_ids.append(images.placeholder_id)
        self._dropped_ids = {
            tools: {
                i
                for i in self.special_ids
                if i in self.stop_ids or i not in added or not self.answer_parser.reads(added[i].content, tools=tools)
            }
            for tools in (False, True)
        }

    async def prompt(self, messages: list[Any], tools: list[Any] | None, template_kwargs: dict[str, Any]) -> Rendered:
        """Return the ids of a whole conversation, up to the start of the answer."""
        key = None if self._depends_on_time else _prompt_key(messages, tools, template_kwargs)
        if key is not None and (known := self._prompts.get(key)) is not None:
            self._prompts.move_to_end(key)
            return known._replace(ids=known.ids.copy())
        if self._tools_in_system_prompt:
            messages, tools = in_hermes_form(messages, tools), None
        elif tools and drops_tools(self.tokenizer, template_kwargs):
            raise RequestError(
                "the chat template does not render tools, so the model would not see them: set "
                "rollout.agents.tools_in_system_prompt to true, which writes them into the system prompt",
                param="tools",
                code="tools_not_rendered",
            )
        text = self._render(messages, tools, template_kwargs)
        rendered = await self._rendered(text, messages)
        if key is not None and len(text) < _LONG_TEXT:
            self._prompts[key] = rendered._replace(ids=rendered.ids.copy())
            if len(self._prompts) > _PROMPTS_KEPT:
                self._prompts.popitem(last=False)
        return rendered

    async def continuation(
        self, answer: list[int], ended: bool, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]
    ) -> Rendered:
        """Return the ids after a sampled answer, up to the start of the next one; ``ended`` if no limit cut it."""
        if self._tools_in_system_prompt:
            messages, tools = in_hermes_form(messages, None), None
        rendered = await self._rendered(self._text_after_answer(messages, tools, template_kwargs), messages)
        ids = rendered.ids
        if answer and ids and ids[0] in self.special_ids:
            last = answer[-1]
            if last == ids[0] or (ended and last in self.special_ids):
                return Rendered(ids[1:], tuple(span.moved(-1) for span in rendered.images))
        return rendered

    async def _rendered(self, text: str, messages: list[Any]) -> Rendered:
        ids = await self._ids(text)
        if self.images is None:
            return Rendered(ids)
        refs = [part.ref for part in image_parts(messages) if part.ref is not None]
        try:
            return Rendered(*self.images.expanded(ids, refs))
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from None

    async def plain(self, text: str, *, begins: bool) -> list[int]:
        """Return the ids of a text without chat template; ``begins`` adds the tokenizer's opening token."""
        self._check_text([text], "prompt")
        ids = await self._ids(text)
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return [bos, *ids] if begins and bos is not None and self._adds_bos else ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def visible_text(self, ids: list[int], *, skip_special_tokens: bool, tools: bool, ended: bool = False) -> str:
        """Return the text of an answer for ``answer_parser``."""
        dropped = self._dropped_ids[tools]
        if ended and ids and ids[-1] in dropped:
            ids = ids[:-1]
        if skip_special_tokens:
            ids = [i for i in ids if i not in dropped]
        return self.decode(ids)

    def _text_after_answer(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        _, placeholder, rest = self._render([*_BASE, *messages], tools, template_kwargs).partition(_PLACEHOLDER)
        if not placeholder:
            raise RequestError("the chat template leaves out earlier answers, so it cannot be continued")
        return rest

    def _render(self, messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> str:
        self._check_text(messages, "messages")
        self._check_text(tools or (), "tools")
        if self._takes_parts:
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m["content"], str) else m
                for m in messages
            ]
        try:
            settings = {"tools": tools, "add_generation_prompt": True, **template_kwargs}
            return apply_chat_template(self.tokenizer, messages, settings)
        except Exception as error:
            raise RequestError(f"the chat template rejects these messages: {error}"[:500], param="messages") from error

    def _check_text(self, values: Iterable[Any], param: str) -> None:
        """Refuse texts that spell a token of images."""
        if self.images is None:
            return
        for value in values:
            if (mark := self.images.mark_in(value if isinstance(value, str) else str(value))) is not None:
                raise RequestError(
                    f"{param} has the text {mark!r}, which stands for an image: leave it out, and send images as parts",
                    param=param,
                )

    async def _ids(self, text: str) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                return self._encode(text)
            return await asyncio.get_running_loop().run_in_executor(_tokenizers(), self._encode, text)
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise RequestError(f"the messages cannot be tokenized: {error}"[:500], param="messages") from error

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None:
            if len(text) < _LONG_TEXT:
                return list(self._backend.encode(text, add_special_tokens=False).ids)
            # encode() holds the GIL, which stops all other threads; this does not.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return list(encoding.ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


chat_renderer = functools.lru_cache(maxsize=8)(ChatRenderer)
"""Returns the cached renderer of a tokenizer; arguments and errors are those of :class:`ChatRenderer`."""


def _drops_strings(tokenizer: Any) -> bool:
    """Return whether the chat template renders content only as a list of parts."""
    messages = [{"role": "user", "content": _PLACEHOLDER}]
    try:
        return _PLACEHOLDER not in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template is a program and may raise anything
        return True


def _prompt_key(messages: list[Any], tools: Any, template_kwargs: dict[str, Any]) -> bytes | None:
    """Return a key that equal prompts share; None if the prompt has no JSON form or is long."""
    try:
        key = orjson.dumps([messages, tools, template_kwargs])
    except TypeError:  # lone surrogates, or deep nesting
        return None
    return key if len(key) < _LONG_TEXT else None


def _template_text(tokenizer: Any) -> str:
    """Return the chat template; several templates by name are joined."""
    template = getattr(tokenizer, "chat_template", "")
    return "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
