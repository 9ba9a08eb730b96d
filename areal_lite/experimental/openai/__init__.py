"""AReaL's OpenAI client and its records, under the module name of AReaL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_lite.agents.areal_openai import ArealOpenAI
from areal_lite.api.interaction import InteractionWithTokenLogpReward

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        from areal_lite.areal_names import missing_name

        raise missing_name(__name__, name)


__all__ = ["ArealOpenAI", "InteractionWithTokenLogpReward"]
