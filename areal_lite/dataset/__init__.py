"""Names of AReaL's datasets: importing one says what replaces it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal_names import missing_name

        raise missing_name(__name__, name)
