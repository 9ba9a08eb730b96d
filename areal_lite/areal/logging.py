"""AReaL's ``getLogger``: loggers of the standard library, whose levels and handlers apply."""

from __future__ import annotations

import logging


def getLogger(name: str | None = None, type_: str | None = None) -> logging.Logger:
    """Return the logger ``name``; AReaL's ``type_`` of output is ignored."""
    return logging.getLogger(name)
