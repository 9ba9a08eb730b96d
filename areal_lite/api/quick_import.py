"""Imports of large libraries, without the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_import() -> Iterator[None]:
    """Import torch and transformers inside, and the garbage collector never scans what they make.

    Its scans, with the last one at exit, took a third of the CPU time to start and stop a server. Does nothing if torch
    is loaded already: objects that are left out of collections are never freed if they form a cycle.
    """
    if not gc.isenabled() or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
