"""Render messages and tools as a prompt's text: the only place where the data path calls a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal_lite.api.config import DatasetConfig
from areal_lite.errors import ConfigError

_RESERVED = {"add_generation_prompt", "continue_final_message", "return_dict", "tokenize"}


class TemplateError(ConfigError):
    """A chat template rejected the messages of a row."""


def check_template(renderer: Any, config: DatasetConfig) -> None:
    """Check that there is a chat template and that the config sets no reserved variable."""
    variables = config.apply_chat_template_kwargs
    if wrong := sorted(_RESERVED & variables.keys()):
        raise ConfigError(f"apply_chat_template_kwargs has {', '.join(wrong)}, which is reserved: remove it")
    if not (variables.get("chat_template") or renderer.chat_template):
        raise ConfigError(
            f"the {type(renderer).__name__} has no chat template for messages: use the tokenizer of the model's chat "
            "or instruct version, set apply_chat_template_kwargs.chat_template, or give prompts as text"
        )


def render_prompt(renderer: Any, messages: Any, *, config: DatasetConfig, tools: Any = None) -> str:
    """Return ``messages`` as text that ends with the prompt for the assistant's answer.

    Args:
        config: Its ``apply_chat_template_kwargs`` are variables of the template.
        tools: Tool schemas or their JSON text; the default is the config's variable ``tools``.

    Raises:
        ConfigError: If there are no messages or no template, or the tools are not JSON.
        TemplateError: If the template rejects the messages.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ConfigError(
            f"a prompt is {str(messages)[:80]!r} ({type(messages).__name__}): it must be text or a list of one "
            "message or more"
        )
    check_template(renderer, config)
    variables = dict(config.apply_chat_template_kwargs)
    if schemas := _schemas(tools, config.tools_key):
        variables["tools"] = schemas
    try:
        text: str = renderer.apply_chat_template(
            plain_messages(messages), tokenize=False, add_generation_prompt=True, **variables
        )
    except Exception as error:  # a template is a program and may raise anything
        raise TemplateError(
            f"the chat template cannot write {str(messages)[:200]} ({type(error).__name__}: {error}): fix the row, or "
            "use another template"
        ) from error
    return text


def plain_messages(messages: Any) -> list[Any]:
    """Return messages without keys that are None, which tables add to messages that lack them."""
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        if isinstance(message, Mapping)
        else message
        for message in messages
    ]


def _schemas(tools: Any, key: str) -> Any:
    if isinstance(tools, str):
        try:
            tools = orjson.loads(tools)
        except orjson.JSONDecodeError as error:
            raise ConfigError(
                f"the tools in {key!r} are text that is not JSON ({error}): write a list of schemas"
            ) from None
    return without_nulls(tools)


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that are None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value
