"""One episode of an agent in a process of its own (:mod:`areal_lite.agents.isolation.agent_processes`)."""

from __future__ import annotations

import asyncio
import inspect
import os
from dataclasses import asdict, replace
from typing import Any

from areal_lite.agents.doors.http_transport import socket_client
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.misrouted_call import explain_misrouted_call
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.processes.channel import describe


def run_agent(agent: Any, data: dict[str, Any], access: dict[str, str], context: dict[str, Any]) -> dict[str, Any]:
    """Run one episode and return as JSON its reward or error, the programs it ran, numbers it recorded and facts."""
    own = AgentAccess(**access, http_client=None)
    os.environ.update(own.environment)
    episode = Episode(member_idx=context["member_idx"])
    end: dict[str, Any]
    try:
        end = {"reward": _run(agent, data, own, EpisodeContext(**context, episode=episode))}
    except BaseException as error:  # SystemExit too: the exception is the answer, beside what was recorded
        explain_misrouted_call(error, own.base_url)
        end = {"error": describe(error)}
    return {
        **end,
        "processes": [asdict(record) for record in episode.processes],
        "scalars": episode.scalars,
        "facts": episode.reward_extra,
    }


def _run(agent: Any, data: dict[str, Any], access: AgentAccess, context: EpisodeContext) -> Any:
    def call(client: Any) -> Any:
        own = replace(access, http_client=client)
        episode_context.enter(context._replace(agent=own))
        return agent.run(data, base_url=own.base_url, api_key=own.api_key, http_client=client)

    async def main() -> Any:
        async with socket_client(is_async=True) as client:
            return await call(client)

    if inspect.iscoroutinefunction(agent.run):
        return asyncio.run(main())
    with socket_client(is_async=False) as client:
        return call(client)
