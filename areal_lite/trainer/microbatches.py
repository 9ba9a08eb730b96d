"""Which sequences share a forward pass; pure plans over token counts.

A *block* holds sequences of one group as a tree: what a sequence begins with in common with one before it is
computed once. A *micro-batch* holds blocks of like length, right-padded. Both only save work: what a token
attends to, and so the loss, does not depend on the plan. :mod:`areal_lite.trainer.packed_model` makes the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_lite.api.trajectory import TokenSequence


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences laid out one after another, each without the prefix it shares with one before it."""

    sequences: tuple[int, ...]
    """Indices into the step's sequences."""
    sources: tuple[int, ...]
    """For each the place in ``sequences`` of the one whose prefix it shares; the first has itself."""
    shared: tuple[int, ...]
    """Tokens of that prefix; 0 for the first."""
    length: int
    """Tokens of the block."""
    is_chain: bool = True
    """Whether each sequence goes on where the one before ends, so that plain causal attention is right."""


def num_inputs(sequence: TokenSequence) -> int:
    """Return how many leading tokens the model must read: all before the last trained one."""
    return int(np.flatnonzero(sequence.loss_mask)[-1])


def common_prefix(first: TokenSequence, second: TokenSequence) -> int:
    """Return how many leading tokens two sequences have in common, of those that the model must read of both."""
    limit = min(num_inputs(first), num_inputs(second))
    differs = first.input_ids[:limit] != second.input_ids[:limit]
    return int(differs.argmax()) if differs.any() else limit


def shared_prefix(sequences: Sequence[TokenSequence]) -> int:
    """Return how many leading tokens all sequences have in common, of those that the model must read."""
    return min(common_prefix(sequences[0], other) for other in sequences)


def plan_blocks(
    sequences: Sequence[TokenSequence],
    chosen: Sequence[int],
    *,
    max_tokens: int,
    balance_length: int,
    share: bool = True,
) -> list[Block]:
    """Return blocks that hold each chosen sequence exactly once, sequences of one group side by side.

    A sequence joins its group's current block while that is cheaper than a block of its own: it saves the
    common prefix, but pays attention over its siblings. A block stays within ``max_tokens`` unless one
    sequence alone is longer.

    Args:
        sequences: The step's sequences.
        chosen: Indices of those to compute; each has a trained token.
        max_tokens: Most tokens of a block.
        balance_length: Block length at which attention costs as much as the layers' matrices, about
            six times the hidden size.
        share: False gives every sequence its own block, for models whose layers are not all plain attention.
    """
    groups: dict[str, list[int]] = {}
    for index in chosen:
        groups.setdefault(sequences[index].group_id if share else str(index), []).append(index)
    blocks: list[Block] = []
    for members in groups.values():
        members.sort(key=lambda index: (sequences[index].member_idx or 0, num_inputs(sequences[index])))
        open_block = _alone(sequences, members[0])
        for index in members[1:]:
            alone = num_inputs(sequences[index])
            prefixes = [common_prefix(sequences[other], sequences[index]) for other in open_block.sequences]
            shared = max(prefixes)
            joined = open_block.length + alone - shared
            added = _cost(joined, balance_length) - _cost(open_block.length, balance_length)
            if joined <= max_tokens and added < _cost(alone, balance_length):
                open_block = Block(
                    (*open_block.sequences, index),
                    (*open_block.sources, prefixes.index(shared)),
                    (*open_block.shared, shared),
                    joined,
                    open_block.is_chain and shared == open_block.length,
                )
            else:
                blocks.append(open_block)
                open_block = _alone(sequences, index)
        blocks.append(open_block)
    return blocks


def _alone(sequences: Sequence[TokenSequence], index: int) -> Block:
    return Block((index,), (0,), (0,), num_inputs(sequences[index]))


def _cost(length: int, balance_length: int) -> float:
    return length * (1 + length / balance_length)


_PASS_COST = 1 / 16
"""What a forward and backward pass costs besides its tokens, as a share of a full micro-batch: reading the weights,
adding up their gradients."""


def plan_microbatches(
    lengths: Sequence[int], *, max_tokens: int, num_rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Return index lists of like lengths, longest first, each at most ``max_tokens`` with its padding.

    Of all cuts of the sorted lengths the one of least cost: tokens with padding, and :data:`_PASS_COST` for each
    micro-batch. An item longer than ``max_tokens`` gets one of its own. Lengths ``[3, 9, 4, 8]`` under 18
    tokens give ``[[1, 3], [2, 0]]``.

    Args:
        lengths: Tokens of each item's longest row.
        max_tokens: Most tokens of a micro-batch.
        num_rows: Rows of each item; None: one.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    longest = np.array([lengths[i] for i in order])
    above = np.cumsum([0, *(1 if num_rows is None else num_rows[i] for i in order)])
    cost = np.zeros(len(order) + 1)  # of the first so many items, cut in the best way
    begin = [0] * (len(order) + 1)  # of the last micro-batch in it
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
