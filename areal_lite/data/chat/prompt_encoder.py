"""A row's prompt as messages, as text rendered by the chat template, and as tokens.

The only place where prompts of rows meet a chat template. Guarantees the same tokens for measuring a prompt and for
using it, in a dataset's items and in the rows of a run. Knows nothing of padding, nor of images, which
:mod:`areal_lite.data.vision.multimodal` adds. Encoders are copied to worker processes, so they hold only their
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.hermes_tools import check_tools_are_rendered, in_hermes_form
from areal_lite.errors import ConfigError

_RESERVED = {"add_generation_prompt", "continue_final_message", "return_dict", "tokenize"}


class TemplateError(ConfigError):
    """A chat template rejected the messages of a row."""


def prompt_messages(row: Mapping[str, Any], prompt_key: str) -> list[dict[str, Any]]:
    """Return the messages of a row's prompt, each with its content; text becomes one user message."""
    given: Any = row.get(prompt_key)
    prompt = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if (
        not isinstance(prompt, list | tuple)
        or not prompt
        or not all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in prompt)
    ):
        raise ConfigError(
            f"the prompt in {prompt_key!r} is {str(given)[:80]!r} ({type(given).__name__}): it must be text or a list "
            "of messages, {role, content}"
        )
    return [_plain(message) for message in prompt]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without keys that are None, which tables add to messages and parts that lack them."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = [
            {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else part
            for part in content
        ]
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


def parts_of(messages: Iterable[Mapping[str, Any]], *kinds: str) -> list[Mapping[str, Any]]:
    """Return the parts of these types, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") in kinds]


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that are None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """One prompt in all its forms."""

    messages: list[dict[str, Any]]
    text: str
    input_ids: list[int]  # neither padded nor truncated
    media: dict[str, Any] = field(default_factory=dict)
    """``multi_modal_data`` and ``multi_modal_inputs``, if the row has images or videos and the encoder reads them."""


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Encodes the prompts of rows."""

    config: DatasetConfig
    tokenizer: Any
    system_prompt: str | None = None  # system message before a prompt that is text

    def __post_init__(self) -> None:
        if not self.config.apply_chat_template:
            return
        variables = self.config.apply_chat_template_kwargs
        if wrong := sorted(_RESERVED & variables.keys()):
            raise ConfigError(f"apply_chat_template_kwargs has {', '.join(wrong)}, which is reserved: remove it")
        if not (variables.get("chat_template") or self.renderer.chat_template):
            raise ConfigError(
                f"the {type(self.renderer).__name__} has no chat template for messages: use the tokenizer of the "
                "model's chat or instruct version, set apply_chat_template_kwargs.chat_template, or give prompts as "
                "text"
            )

    @property
    def renderer(self) -> Any:
        """The owner of the chat template."""
        return self.tokenizer

    def rendered(self, messages: list[dict[str, Any]], tools: Any = None) -> str:
        """Return ``messages`` as text that ends with the prompt for the assistant's answer. ``tools`` are schemas, or
        JSON text of them, as the row has them."""
        config = self.config
        variables = dict(config.apply_chat_template_kwargs)
        if isinstance(tools, str):
            try:
                tools = orjson.loads(tools)
            except orjson.JSONDecodeError as error:
                raise ConfigError(
                    f"the tools in {config.tools_key!r} are not JSON ({error}): write a list of schemas"
                ) from None
        schemas = without_nulls(tools) or variables.pop("tools", None)
        if config.tools_in_system_prompt:
            messages, schemas = in_hermes_form(messages, schemas), None
        check_tools_are_rendered(self.renderer, schemas, variables)
        if schemas:
            variables["tools"] = schemas
        try:
            text: str = self.renderer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateError(
                f"the chat template cannot write {str(messages)[:200]} ({type(error).__name__}: {error}): fix the "
                "row, or use another template"
            ) from error
        return text

    def messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the prompt's messages, after the system prompt if the row's is text."""
        messages = self.row_messages(row)
        if self.system_prompt and isinstance(row[self.config.prompt_key], str):
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def row_messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the messages that the row itself has."""
        return prompt_messages(row, self.config.prompt_key)

    def encode(self, row: Mapping[str, Any] | str | list[Any]) -> EncodedPrompt:
        """Return the prompt of ``row``: of its column, or a row that is messages, or text, which is used as it is."""
        config = self.config
        if isinstance(row, str) or not config.apply_chat_template:
            prompt = row[config.prompt_key] if isinstance(row, Mapping) else row
            if not isinstance(prompt, str):
                raise ConfigError(
                    f"apply_chat_template is false, and the prompt in {config.prompt_key!r} is {str(prompt)[:80]!r} "
                    f"({type(prompt).__name__}): give text, or set apply_chat_template: true"
                )
            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            return EncodedPrompt(messages=[], text=prompt, input_ids=ids)
        row = row if isinstance(row, Mapping) else {config.prompt_key: row}
        messages = self.messages(row)
        text = self.rendered(messages, row.get(config.tools_key))
        return self.tokenized(row, messages, text)

    def tokenized(self, row: Mapping[str, Any], messages: list[dict[str, Any]], text: str) -> EncodedPrompt:
        """Return the rendered prompt of ``row`` with its ids; ConfigError if it has images or videos."""
        columns = (row.get(self.config.image_key), row.get(self.config.video_key))
        has_columns = any(bool(value) if isinstance(value, list) else value is not None for value in columns)
        if has_columns or parts_of(messages, "image", "video"):
            raise ConfigError(
                "the row has images or videos, which runs do not read: remove them or, in a loop of your own, pass the "
                "model's processor"
            )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return EncodedPrompt(messages=messages, text=text, input_ids=ids)

    def forms(self, prompt: EncodedPrompt) -> dict[str, Any]:
        """Return the forms of a prompt that do not depend on padding, by the names that a row has them under.
        ``raw_prompt_ids`` are its ids, at most max_prompt_length of them; ``raw_prompt`` are its messages, with
        return_raw_chat; ``full_prompts`` is its text, with return_full_prompt."""
        config, ids = self.config, prompt.input_ids
        if (limit := config.max_prompt_length) is not None and len(ids) > limit:
            if prompt.media:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, but max_prompt_length is {limit}, and images cannot be "
                    "truncated: raise it, or set filter_overlong_prompts"
                )
            head, tail = kept_ends(len(ids), limit, config.truncation)
            ids = ids[:head] + ids[len(ids) - tail :]
        forms: dict[str, Any] = {"raw_prompt_ids": ids}
        if config.return_raw_chat:
            forms["raw_prompt"] = prompt.messages
        if config.return_full_prompt:
            forms["full_prompts"] = prompt.text
        return forms


def kept_ends(length: int, limit: int, truncation: str) -> tuple[int, int]:
    """Return how many tokens a prompt of ``length`` above ``limit`` keeps at its beginning and at its end."""
    if truncation == "error":
        raise ValueError(
            f"the prompt has {length} tokens, and the maximum is {limit}: raise max_prompt_length, set "
            "filter_overlong_prompts, or set truncation to left, right or middle"
        )
    head = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return head, limit - head
