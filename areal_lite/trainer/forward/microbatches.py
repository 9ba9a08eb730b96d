"""Plans of the sequences that share a forward pass; pure arithmetic over token counts.

A *block* holds sequences of one group as a tree: a shared prefix is computed once. A *micro-batch* holds blocks of
like length, right-padded. Both only save work: what a token attends to, and so the loss, does not depend on the plan.
:mod:`areal_lite.trainer.forward.packed_model` makes the tensors.
"""

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from areal_lite.api.image_span import common_prefix, keyed_ids
from areal_lite.api.trajectory import TokenSequence


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences sorted by tokens, each without the prefix it shares with the one before, the longest it shares."""

    sequences: tuple[int, ...]  # indices into the step's sequences
    shared: tuple[int, ...]  # prefix length that each shares with the one before it; 0 for the first
    length: int  # tokens of the block
    is_chain: bool = True  # True if each sequence continues the one before it, so that plain causal attention is right


Bundle = list[Block]  # blocks of one micro-batch


def num_inputs(sequence: TokenSequence) -> int:
    """Return how many leading tokens the model must read: all before the last trained one."""
    return int(np.flatnonzero(sequence.loss_mask)[-1])


def read_ids(sequence: TokenSequence) -> NDArray[Any]:
    """Return the ids that the model reads; those of images say which image it is, so equal ids mean equal content."""
    ids = sequence.input_ids
    if sequence.images:
        ids = np.array(keyed_ids(ids.tolist(), sequence.images))
    return ids[: num_inputs(sequence)]


def plan_blocks(
    sequences: Sequence[TokenSequence],
    chosen: Sequence[int],
    *,
    max_tokens: int,
    balance_length: int,
    share: bool = True,
    units: Sequence[Hashable] | None = None,
) -> list[Bundle]:
    """Return blocks that hold each chosen sequence exactly once, sequences of one group side by side.

    A unit (part of one group; None: each sequence is one) joins its group's current block while that is cheaper than a
    block of its own: it saves the common prefix, but pays attention over its siblings. A block stays within
    ``max_tokens`` unless one sequence alone is longer. The blocks of a unit that needs several are one bundle; any
    other bundle is a single block. At ``balance_length`` attention costs as much as the layers' matrices. Without
    ``share`` every sequence has its own block, for models whose layers are not all plain attention."""
    groups: dict[Hashable, list[int]] = {}
    for index in chosen:
        alone = index if units is None else units[index]
        groups.setdefault(sequences[index].group_id if share else alone, []).append(index)
    bundles: list[Bundle] = []
    for members in groups.values():
        tree = _PrefixTree(sequences, members)
        by_unit: dict[Hashable, list[int]] = {}
        for place, index in enumerate(tree.order):  # in this order a prefix comes before its continuations
            by_unit.setdefault(index if units is None else units[index], []).append(place)
        whole: list[list[int]] = []
        for unit in by_unit.values():
            singles = [[place] for place in unit]
            parts = tree.join(singles, max_tokens, balance_length) if share else singles
            if len(parts) == 1:
                whole += parts
            else:
                bundles.append([tree.block(part) for part in parts])
        bundles += [[tree.block(part)] for part in tree.join(whole, max_tokens, balance_length)]
    return bundles


def tree_length(sequences: Sequence[TokenSequence], members: Sequence[int]) -> int:
    """Return how many tokens the model reads for the sequences ``members``, shared prefixes counted once."""
    return _PrefixTree(sequences, members).length(range(len(members)))


class _PrefixTree:
    """The sequences of one group, sorted by their tokens: neighbours share the longest prefixes."""

    def __init__(self, sequences: Sequence[TokenSequence], members: Sequence[int]) -> None:
        inputs = {index: read_ids(sequences[index]) for index in members}
        self.order = sorted(members, key=lambda index: (inputs[index].astype(">i8").tobytes(), index))
        self._lengths = np.array([len(inputs[index]) for index in self.order])
        pairs = itertools.pairwise(self.order)
        self._common = np.array([common_prefix(inputs[a], inputs[b]) for a, b in pairs], np.int64)

    def join(self, items: Sequence[list[int]], max_tokens: int, balance_length: int) -> list[list[int]]:
        """Join neighbouring items (lists of places in ``order``) while that is cheaper."""
        blocks: list[list[int]] = []
        open_length = 0
        for places in items:
            alone = self.length(places)
            if blocks:
                joined = sorted(blocks[-1] + places)
                length = self.length(joined)
                added = _cost(length, balance_length) - _cost(open_length, balance_length)
                if length <= max_tokens and added < _cost(alone, balance_length):
                    blocks[-1], open_length = joined, length
                    continue
            blocks.append(places)
            open_length = alone
        return blocks

    def block(self, places: Sequence[int]) -> Block:
        shared = self._shared(places)
        return Block(
            tuple(self.order[place] for place in places),
            (0, *shared.tolist()),
            self.length(places),
            bool((shared == self._lengths[list(places[:-1])]).all()),
        )

    def length(self, places: Sequence[int]) -> int:
        """Return the tokens of the sequences at sorted ``places``, shared prefixes counted once."""
        return int(self._lengths[list(places)].sum() - self._shared(places).sum())

    def _shared(self, places: Sequence[int]) -> NDArray[np.int64]:
        """Return the common prefix length of each place with the one before it: the minimum in between."""
        return np.minimum.reduceat(self._common[: places[-1]], np.array(places[:-1], np.int64))


def _cost(length: int, balance_length: int) -> float:
    return length * (1 + length / balance_length)


_PASS_COST = 1 / 16  # fixed cost of a pass (reading weights, adding gradients), as a share of a full micro-batch


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, num_blocks: Sequence[int] | None = None
) -> list[list[int]]:
    """Return index lists of like lengths, longest first, each at most ``max_tokens`` with its padding, unless one item
    is longer. Of all cuts of the sorted lengths this one costs least, in padded tokens plus :data:`_PASS_COST` per
    micro-batch. Lengths ``[3, 9, 4, 8]`` under 18 tokens give ``[[1, 3], [2, 0]]``. ``num_blocks`` None: 1 each."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    longest = np.array([lengths[i] for i in order])
    above = np.cumsum([0, *(1 if num_blocks is None else num_blocks[i] for i in order)])
    cost = np.zeros(len(order) + 1)  # [i]: cost of the best cut of the first i items
    begin = [0] * (len(order) + 1)  # [i]: the start of that cut's last micro-batch
    least = 0
    for end in range(1, len(order) + 1):
        while least < end - 1 and longest[least] * (above[end] - above[least]) > max_tokens:
            least += 1
        costs = cost[least:end] + longest[least:end] * (above[end] - above[least:end])
        begin[end] = least + int(costs.argmin())
        cost[end] = costs.min() + max_tokens * _PASS_COST
    microbatches, end = [], len(order)
    while end:
        microbatches.append(order[begin[end] : end])
        end = begin[end]
    return microbatches[::-1]
