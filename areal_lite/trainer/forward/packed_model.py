"""Sequences laid out for one forward pass, and the model that reads them.

Guarantees that a token sees what it would see in its sequence alone, however they are laid out. The shift by one (a
token is predicted at the one before it) happens in :func:`pack` and nowhere else.
"""

import dataclasses
import inspect
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from areal_lite.api.trajectory import TokenSequence
from areal_lite.data.vision.image_store import ImagePixels
from areal_lite.errors import ConfigError
from areal_lite.models import attention_windows as windows
from areal_lite.models.fused_decoder import FusedDecoder
from areal_lite.models.kernels.exact_attention import read_exactly, whole_rows
from areal_lite.models.kernels.ragged_attention import RAGGED, Segments
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.parallel.sequence_parallel import SequenceParallel
from areal_lite.models.parallel.sharding import is_empty
from areal_lite.models.parallel.tensor_parallel import Whole, own_tokens, refuse_images, share
from areal_lite.models.policy_model import has_bfloat16
from areal_lite.models.vision_model import VisionTower
from areal_lite.trainer.forward.microbatches import Block, num_inputs
from areal_lite.trainer.forward.packed_images import PackedImages, Part, pack_images

logger = logging.getLogger(__name__)
WIDE = 1 << 20
"""Pairs of tokens that do not see each other above which a CPU computes a tree by segments, not under a mask."""


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """A micro-batch as tensors: ``B`` blocks, side by side, of ``T`` tokens in all, ``N`` trained tokens."""

    input_ids: Tensor  # ``[T]`` int64; a shared prefix is there once
    position_ids: Tensor  # ``[T]`` place of each token in its own sequence
    segments: Segments  # which tokens see one another
    is_causal: bool  # True if a token sees all tokens before it in its block
    predicted_at: Tensor  # ``[N]`` index of the token before each trained one
    targets: Tensor  # ``[N]`` the trained tokens, block by block, sequence by sequence
    lengths: list[int]  # ``B`` numbers of tokens
    num_pairs: int  # pairs of a token and one that it sees
    images: PackedImages | None = None


def pack(
    sequences: Sequence[TokenSequence],
    blocks: Sequence[Block],
    *,
    device: torch.device,
    model: "PackedModel | None" = None,
    multiple: int = 1,
) -> PackedSequences:
    """Lay out the blocks: a shared prefix is stored once, and each sequence attends to it and to itself. Images need
    the ``model`` that reads them. Tokens that nobody reads, a bin of their own, round up to a ``multiple``."""
    lengths = [block.length for block in blocks]
    if unread := -sum(lengths) % multiple:
        lengths.append(unread)
    starts = np.cumsum([0, *lengths])
    ids = np.zeros(starts[-1], np.int64)
    positions = np.zeros_like(ids)
    laid_out: list[Part] = []
    parts: list[tuple[NDArray[np.int64], int, int]] = []
    predicted_at: list[NDArray[np.int64]] = []
    targets: list[NDArray[Any]] = []
    for block, end in zip(blocks, starts.tolist(), strict=False):
        places = np.empty(0, np.int64)  # index of every token that the model reads of a sequence
        for index, shared in zip(block.sequences, block.shared, strict=True):
            sequence = sequences[index]
            inputs = num_inputs(sequence)
            begin, end = end, end + inputs - shared
            prefix = places[:shared]
            places = np.concatenate((prefix, np.arange(begin, end)))
            ids[begin:end] = sequence.input_ids[shared:inputs]
            positions[begin:end] = np.arange(shared, inputs)
            laid_out.append((sequence, shared, inputs, begin))
            parts.append((prefix, begin, end))
            trained = np.flatnonzero(sequence.loss_mask)
            predicted_at.append(places[trained - 1])
            targets.append(sequence.input_ids[trained])
    if unread:
        positions[-unread:] = np.arange(unread)
        parts.append((np.empty(0, np.int64), len(ids) - unread, len(ids)))
    position_ids = torch.from_numpy(positions).to(device)
    return PackedSequences(
        input_ids=torch.from_numpy(ids).to(device),
        position_ids=position_ids,
        segments=Segments.of(parts, device),
        is_causal=all(block.is_chain for block in blocks),
        predicted_at=torch.from_numpy(np.concatenate(predicted_at)).to(device),
        targets=torch.from_numpy(np.concatenate(targets).astype(np.int64)).to(device),
        lengths=lengths,
        num_pairs=int(positions.sum()) + sum(lengths),
        images=pack_images(laid_out, position_ids, *((model.tower, model.pixels) if model else (None, None))),
    )


