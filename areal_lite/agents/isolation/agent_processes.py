"""Agents in processes of a pool, each one episode at a time (``rollout.agents.isolation: process``)."""

import asyncio
import inspect
import os
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from pydantic import TypeAdapter
from areal_lite.agents.doors.http_transport import socket_client
from areal_lite.agents.isolation import episode_processes
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.episode_processes import EpisodeProcesses
from areal_lite.agents.isolation.misrouted_call import explain_misrouted_call
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.trajectory import Recorded
from areal_lite.processes.call_pool import CallPool
from areal_lite.processes.channel import describe, rebuilt
from areal_lite.processes.child_process import PickledObject, pickled_object

_RECORDED = TypeAdapter(Recorded)


def pickled_agent(agent: Any) -> PickledObject:
    """Return what a process needs to run ``agent``; ConfigError if it cannot be pickled."""
    hint = (
        "Define its class at the top level of a module and make clients, locks and files in run(), or set "
        "rollout.agents.isolation: thread"
    )
    return pickled_object(partial(_run_episode, agent), name=f"agent {type(agent).__name__}", hint=hint)


async def run_in_process(
    pool: CallPool, agent: PickledObject, data: dict[str, Any], access: AgentAccess, context: EpisodeContext
) -> Any:
    """Return the reward of one episode; what its agent ran and recorded is added to the context's episode."""
    sent = context._replace(episodes=None, episode=None, shared=None, agent=None)
    processes = episode_processes.current() or EpisodeProcesses(access.api_key)
    processes.started = True  # or so it may be if the process is killed
    reply = await pool.call(agent, (data, replace(access, http_client=None), sent))
    processes.started = reply["started"]
    if context.episode is not None:
        # The process runs users' code and chooses the types.
        recorded = _RECORDED.validate_python(reply["recorded"])
        context.episode.processes += recorded.processes
        context.episode.reward_extra |= recorded.reward_extra
        context.episode.scalars += recorded.scalars
    if "error" in reply:
        raise rebuilt(*reply["error"])
    return reply["reward"]


def _run_episode(agent: Any, data: dict[str, Any], access: AgentAccess, context: EpisodeContext) -> dict[str, Any]:
    """Run one episode, in its process; return its reward or error, the programs it ran, and what it recorded."""
    os.environ.update(access.environment)
    episode = Episode(member_idx=context.member_idx)
    processes = EpisodeProcesses(access.api_key)
    end: dict[str, Any]
    try:
        end = {"reward": _reward(agent, data, access, context._replace(episode=episode))}
    except BaseException as error:  # SystemExit too: the exception is the answer, beside what was recorded
        explain_misrouted_call(error, access.base_url)
        end = {"error": describe(error)}
    ran = [asdict(record) for record in episode.processes]
    recorded = {"processes": ran, "scalars": episode.scalars, "reward_extra": episode.reward_extra}
    return {**end, "recorded": recorded, "started": processes.started}


def _reward(agent: Any, data: dict[str, Any], access: AgentAccess, context: EpisodeContext) -> Any:
    def call(client: Any) -> Any:
        episode_context.enter(context._replace(agent=replace(access, http_client=client)))
        return agent.run(data, base_url=access.base_url, api_key=access.api_key, http_client=client)

    async def main() -> Any:
        async with socket_client(is_async=True) as client:
            return await call(client)

    if inspect.iscoroutinefunction(agent.run):
        return asyncio.run(main())
    with socket_client(is_async=False) as client:
        return call(client)
