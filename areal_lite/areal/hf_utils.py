"""AReaL's names for loading tokenizers and rendering conversations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.data.chat.tokenizer import load_processor, load_tokenizer


def apply_chat_template(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **kwargs: Any
) -> Any:
    """Return the rendered conversation as a list of token ids, or as text with ``tokenize=False``."""
    rendered = tokenizer.apply_chat_template(messages, tokenize=tokenize, **kwargs)
    return list(rendered["input_ids"]) if isinstance(rendered, Mapping) else rendered


@functools.cache
def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub name; without a pad token, its end token pads.

    Args:
        model_name_or_path: Folder or hub name.
        fast_tokenizer: Ignored: the model's own kind is loaded.
        padding_side: "left" or "right"; None is the tokenizer's own.

    Raises:
        ConfigError: If there is none.
    """
    tokenizer = copy.deepcopy(load_tokenizer(model_name_or_path))  # the shared one stays as it is
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    if padding_side is not None:
        tokenizer.padding_side = padding_side
    return tokenizer


def load_hf_processor_and_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> tuple[Any, Any]:
    """Return the processor (None for a model that reads only text) and the tokenizer.

    Raises:
        ConfigError: If either cannot be loaded.
    """
    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side)
    return load_processor(model_name_or_path), tokenizer
