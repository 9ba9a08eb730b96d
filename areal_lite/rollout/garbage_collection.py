"""Python's cyclic garbage collector, paced for thousands of live episodes."""

from __future__ import annotations

import gc

_ALLOCATIONS = 50_000
"""Net allocations between two collections. The default, 700, collects every few episodes; scanning all live
ones each time took a fifth of the engine's CPU."""

_engines = 0
_before: tuple[int, int, int] | None = None


def relax() -> None:
    """Collect less often while an engine runs; calls nest."""
    global _engines, _before
    _engines += 1
    if _engines == 1:
        _before = gc.get_threshold()
        gc.set_threshold(max(_ALLOCATIONS, _before[0]), *_before[1:])


def restore() -> None:
    """Undo one :func:`relax`; the last one restores the old pace."""
    global _engines
    _engines -= 1
    if _engines == 0 and _before is not None:
        gc.set_threshold(*_before)
