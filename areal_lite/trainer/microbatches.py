"""Which samples share a forward pass; pure plans over token counts.

A *row* holds samples of one group: their common prompt once, then each one's own tokens. A
*micro-batch* holds rows of like length, right-padded. Both only save work: what a token attends to,
and so the loss, does not depend on the plan. :mod:`areal_lite.trainer.logprobs` makes the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from areal_lite.data.batch.training_sample import TrainingSample


@dataclass(frozen=True, slots=True)
class Row:
    """Samples of one group that share their first ``prefix`` tokens in one row."""

    samples: tuple[int, ...]
    """Indices into the step's samples."""
    prefix: int
    """Leading tokens computed once for all of them."""
    length: int
    """Tokens of the row."""


def num_inputs(sample: TrainingSample) -> int:
    """Return how many leading tokens the model must read: all before the last trained one."""
    return int(np.flatnonzero(sample.loss_mask)[-1])


def shared_prefix(samples: Sequence[TrainingSample]) -> int:
    """Return the length of the longest common prefix that ends before anyone's first trained token."""
    limit = min(int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples)
    heads = np.stack([sample.input_ids[:limit] for sample in samples])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit


def plan_rows(
    samples: Sequence[TrainingSample],
    chosen: Sequence[int],
    *,
    max_tokens: int,
    balance_length: int,
    share: bool = True,
) -> list[Row]:
    """Return rows that hold each chosen sample exactly once, samples of one group side by side.

    A sample joins its group's current row while that is cheaper than a row of its own: it saves the
    prefix, but pays attention over its siblings. A row stays within ``max_tokens`` unless one sample
    alone is longer.

    Args:
        samples: The step's samples.
        chosen: Indices of those to compute; each has a trained token.
        max_tokens: Most tokens of a row.
        balance_length: Row length at which attention costs as much as the layers' matrices, about
            six times the hidden size.
        share: False gives every sample its own row, for models whose layers are not all plain attention.
    """
    groups: dict[str, list[int]] = {}
    for index in chosen:
        groups.setdefault(samples[index].group_id if share else str(index), []).append(index)
    rows: list[Row] = []
    for members in groups.values():
        prefix = shared_prefix([samples[index] for index in members])
        row, length = [members[0]], num_inputs(samples[members[0]])
        for index in members[1:]:
            alone = num_inputs(samples[index])
            joined = length + alone - prefix
            saves = _cost(joined, balance_length) - _cost(length, balance_length) < _cost(
                alone, balance_length
            )
            if saves and joined <= max_tokens:
                row.append(index)
                length = joined
            else:
                rows.append(Row(tuple(row), prefix, length))
                row, length = [index], alone
        rows.append(Row(tuple(row), prefix, length))
    return rows


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
