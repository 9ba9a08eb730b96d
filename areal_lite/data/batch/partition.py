"""Partition items into k parts of nearly equal weight, with two heuristics behind one function.

Guarantees that every item is in exactly one part, that no part is empty, and that the heaviest part exceeds the mean by
at most the longest item. Pure, without torch. Has no token cap; ``trainer/forward/microbatches.py`` has one.
"""

import heapq
from collections.abc import Sequence

Parts = list[list[int]]
_Entry = tuple[int, int]
"""Total length of a part, and its node in the tree of merged items."""
_FEW_ITEMS = 1024
"""Up to here Karmarkar-Karp takes a few milliseconds; beyond, it gains almost nothing (benchmarks/packing_plans.py)."""


def get_seqlen_balanced_partitions(lengths: Sequence[int], k_partitions: int, equal_size: bool = False) -> Parts:
    """Return ``k_partitions`` lists of indices into ``lengths``, each sorted, with nearly equal total lengths.

    They are the better result of longest-processing-time and Karmarkar-Karp. Above 1,024 items only the former runs,
    unless ``equal_size`` makes the latter cheap: then parts also have equally many items, or counts that differ by one.
    ValueError if there are fewer items than parts, no parts, or a negative length.
    """
    if not 1 <= k_partitions <= len(lengths):
        raise ValueError(
            f"k_partitions is {k_partitions} for {len(lengths)} items: no part may be empty, so use 1 to the number "
            "of items, or add items"
        )
    if (shortest := min(lengths)) < 0:
        raise ValueError(f"item {lengths.index(shortest)} has length {shortest}: it must be 0 or more")
    methods = [longest_processing_time]
    if equal_size or len(lengths) <= _FEW_ITEMS:
        methods.append(karmarkar_karp)
    candidates = (method(lengths, k_partitions, equal_size) for method in methods)
    return min(candidates, key=lambda parts: max(totals(lengths, parts)))


def totals(lengths: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def longest_processing_time(lengths: Sequence[int], k_partitions: int, equal_size: bool = False) -> Parts:
    """Give each item, longest first, to the lightest part so far; with ``equal_size`` only until it has its share.
    Source: Graham, Bounds on multiprocessing timing anomalies (1969)."""
    parts: Parts = [[] for _ in range(k_partitions)]
    share = len(lengths) // k_partitions if equal_size else len(lengths)
    # The count comes second, so items of length 0 fill empty parts first.
    lightest = [(0, 0, part) for part in range(k_partitions)]
    waiting: list[tuple[int, int, int]] = []
    for index in _longest_first(lengths):
        if not lightest:
            lightest, waiting = sorted(waiting), []
        total, count, part = heapq.heappop(lightest)
        parts[part].append(index)
        entry = total + lengths[index], count + 1, part
        if count + 1 < share:
            heapq.heappush(lightest, entry)
        else:
            waiting.append(entry)
    return [sorted(part) for part in parts]


def karmarkar_karp(lengths: Sequence[int], k_partitions: int, equal_size: bool = False) -> Parts:
    """Merge the two partial solutions of largest spread, heavy parts with light ones, until one is left.

    A partial solution lists only its non-empty parts, heaviest first, so most merges touch few of them. The initial
    ones hold one item each or, with ``equal_size``, ``k_partitions`` items of similar length, one per part.

    Source: Karmarkar and Karp, The differencing method of set partitioning (1982). ``equal_size`` follows Michiels et
    al., Performance ratios for the differencing method applied to balanced number partitioning (2003).
    """
    k = k_partitions
    order = _longest_first(lengths)
    step = k if equal_size else 1
    children: list[tuple[int, int]] = []

    def ranked(solution: list[_Entry]) -> tuple[int, int, list[_Entry]]:
        spread = solution[0][0] - (solution[-1][0] if len(solution) == k else 0)
        return -spread, solution[0][1], solution  # nodes are unique, so lists are never compared

    def merge(a: list[_Entry], b: list[_Entry]) -> list[_Entry]:
        keep_a, keep_b = min(k - len(b), len(a)), min(k - len(a), len(b))
        merged = a[:keep_a] + b[:keep_b]
        for (total_a, node_a), (total_b, node_b) in zip(a[keep_a:], reversed(b[keep_b:]), strict=True):
            merged.append((total_a + total_b, len(lengths) + len(children)))
            children.append((node_a, node_b))
        merged.sort(reverse=True)
        return merged

    heap = [
        ranked([(lengths[index], index) for index in order[start : start + step]])
        for start in range(0, len(order), step)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        largest = heapq.heappop(heap)[2]
        heapq.heapreplace(heap, ranked(merge(largest, heap[0][2])))

    parts: Parts = []
    for _, root in heap[0][2]:
        items, nodes = [], [root]
        while nodes:
            node = nodes.pop()
            if node < len(lengths):
                items.append(node)
            else:
                nodes.extend(children[node - len(lengths)])
        parts.append(sorted(items))
    return parts


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])