class PackedModel(nn.Module):
    """A Hugging Face model that reads packed sequences."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._ranks = Ranks.current()
        decoder = model.get_decoder()
        self._decoder = (decoder,)  # a tuple, or the decoder would be registered twice
        self._config = model.config.get_text_config()
        self.tower = VisionTower(model) if hasattr(model.config, "vision_config") else None
        self.pixels: ImagePixels | None = None  # the images of the run, if its sequences have some
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._num_weights = sum(p.numel() for p in decoder.parameters()) - model.get_input_embeddings().weight.numel()
        self.num_head_weights = 0  # weights that each trained token is multiplied with after the decoder
        self.balance_length = 6 * int(getattr(self._config, "hidden_size", 1024))
        """Bin length at which attention costs as much as the layers' matrices."""
        self.ragged = False  # True if one bin holds all sequences, without padding and mask
        self.reads_exactly = False  # True if each sequence is computed on its own, with the bits of the embedded server
        self._sequence_parallel: SequenceParallel | None = None
        self._divides_layers = False
        self._reads_segments = False
        self._fused: tuple[FusedDecoder, ...] = ()
        self.shares_prefixes = False
        """True if a bin may hold several sequences: layers use full attention or a window, and ``position_ids``."""
        self._exact = False
        if not is_empty(model):
            self.examine()

    def forward(self, packed: PackedSequences | None, **options: Any) -> Any:
        """Return the :meth:`score` of packed sequences; None examines the model."""
        if packed is not None:
            return self.score(packed, **options)
        self.find_reading()

    def score(self, packed: PackedSequences) -> Any:
        """Return a number or several for each trained token."""
        raise NotImplementedError(f"{type(self).__name__} gives states alone: use a scorer")

    @torch.no_grad()
    def examine(self) -> None:
        """Find how the model may be read, on all ranks that share it: only a forward pass has sharded weights whole."""
        self(None)

    def find_reading(self) -> None:
        """Do so, within a forward pass."""
        self.shares_prefixes = self._packing_is_exact()
        if self.shares_prefixes and Ranks.current().size == 1 and FusedDecoder.fits(self._decoder[0]):
            self._fused = (FusedDecoder(self._decoder[0]),)
            if has_bfloat16():  # the default dtype then, which it computes; it reads segments
                self.balance_length = sys.maxsize
        self._reads_segments = self._side_by_side_is_exact()
        if self.model.device.type == "cuda":
            self.read_ragged()
        if self._exact:
            self.read_exactly()

    def read_ragged(self) -> bool:
        """Switch to one bin of all sequences if the model reads segments; return whether it does."""
        if self._reads_segments:
            self.ragged = True
            self.balance_length = sys.maxsize  # siblings in one bin add no attention to each other
        return self.ragged

    @property
    def parts(self) -> int:
        """Ranks that read one micro-batch together; its width is a multiple of it."""
        return 1 if self._sequence_parallel is None else self._sequence_parallel.size

    def read_in_parts(self, ranks: Ranks) -> None:
        """Have the ``sp`` and ``tp`` ranks read each micro-batch together from here on; ConfigError if they cannot."""
        if self.tower is not None:
            refuse_images(ranks.tp, type(self.model).__name__)
        self._divides_layers = ranks.tp > 1
        if ranks.sp == 1:
            return
        self._sequence_parallel = SequenceParallel(ranks, self._config)
        if not self.read_ragged():
            raise ConfigError(
                f"trainer.sp_size is {ranks.sp}, and {type(self.model).__name__} does not read sequences side by side, "
                "which their division among ranks needs: set trainer.sp_size: 1, or use another kind of model"
            )

    def own_part(self, packed: PackedSequences) -> tuple[PackedSequences, Whole]:
        """Return the part of a micro-batch that this rank reads, and what joins the values of its trained tokens with
        those of the other ranks; one of a rank alone is whole."""
        if (parallel := self._sequence_parallel) is None:
            return packed, lambda values: values
        width = len(packed.input_ids) // parallel.size
        begin = width * parallel.rank
        own = (packed.predicted_at // width == parallel.rank).nonzero()[:, 0]
        places, whole = share(own, len(packed.targets), parallel.group)
        return dataclasses.replace(
            packed,
            input_ids=packed.input_ids[begin : begin + width],
            position_ids=packed.position_ids[begin : begin + width],
            predicted_at=packed.predicted_at[places] - begin if len(own) else places,
            targets=packed.targets[places],
            images=packed.images and packed.images.part(begin, begin + width),
        ), whole

    def own_tokens(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Whole]:
        """Return the states and targets that this rank scores, and what joins its values with those of other ranks."""
        if not self._divides_layers:
            return states, targets, lambda values: values
        return own_tokens(self._ranks, states, targets)

    def read_exactly(self) -> bool:
        """Compute each sequence on its own, with the bits of the embedded server; return whether the model can. An
        empty one does so once it is filled."""
        self._exact = True
        if is_empty(self.model):
            return False
        if exact := self.shares_prefixes and self._ranks.tp == 1 and not self.ragged and read_exactly(self.model):
            self.shares_prefixes, self.reads_exactly, self._reads_segments = False, True, False
        return exact

    def states(self, packed: PackedSequences) -> Tensor:
        """Return the decoder's states ``[N, hidden]`` before each trained token."""
        half = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        if self._fused and half and not self.ragged:
            layout = packed.lengths, None if packed.is_causal else packed.segments
            embeddings = self._embeddings(packed)
            if embeddings is None:
                embeddings = self.model.get_input_embeddings()(packed.input_ids)
            return self._fused[0].states(embeddings, _positions(packed), *layout, packed.predicted_at)
        return self.read(self._decoder[0], packed)

    def read(self, module: Any, packed: PackedSequences) -> Tensor:
        """Return ``[N, ...]``, what the model or a part of it gives for the token before each trained one."""
        wide = not packed.is_causal and len(packed.lengths) * max(packed.lengths) ** 2 > packed.num_pairs + WIDE
        embeddings = self._embeddings(packed)
        tokens = {"input_ids": packed.input_ids} if embeddings is None else {"inputs_embeds": embeddings}
        if self.ragged or (self._reads_segments and wide):
            inputs: dict[str, Any] = {name: part[None] for name, part in tokens.items()}
            inputs |= {"segments": packed.segments, "position_ids": _positions(packed)}
            if self._sequence_parallel is not None:
                inputs["exchange"] = self._sequence_parallel
            at = packed.predicted_at
        else:
            inputs, at = self._padded(packed, tokens)
        out: Tensor = module(use_cache=False, **inputs)[0]
        return out.flatten(0, 1)[at]

    def _embeddings(self, packed: PackedSequences) -> Tensor | None:
        """Return ``[T, hidden]``, with the features of images at their places; None if no tower computes."""
        images = packed.images if packed.images and packed.images.images else None
        if self.tower is None or (images is None and self._ranks.size == 1):
            return None
        embeddings: Tensor = self.model.get_input_embeddings()(packed.input_ids)
        if images is None:  # the weights of the tower are gathered by all ranks, or by none
            return embeddings + 0 * self.tower.features([self.tower.smallest()]).sum()
        exact = self.reads_exactly and self._ranks.size == 1  # as a server that gets one image at a time
        features = self.tower.features(images.images, one_by_one=exact)[images.rows]
        return embeddings.index_copy(0, images.at, features.to(embeddings.dtype))

    def _padded(self, packed: PackedSequences, tokens: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Return what the model takes, with a bin for each block, ``[B, L]``, and flat indices ``[N]``."""
        lengths = torch.tensor(packed.lengths, device=packed.input_ids.device)
        width = max(packed.lengths)
        width = whole_rows(width) if self.reads_exactly else width
        used = torch.arange(width, device=lengths.device) < lengths[:, None]
        places = used.flatten().nonzero()[:, 0]

        def padded(part: Tensor) -> Tensor:
            whole = part.new_zeros(used.numel(), *part.shape[1:]).index_copy(0, places, part)
            return whole.view(*used.shape, *part.shape[1:])

        inputs: dict[str, Any] = {name: padded(part) for name, part in tokens.items()}
        at, axes = places[packed.predicted_at], None if packed.images is None else packed.images.axes
        positions = padded(packed.position_ids)
        if axes is not None:
            inputs["position_ids"] = torch.stack([padded(axis) for axis in axes])
        if packed.is_causal:
            return inputs, at
        seen, window = packed.segments.seen(packed.lengths, width), windows.window_of(self._config)
        kinds = set(windows.layer_kinds(self._config))
        masks = {
            kind: seen if kind == windows.FULL else windows.within_window(seen, positions, window) for kind in kinds
        }
        if self._config._attn_implementation == "eager":  # which adds masks to the scores
            masks = {kind: windows.added_to_scores(mask, torch.float32) for kind, mask in masks.items()}
        return {"position_ids": positions, **inputs, "attention_mask": windows.mask_argument(masks)}, at

    def flops(self, packed: PackedSequences) -> float:
        """Return the floating-point operations of a forward pass, with output embedding and all experts."""
        heads, layers = (getattr(self._config, f"num_{name}", 0) for name in ("attention_heads", "hidden_layers"))
        width = heads * (getattr(self._config, "head_dim", None) or self._config.hidden_size // max(1, heads))
        products = self._num_weights * sum(packed.lengths) + self.num_head_weights * len(packed.targets)
        if self.tower is not None and packed.images is not None:
            products += self.tower.num_weights * sum(math.prod(span.grid) for span, _ in packed.images.images)
        return float(2 * products + 4 * layers * width * packed.num_pairs)

    def _packing_is_exact(self) -> bool:
        parameters = inspect.signature(self._decoder[0].forward).parameters
        if windows.unsupported_layers(self._config) is not None or "position_ids" not in parameters:
            return False
        device = self.model.device
        with windows.short_windows(self.model, 2):
            together, apart = (self.read(self._decoder[0], _probe(device, shared=shared)) for shared in (True, False))
        return torch.allclose(together, apart, atol=1e-3, rtol=1e-3)

    def _side_by_side_is_exact(self) -> bool:
        """Return whether the model reads segments; it keeps the attention that does so only then."""
        before, model, decoder = self._config._attn_implementation, self.model, self._decoder[0]
        if not self.shares_prefixes:
            return False
        decoder.set_attn_implementation(RAGGED)  # a vision tower keeps its own
        found = []
        try:
            with (
                torch.no_grad(),
                windows.short_windows(model, 2),
                torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"),
            ):
                for self.ragged in (True, False):
                    found.append(self.read(decoder, _probe(model.device)))
        except (RuntimeError, TypeError, ValueError) as error:
            logger.warning("%s reads padded bins: %s", type(model).__name__, error)
        self.ragged = False
        exact = len(found) == 2 and bool((found[0] - found[1]).norm() < 0.05 * found[1].norm())
        if not exact:
            decoder.set_attn_implementation(before)
        return exact


def _positions(packed: PackedSequences) -> Tensor:
    """Return the positions of all tokens side by side, ``[1, T]`` or ``[3, 1, T]``."""
    if packed.images is None or packed.images.axes is None:
        return packed.position_ids[None]
    return packed.images.axes[:, None]


def _probe(device: torch.device, *, shared: bool = True) -> PackedSequences:
    """Return two sequences of four tokens with a common prefix."""
    sequences = [
        TokenSequence(input_ids=np.array([1, 2, *tail]), loss_mask=np.array([False, False, True, True]))
        for tail in ([3, 4], [4, 3])
    ]
    apart = [Block((index,), (0,), length=3) for index in (0, 1)]
    return pack(sequences, [Block((0, 1), (0, 2), length=4, is_chain=False)] if shared else apart, device=device)
