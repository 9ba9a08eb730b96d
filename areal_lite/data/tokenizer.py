"""The tokenizer of a model, loaded once per folder."""

from __future__ import annotations

import functools
import threading
from typing import Any

from areal_lite.errors import ConfigError

# Two threads that import transformers at the same time break its circular imports.
_lock = threading.Lock()


def load_tokenizer(path: str) -> Any:
    """Return the Hugging Face tokenizer of ``path``, a folder or a hub name; any thread may ask.

    Raises:
        ConfigError: If there is none.
    """
    with _lock:
        return _load(path)


@functools.cache
def _load(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises many kinds for a missing or broken folder
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r} ({reason}): name a folder with tokenizer.json and "
            "tokenizer_config.json, such as the model's own"
        ) from error
