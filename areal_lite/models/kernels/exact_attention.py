"""Attention that computes a token the same way in every layout, for trainer and embedded server.

Guarantees, on a CPU in float32, that a token gets the same bits whether a model reads a sequence at once or token by
token: each query is computed on its own, over its keys in whole blocks. The other operations give a token the same bits
in every pass of :func:`whole_rows`, which callers keep. Slower than plain attention.
"""

from contextlib import suppress
from typing import Any
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from areal_lite.models.attention_windows import added_to_scores, causal_window, short_windows

EXACT = "areal_lite_exact"  # name of the attention implementation
MIN_ROWS = 16  # fewest rows of a matrix product; libraries have other kernels for fewer
_BLOCK = 32


def whole_rows(tokens: int) -> int:
    """Return ``tokens`` rounded up to a multiple of :data:`MIN_ROWS`: what is left over after whole vector registers is
    computed by other code, with other rounding."""
    return -(-tokens // MIN_ROWS) * MIN_ROWS


def exact_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return ``[n, T, heads, width]`` from inputs ``[n, heads, T, width]``, the layout of transformers."""
    if options.get("softcap") is not None:
        raise ValueError("exact attention does not cap scores")
    (rows, heads, length, _), num_keys = query.shape, key.shape[2]
    past, missing = num_keys - length, -num_keys % _BLOCK
    if attention_mask is None:
        seen = causal_window(length, num_keys, options.get("sliding_window"), query.device)
        attention_mask = added_to_scores(seen, query.dtype).expand(rows, 1, -1, -1)
    mask = F.pad(attention_mask, (0, missing), value=torch.finfo(query.dtype).min)
    repeats = heads // key.shape[1]
    key, value = (F.pad(states.repeat_interleave(repeats, 1), (0, 0, 0, missing)) for states in (key, value))
    parts = []
    for row in range(rows):
        start = 0
        while start < length:
            width = (past + start) // _BLOCK * _BLOCK + _BLOCK
            end = min(length, width - past)
            q = query[row, :, start:end].transpose(0, 1)[:, :, None]
            k, v = (states[row, None, :, :width].expand(end - start, -1, -1, -1) for states in (key, value))
            seen = mask[row, :, start:end, :width].transpose(0, 1)[:, :, None]
            parts.append(F.scaled_dot_product_attention(q, k, v, seen, scale=options.get("scaling"))[:, :, 0])
            start = end
    return torch.cat(parts).view(rows, length, heads, -1), None


AttentionInterface.register(EXACT, exact_attention)


@torch.no_grad()
def read_exactly(model: Any) -> bool:
    """Switch a Hugging Face model to exact attention if its logits stay the same; return whether they do. Models on a
    GPU or in half precision keep their attention."""
    if model.device.type != "cpu" or model.dtype != torch.float32:
        return False
    before, decoder = model.config.get_text_config()._attn_implementation, model.get_decoder()
    ids = torch.arange(1, MIN_ROWS + 1)[None]
    with short_windows(model, MIN_ROWS // 2):
        plain = model(input_ids=ids, use_cache=False).logits
        with suppress(RuntimeError, TypeError, ValueError):
            decoder.set_attn_implementation(EXACT)  # a vision tower keeps its own
            if torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, atol=1e-3, rtol=1e-3):
                return True
    decoder.set_attn_implementation(before)
    return False
