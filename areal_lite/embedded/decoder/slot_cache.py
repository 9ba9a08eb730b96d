"""A KV cache with one slot per request, so requests of any length share a batch.

Each layer has two tensors ``[slots, kv_heads, capacity + 1, head_dim]``; position ``p`` of a request is column ``p`` of
its slot. Padding writes to the last column. Knows no requests: the scheduler passes slots and how full they are.

A windowed layer keeps all positions too, and its queries see the last ones by a mask or by where they begin to read. A
ring of the window's size would save memory, but would have lost what a fork before its end must read, so prefixes could
be shared only at that end; and its order of keys would change the bits.
"""

import math
import mmap
from typing import Any
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from areal_lite.models.attention_windows import FULL, SLIDING, added_to_scores, layer_kinds, window_of


class ForwardPlan:
    """Slots and columns that one forward pass writes."""

    def __init__(self, *, slots: int, capacity: int, device: torch.device, window: int | None = None) -> None:
        self.slots = slots
        self.capacity = capacity
        self.window = window or capacity  # positions that a query of a windowed layer sees, its own included
        self.device = device
        self._rows: dict[int, Tensor] = {}
        self.set([0], [0], 0)  # a pass of no tokens

    def set(self, used: list[int], past: list[int], query_length: int) -> None:
        """Plan a pass of ``query_length`` right-padded tokens for each ``used`` slot, with ``past`` columns filled."""
        self.used = torch.tensor(used, device=self.device)
        starts = torch.tensor(past, device=self.device)
        self.columns = (starts[:, None] + torch.arange(query_length, device=self.device)).clamp(max=self.capacity)
        self.fresh = not any(past)
        self.leading = used == list(range(len(used)))
        self._rows.clear()
        self.kv_length = min(max(past) + query_length, self.capacity + 1)

    def rows(self, heads: int) -> Tensor:
        """Return ``[n * heads * query]``, what the pass writes: numbers in a list of all columns of heads of slots."""
        if heads not in self._rows:
            first = (self.used[:, None] * heads + torch.arange(heads, device=self.device)) * (self.capacity + 1)
            self._rows[heads] = (first[:, :, None] + self.columns[:, None]).flatten()
        return self._rows[heads]


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a ``SlotCache``; allocated when the first keys arrive."""

    def __init__(self, plan: ForwardPlan, kind: str = FULL) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.kind = kind
        self.is_sliding = kind == SLIDING

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            shape = (self.plan.slots, states.shape[1], self.plan.capacity + 1, states.shape[3])
            setattr(self, name, _lazy_zeros(shape, states))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store ``[n, kv_heads, query, head_dim]`` and return the keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        plan = self.plan
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored.flatten(0, 2).index_copy_(0, plan.rows(new.shape[1]), new.flatten(0, 2))
        if plan.fresh:
            return key_states, value_states
        where = slice(len(plan.used)) if plan.leading else plan.used
        return self.keys[where, :, : plan.kv_length], self.values[where, :, : plan.kv_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.plan.fresh else self.plan.kv_length), 0

    def get_seq_length(self) -> int:
        return 0 if self.plan.fresh else self.plan.kv_length - self.plan.columns.shape[1]

    def get_max_length(self) -> int:
        return self.plan.capacity


def _lazy_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros, on a CPU allocated page by page as written. Zeros: a masked column weighs 0, and 0 * nan is nan."""
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    memory = mmap.mmap(-1, math.prod(shape) * like.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would span several slots
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


class SlotCache(Cache):
    """The cache of all layers."""

    def __init__(self, config: Any, *, slots: int, capacity: int, device: torch.device) -> None:
        self.plan = ForwardPlan(slots=slots, capacity=capacity, device=device, window=window_of(config))
        self.kinds = frozenset(layer_kinds(config))
        super().__init__(layers=[SlotLayer(self.plan, kind) for kind in layer_kinds(config)])

    def masks(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the masks ``[n, 1, query, keys]`` added to the scores, by kind; without those that are causal."""
        plan, masks = self.plan, {}
        last, columns = plan.columns[:, :, None], torch.arange(plan.kv_length, device=plan.device)
        for kind in self.kinds:
            if plan.fresh and (kind == FULL or plan.kv_length <= plan.window):
                continue
            seen = columns <= last if kind == FULL else (columns <= last) & (columns > last - plan.window)
            masks[kind] = added_to_scores(seen, dtype)[:, None]
        return masks

    def copy_columns(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first ``length`` columns of ``sources[i]`` to ``targets[i]``, for each ``i``."""
        one = len(sources) == 1  # a plain copy, without an index: two times as fast
        source_slots = sources[0] if one else torch.tensor(sources, device=self.plan.device)
        target_slots = targets[0] if one else torch.tensor(targets, device=self.plan.device)
        for layer in self.layers:
            assert isinstance(layer, SlotLayer)
            for states in (layer.keys, layer.values):
                if states is not None:
                    # The right side is copied before anything is written, so a slot may be both source and target.
                    states[target_slots, ..., :length, :] = states[source_slots, ..., :length, :]
