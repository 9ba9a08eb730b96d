"""Before torch is loaded: imports of large libraries without the garbage collector, and the rank under torchrun."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LAST = "transformers.modeling_utils"
"""Loaded where both libraries are."""


@contextmanager
def quick_import() -> Iterator[None]:
    """Import torch and transformers inside, and the garbage collector never scans what they make. Its scans, with the
    last one at exit, took a third of the CPU time to start and stop a server. Does nothing if they are loaded already:
    objects that are left out of collections are never freed if they form a cycle."""
    if not gc.isenabled() or _LAST in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_rank() -> bool:
    """Return whether this process is one of several ranks, as torchrun starts them."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def is_first_rank() -> bool:
    """Return whether this is the only process, or the first rank under torchrun."""
    return os.environ.get("RANK", "0") == "0"
