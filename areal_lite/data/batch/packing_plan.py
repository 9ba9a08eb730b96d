"""Plan which sequences share a mini-batch, and which rank computes it.

For training loops of your own; `areal-lite train` does not use it. Guarantees that no mini-batch exceeds the token cap,
that every rank has equally many mini-batches, and that the order of the sequences can be restored. Pure functions of
lengths; knows nothing of tensors and process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from areal_lite.data.batch.partition import get_seqlen_balanced_partitions, totals
from areal_lite.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Sequences ``0 .. num_sequences - 1`` and the dummies after them, each in exactly one mini-batch."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """``[rank][mini-batch][sequence]`` indices. The ranks' i-th mini-batches have similar sizes, since ranks wait for
    each other."""
    lengths: tuple[int, ...]
    """Tokens of each sequence after padding, dummies included."""
    num_sequences: int
    """Number of real sequences; indices from here on are dummies."""

    @property
    def num_dummies(self) -> int:
        """Number of padding-only sequences, added so that no mini-batch is empty."""
        return len(self.lengths) - self.num_sequences

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each index in a mean over sequences: 1, or 0 for a dummy."""
        return (1.0,) * self.num_sequences + (0.0,) * self.num_dummies

    @property
    def inverse_index(self) -> tuple[int, ...]:
        """Position of each sequence in the flattened outputs ``[rank][mini-batch][sequence]``."""
        order = [index for rank in self.ranks for batch in rank for index in batch]
        positions = sorted(range(len(order)), key=order.__getitem__)
        return tuple(positions[: self.num_sequences])

    def restore(self, outputs: Sequence[Sequence[Sequence[T]]]) -> list[T]:
        """Return one output per sequence in the original order, without dummies.

        Args:
            outputs: ``[rank][mini-batch][sequence]``, in the shape of ``ranks``.

        Raises:
            ValueError: If a mini-batch has more or fewer outputs than sequences.
        """
        counts = [[len(batch) for batch in rank] for rank in outputs]
        if counts != (planned := [[len(batch) for batch in rank] for rank in self.ranks]):
            raise ValueError(
                f"outputs per rank and mini-batch are {counts}, the plan has {planned}: give one output per "
                "sequence of every rank, dummies included"
            )
        flat = [output for rank in outputs for batch in rank for output in batch]
        return [flat[position] for position in self.inverse_index]


def plan_packing(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    multiple_of: int = 1,
    pair: bool = False,
) -> PackingPlan:
    """Return few mini-batches of nearly equal size, equally many per rank, none above ``max_tokens``.

    With lengths 6, 3, 2, 4, 1, 8 tokens and two ranks, each rank gets one mini-batch of 8 tokens: sequences 0 and 2,
    and sequences 1, 3 and 4.

    Args:
        lengths: Tokens of each sequence, 1 or more.
        max_tokens: Most tokens of a mini-batch, padding included: the capacity of a device times the devices that share
            a sequence. May differ between training and inference.
        multiple_of: Lengths are rounded up to a multiple of this. With twice the sequence-parallel size, every device
            can take one piece of a sequence's head and one of its tail.
        pair: Keep sequences 2i and 2i+1 adjacent in one mini-batch; dummies too.

    Raises:
        ConfigError: If a sequence (or a pair) alone is above ``max_tokens``.
        ValueError: If there is no sequence, one is empty, a pair is incomplete, or an argument is below 1.
    """
    for name, value in (("max_tokens", max_tokens), ("num_ranks", num_ranks), ("multiple_of", multiple_of)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be 1 or more")
    if (least := min(lengths, default=0)) < 1:
        what = f"sequence {lengths.index(least)} has {least} tokens" if lengths else "no sequences"
        raise ValueError(f"{what}: give at least one sequence, and drop empty ones")
    group = 2 if pair else 1
    if len(lengths) % group:
        raise ValueError(f"{len(lengths)} sequences are not pairs: give an even number, 2i and 2i+1 a pair")

    padded = [-(-length // multiple_of) * multiple_of for length in lengths]
    units = [sum(padded[start : start + group]) for start in range(0, len(padded), group)]
    if (longest := max(units)) > max_tokens:
        first = units.index(longest) * group
        who = f"sequences {first} and {first + 1} have" if pair else f"sequence {first} has"
        raise ConfigError(
            f"{who} {longest} tokens, padded to multiples of {multiple_of}, but a mini-batch holds at most "
            f"{max_tokens}: raise the tokens per device, or shorten or drop such sequences"
        )

    count = _least_minibatches(units, max_tokens)
    while True:
        count = -(-count // num_ranks) * num_ranks
        filled = units + [multiple_of * group] * (count - len(units))
        batches = get_seqlen_balanced_partitions(filled, count)
        sizes = totals(filled, batches)
        if max(sizes) <= max_tokens:
            break
        count += 1

    by_size = [batches[number] for number in sorted(range(count), key=lambda number: -sizes[number])]
    expanded = [tuple(unit * group + i for unit in batch for i in range(group)) for batch in by_size]
    return PackingPlan(
        ranks=tuple(tuple(expanded[rank::num_ranks]) for rank in range(num_ranks)),
        lengths=tuple(padded + [multiple_of] * (len(filled) * group - len(padded))),
        num_sequences=len(lengths),
    )


def _least_minibatches(units: Sequence[int], max_tokens: int) -> int:
    """Return a lower bound on the number of mini-batches, from the total and from the longest sequences."""
    by_total = -(-sum(units) // max_tokens)
    by_length = (-(-rank // (max_tokens // length)) for rank, length in enumerate(sorted(units, reverse=True), start=1))
    return max(by_total, *by_length)


def balance_order(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Return an order in which ``num_ranks`` equal slices hold nearly equally many tokens.

    Lengths 9, 8, 2, 1 on two ranks give ``[0, 3, 1, 2]``: 10 tokens each.

    Args:
        lengths: Tokens of each sequence, 0 or more.
        num_ranks: Data-parallel ranks; rank r takes the r-th slice.

    Raises:
        ValueError: If the ranks do not divide the number of sequences.
    """
    if num_ranks < 1 or len(lengths) % num_ranks or not lengths:
        raise ValueError(
            f"{len(lengths)} sequences cannot be divided evenly among {num_ranks} ranks: give a multiple of the ranks"
        )
    parts = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=True)
    return [index for part in parts for index in part]
