"""A row's prompt as messages, as text rendered by the chat template, and as tokens.

The only place where prompts of rows meet a chat template. Guarantees the same tokens for measuring a prompt and for
using it, in a dataset's items and in the rows of a run. Knows nothing of padding, nor of images, which
``data.vision.multimodal`` adds. Encoders are copied to worker processes, so they hold only their arguments.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.chat_template import ChatTemplate
from areal_lite.data.chat.hermes_tools import check_tools_are_rendered, in_hermes_form
from areal_lite.errors import ConfigError

_RESERVED = {"add_generation_prompt", "continue_final_message", "return_dict", "tokenize"}


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


def from_json(row: Mapping[str, Any], key: str) -> Any:
    """Return a column that holds a list, or JSON text of a list."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{key!r} is the text {value[:80]!r}, which is not JSON ({error}): it must be a list, or JSON text of one"
        ) from error


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

    def rendered(self, messages: list[dict[str, Any]], row: Mapping[str, Any]) -> str:
        """Return ``messages`` as text that ends with the prompt for the assistant's answer; ``row`` may have tools."""
        variables = dict(self.config.apply_chat_template_kwargs)
        tools = variables.pop("tools", None)
        schemas = without_nulls(from_json(row, self.config.tools_key)) or tools
        if self.config.tools_in_system_prompt:
            messages, schemas = in_hermes_form(messages, schemas), None
        check_tools_are_rendered(self.renderer, schemas, variables)
        return ChatTemplate(self.renderer, schemas or None, variables).write(messages, prompt=True)

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
        return self.tokenized(row, messages, self.rendered(messages, row))

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
        """Return the forms of a prompt in a row: ``raw_prompt_ids``, at most max_prompt_length ids without padding;
        ``raw_prompt``, its messages, with return_raw_chat; ``full_prompts``, its text, with return_full_prompt."""
        config, ids = self.config, prompt.input_ids
        if (limit := config.max_prompt_length) is not None and len(ids) > limit:
            if prompt.media:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, but max_prompt_length is {limit}, and images cannot be "
                    "truncated: raise it, or set filter_overlong_prompts"
                )
            ids = [ids[place] for place in kept_places(len(ids), limit, config.truncation)]
        forms: dict[str, Any] = {"raw_prompt_ids": ids}
        if config.return_raw_chat:
            forms["raw_prompt"] = prompt.messages
        if config.return_full_prompt:
            forms["full_prompts"] = prompt.text
        return forms


def kept_places(length: int, limit: int, truncation: str) -> list[int]:
    """Return the places of the ``limit`` tokens that a prompt of ``length`` above it keeps."""
    if truncation == "error":
        raise ValueError(
            f"the prompt has {length} tokens, and the maximum is {limit}: raise max_prompt_length, set "
            "filter_overlong_prompts, or set truncation to left, right or middle"
        )
    head = {"left": 0, "right": limit, "middle": limit // 2}[truncation]
    return [*range(head), *range(length - limit + head, length)]
