"""Agents: objects with ``async run()`` that talk to the model through an OpenAI-style client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lite.agents.areal_openai import ArealOpenAI

__all__ = ["ArealOpenAI"]


def __getattr__(name: str) -> object:  # the OpenAI SDK takes half a second to import
    if name == "ArealOpenAI":
        from areal_lite.agents.areal_openai import ArealOpenAI

        return ArealOpenAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
