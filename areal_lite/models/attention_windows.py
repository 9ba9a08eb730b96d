"""Sliding windows: which layers of a model have one, and the masks that such a model takes.

A token of a windowed layer sees itself and the ``window - 1`` tokens before it; in other layers it sees all tokens
before it. Guarantees that a model with layers of any other kind is refused by name, not computed approximately.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
import torch
from torch import Tensor

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers' ``layer_types`` names them


def window_of(config: Any) -> int | None:
    """Return the window of the windowed layers, None if there are none."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return window if window is not None and SLIDING in (getattr(config, "layer_types", None) or [SLIDING]) else None


def layer_kinds(config: Any) -> list[str]:
    config = config.get_text_config()
    alike = FULL if window_of(config) is None else SLIDING
    return list(getattr(config, "layer_types", None) or [alike] * getattr(config, "num_hidden_layers", 1))


def unsupported_layers(config: Any) -> str | None:
    """Return what the layers of a model have that is neither full attention nor a window; None if nothing."""
    kinds, window = layer_kinds(config), window_of(config)
    if other := sorted(set(kinds) - {FULL, SLIDING}):
        return f"{other[0]} layers"
    if SLIDING in kinds and (window is None or window < 1):
        return f"{SLIDING} layers and sliding_window {window}"
    return None


def causal_window(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return ``[queries, keys]`` bool, True where a query sees a key; the queries are the last of the keys."""
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return seen if window is None else seen.triu(keys - queries - window + 1)


def within_window(seen: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Return ``seen [B, 1, L, L]`` without the keys before a query's window, from ``positions [B, L]``."""
    assert window is not None
    return seen & (positions[:, None, None] > (positions - window)[:, None, :, None])


def added_to_scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add: 0 where a key is seen, else the least number."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def mask_argument(masks: dict[str, Tensor]) -> Any:
    """Return the ``attention_mask`` of a model of transformers from the mask of each kind of its layers."""
    return masks if len(masks) > 1 else next(iter(masks.values()))


@contextmanager
def short_windows(model: Any, window: int) -> Iterator[None]:
    """Shorten the windows of a model, so that a check of a few tokens crosses their border."""
    parts = [model.config.get_text_config(), *model.modules()]
    windows = [(part, part.sliding_window) for part in parts if getattr(part, "sliding_window", None) is not None]
    try:
        for part, own in windows:
            part.sliding_window = min(window, own)
        yield
    finally:
        for part, own in windows:
            part.sliding_window = own
