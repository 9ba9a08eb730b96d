"""The learning side: a batch in, a new policy version and its metrics out. Loads torch."""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal.names import missing_name

        raise missing_name(__name__, name)
