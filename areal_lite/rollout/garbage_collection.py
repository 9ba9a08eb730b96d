"""Python's cyclic garbage collector, paced for thousands of live episodes."""

import gc

_ALLOCATIONS = 50_000  # net, between two collections; with the default of 700 they took a fifth of the engine's CPU
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
