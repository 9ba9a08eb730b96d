"""Sequences laid out for one forward pass, and the model that reads them.

Guarantees that a token sees what it would see in its sequence alone, however the sequences are laid
out. The shift by one (a token is predicted at the one before it) happens here, in :func:`pack`, and
nowhere else.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from areal_lite.api.trajectory import TokenSequence
from areal_lite.models.attention_windows import (
    FULL,
    added_to_scores,
    layer_kinds,
    mask_argument,
    short_windows,
    unsupported_layers,
    window_of,
    within_window,
)
from areal_lite.models.fused_decoder import FusedDecoder
from areal_lite.models.kernels.exact_attention import MIN_ROWS, read_exactly
from areal_lite.models.kernels.ragged_attention import RAGGED, Segments
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.trainer.forward.microbatches import Block, num_inputs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """A micro-batch as tensors: ``B`` bins of ``L`` tokens, ``N`` trained tokens. A bin holds one block, or all."""

    input_ids: Tensor
    """``[B, L]`` int64."""
    position_ids: Tensor
    """``[B, L]`` place of each token in its own sequence."""
    attention_mask: Tensor | None
    """``[B, 1, L, L]`` bool, True where the query sees the key; None if causal, or given by ``segments``."""
    segments: Segments | None
    """Ranges of tokens that see one another, if one bin holds all sequences side by side."""
    predicted_at: Tensor
    """``[N]`` flat position of the token before each trained one."""
    targets: Tensor
    """``[N]`` the trained tokens, bin by bin, sequence by sequence."""
    lengths: list[int]
    """Tokens of each block, without padding; a shared prefix counts once."""
    num_pairs: int
    """Pairs of a token and one that it sees."""


def pack(
    sequences: Sequence[TokenSequence],
    blocks: Sequence[Block],
    *,
    device: torch.device,
    ragged: bool = False,
    min_width: int = 0,
) -> PackedSequences:
    """Lay out the blocks: a shared prefix is stored once, and each sequence attends to it and to itself. ``ragged``
    puts all blocks into one bin, without padding, instead of one bin per block of at least ``min_width`` tokens."""
    lengths = [block.length for block in blocks]
    width = max(*lengths, min_width)
    starts = np.cumsum([0, *lengths]) if ragged else width * np.arange(len(blocks) + 1)
    ids = np.zeros(starts[-1], np.int64)
    positions = np.zeros_like(ids)
    causal = all(block.is_chain for block in blocks)
    seen = None if ragged or causal else torch.zeros(len(blocks), width, width, dtype=torch.bool)
    own: list[tuple[NDArray[np.int64], int, int]] = []
    predicted_at: list[NDArray[np.int64]] = []
    targets: list[NDArray[Any]] = []
    for bin_idx, (block, start) in enumerate(zip(blocks, starts.tolist(), strict=False)):
        end = start
        places = np.empty(0, np.int64)  # flat position of every token the model reads of a sequence
        for index, shared in zip(block.sequences, block.shared, strict=True):
            sequence = sequences[index]
            inputs = num_inputs(sequence)
            begin, end = end, end + inputs - shared
            prefix = places[:shared]
            places = np.concatenate((prefix, np.arange(begin, end)))
            ids[begin:end] = sequence.input_ids[shared:inputs]
            positions[begin:end] = np.arange(shared, inputs)
            own.append((prefix, begin, end))
            if seen is not None:
                visible = seen[bin_idx, begin - start : end - start]
                visible[:, torch.from_numpy(prefix - start)] = True
                visible[:, begin - start : end - start] = torch.ones(end - begin, end - begin).tril().bool()
            trained = np.flatnonzero(sequence.loss_mask)
            predicted_at.append(places[trained - 1])
            targets.append(sequence.input_ids[trained])
    shape = (1 if ragged else len(blocks), -1)
    return PackedSequences(
        input_ids=torch.from_numpy(ids).view(shape).to(device),
        position_ids=torch.from_numpy(positions).view(shape).to(device),
        attention_mask=None if seen is None else _visible(seen)[:, None].to(device),
        segments=_segments(own, device) if ragged else None,
        predicted_at=torch.from_numpy(np.concatenate(predicted_at)).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        lengths=lengths,
        num_pairs=int(positions.sum()) + sum(lengths),
    )


def _visible(seen: Tensor) -> Tensor:
    """Let padding see itself: a query that sees nothing is NaN in some attention kernels."""
    return seen | torch.eye(seen.shape[-1], dtype=torch.bool)


def _segments(own: Sequence[tuple[NDArray[np.int64], int, int]], device: torch.device) -> Segments:
    """Return the queries of each sequence in a bin and the keys they see."""
    queries, keys = [0], [np.arange(0)]
    for prefix, begin, end in own:
        if begin < end:
            queries.append(end)
            keys.append(np.concatenate((prefix, np.arange(begin, end))))
    key_ends = np.cumsum([len(places) for places in keys])
    return Segments(
        query_ends=torch.tensor(queries, dtype=torch.int32, device=device),
        key_ends=torch.tensor(key_ends, dtype=torch.int32, device=device),
        keys=torch.from_numpy(np.concatenate(keys)).to(device),
        longest_query=int(np.diff(queries).max()),
        longest_key=int(np.diff(key_ends).max()),
    )


class PackedModel(nn.Module):
    """A Hugging Face model that reads packed sequences."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        decoder = model.get_decoder()
        self._decoder = (decoder,)  # a tuple, or the decoder would be registered twice
        self._config = model.config.get_text_config()
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._num_weights = sum(p.numel() for p in decoder.parameters()) - model.get_input_embeddings().weight.numel()
        self.num_head_weights = 0
        """Weights that each trained token is multiplied with after the decoder."""
        self.balance_length = 6 * int(getattr(self._config, "hidden_size", 1024))
        """Bin length at which attention costs as much as the layers' matrices."""
        self._fused: tuple[FusedDecoder, ...] = ()
        with torch.no_grad():
            self.shares_prefixes = self._packing_is_exact()
            """True if a bin may hold several sequences: all layers use full attention or a window, and
            ``position_ids``; checked on four tokens."""
        if self.shares_prefixes and Ranks.current().size == 1 and FusedDecoder.fits(decoder):
            self._fused = (FusedDecoder(decoder),)
        self.ragged = False
        """True if one bin holds all sequences, without padding and mask."""
        self.min_width = 0
        """Fewest tokens of a bin."""
        if model.device.type == "cuda":
            self.read_ragged()

    def read_ragged(self) -> bool:
        """Switch to one bin of all sequences if results agree; return whether they do."""
        before, model = self._config._attn_implementation, self.model
        if self.shares_prefixes:
            model.set_attn_implementation(RAGGED)
            try:
                with (
                    torch.no_grad(),
                    short_windows(model, 2),
                    torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"),
                ):
                    side_by_side, below = (self.states(_probe(model.device, ragged=r)) for r in (True, False))
            except (RuntimeError, TypeError, ValueError) as error:
                logger.warning("%s reads padded bins: %s", type(model).__name__, error)
            else:
                self.ragged = bool((side_by_side - below).norm() < 0.05 * below.norm())
        if self.ragged:
            self.balance_length = sys.maxsize  # siblings in one bin add no attention to each other
        else:
            model.set_attn_implementation(before)
        return self.ragged

    def read_exactly(self) -> bool:
        """Compute each sequence on its own, with the bits of the embedded server; return whether the model can."""
        if exact := self.shares_prefixes and not self.ragged and read_exactly(self.model):
            self.shares_prefixes, self.min_width = False, MIN_ROWS
        return exact

    def inputs(self, packed: PackedSequences) -> dict[str, Any]:
        inputs: dict[str, Any] = {"input_ids": packed.input_ids, "use_cache": False}
        if packed.segments is not None:
            inputs |= {"segments": packed.segments, "position_ids": packed.position_ids}
        if (seen := packed.attention_mask) is not None:
            positions, window = packed.position_ids, window_of(self._config)
            kinds = set(layer_kinds(self._config))
            masks = {kind: seen if kind == FULL else within_window(seen, positions, window) for kind in kinds}
            if self._config._attn_implementation == "eager":  # which adds masks to the scores
                masks = {kind: added_to_scores(mask, torch.float32) for kind, mask in masks.items()}
            inputs |= {"attention_mask": mask_argument(masks), "position_ids": positions}
        return inputs

    def states(self, packed: PackedSequences) -> Tensor:
        """Return the decoder's states ``[N, hidden]`` before each trained token."""
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if self._fused and half and packed.segments is None:
            layout = packed.lengths, packed.attention_mask
            return self._fused[0].states(packed.input_ids, packed.position_ids, *layout, packed.predicted_at)
        states: Tensor = self._decoder[0](**self.inputs(packed))[0]
        return states.flatten(0, 1)[packed.predicted_at]

    def flops(self, packed: PackedSequences) -> float:
        """Return the floating-point operations of a forward pass, output embedding included; of a mixture of experts,
        of all experts."""
        heads, layers = (getattr(self._config, f"num_{name}", 0) for name in ("attention_heads", "hidden_layers"))
        width = heads * (getattr(self._config, "head_dim", None) or self._config.hidden_size // max(1, heads))
        products = self._num_weights * sum(packed.lengths) + self.num_head_weights * len(packed.targets)
        return float(2 * products + 4 * layers * width * packed.num_pairs)

    def _packing_is_exact(self) -> bool:
        if unsupported_layers(self._config) is not None:
            return False
        if "position_ids" not in inspect.signature(self._decoder[0].forward).parameters:
            return False
        device = self.model.device
        with short_windows(self.model, 2):
            together, apart = (self.states(_probe(device, shared=shared)) for shared in (True, False))
        return torch.allclose(together, apart, atol=1e-3, rtol=1e-3)


def _probe(device: torch.device, *, shared: bool = True, ragged: bool = False) -> PackedSequences:
    """Return two sequences of four tokens with a common prefix."""
    sequences = [
        TokenSequence(input_ids=np.array([1, 2, *tail]), loss_mask=np.array([False, False, True, True]))
        for tail in ([3, 4], [4, 3])
    ]
    apart = [Block((index,), (0,), length=3) for index in (0, 1)]
    together = [Block((0, 1), (0, 2), length=4, is_chain=False)]
    return pack(sequences, together if shared else apart, device=device, ragged=ragged)
