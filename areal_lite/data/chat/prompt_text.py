"""Messages and tools become a prompt's text: the one place where the data path asks a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal_lite.api.config import DatasetConfig
from areal_lite.errors import ConfigError

_OURS = {"add_generation_prompt", "continue_final_message", "return_dict", "tokenize"}


class TemplateError(ConfigError):
    """A chat template refused the messages of a row."""


def check_template(renderer: Any, config: DatasetConfig) -> None:
    """Refuse a tokenizer or processor without a chat template, and variables that are not free.

    Raises:
        ConfigError: With the mend.
    """
    variables = config.apply_chat_template_kwargs
    if wrong := sorted(_OURS & variables.keys()):
        raise ConfigError(f"apply_chat_template_kwargs has {', '.join(wrong)}, which is not free: remove it")
    if not (variables.get("chat_template") or renderer.chat_template):
        raise ConfigError(
            f"the {type(renderer).__name__} has no chat template for messages: take the tokenizer of the model's chat "
            "or instruct version, set apply_chat_template_kwargs.chat_template, or give prompts as text"
        )


def render_prompt(renderer: Any, messages: Any, *, config: DatasetConfig, tools: Any = None) -> str:
    """Return ``messages`` as text, up to where the assistant answers.

    Args:
        renderer: The tokenizer or processor whose chat template writes them.
        messages: One message or more.
        config: Its ``apply_chat_template_kwargs`` are variables of the template.
        tools: Schemas for the template, or their JSON text; without any, those of the config's variables.

    Raises:
        ConfigError: If there are no messages, no template, or the tools are no JSON.
        TemplateError: If the template refuses the messages.
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
    except Exception as error:  # a template is a program of its own and may raise anything
        raise TemplateError(
            f"the chat template cannot write {str(messages)[:200]} ({type(error).__name__}: {error}): mend the row, or "
            "use another template"
        ) from error
    return text


def plain_messages(messages: Any) -> list[Any]:
    """Return messages without the keys that are None: a table gives each message the keys of all others."""
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
                f"the tools in {key!r} are a text that is not JSON ({error}): write a list of schemas"
            ) from None
    return _without_nulls(tools)


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without the keys that are None, at any depth."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
