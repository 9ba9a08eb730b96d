"""Agents: objects with ``async run()`` that talk to the model through an OpenAI-style client.

Promises that any SDK, thread or process can be an episode's agent, and that the tokens it trains on are the sampled
ones. Imports api, config, data and processes; knows the engine only through api. The rollout room runs
:class:`AgentWorkflow` like any other workflow. Read agent_workflow, then doors, session and parsers.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_lite.agents.areal_openai import ArealOpenAI

__all__ = ["ArealOpenAI"]


def __getattr__(name: str) -> object:  # the OpenAI SDK takes half a second to import
    if name == "ArealOpenAI":
        from areal_lite.agents.areal_openai import ArealOpenAI

        return ArealOpenAI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
