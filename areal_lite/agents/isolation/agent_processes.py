"""Agents in processes of a pool, each one episode at a time (``rollout.agents.isolation: process``)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.agent_episode import run_agent
from areal_lite.api.episode_context import EpisodeContext
from areal_lite.api.trajectory import ProcessRecord
from areal_lite.processes.call_pool import CallPool
from areal_lite.processes.channel import rebuilt
from areal_lite.processes.child_process import PickledObject, pickled_object


def pickled_agent(agent: Any) -> PickledObject:
    """Return what a process needs to run ``agent``.

    Raises:
        ConfigError: If it cannot be pickled.
    """
    hint = (
        "Define its class at the top level of a module and make clients, locks and files in run(), or set "
        "rollout.agents.isolation: thread"
    )
    return pickled_object(partial(run_agent, agent), name=f"agent {type(agent).__name__}", hint=hint)


class AgentProcesses:
    """The agents' processes of one engine.

    Args:
        size: Maximum number of processes; None is two per core.
    """

    def __init__(self, size: int | None) -> None:
        self._pool = CallPool(size or 2 * (os.cpu_count() or 1))

    async def run(
        self, agent: PickledObject, data: dict[str, Any], access: AgentAccess, context: EpisodeContext
    ) -> Any:
        """Return the reward of one episode; what its agent ran and recorded is added to the context's episode.

        Raises:
            Exception: What ``run()`` raised: the builtin class, or one of the same name; a note has the traceback.
            RuntimeError: If the process died.
        """
        place = {name: getattr(context, name) for name in ("is_eval", "task_id", "group_id", "member_idx", "version")}
        doors = {name: getattr(access, name) for name in ("base_url", "anthropic_base_url", "api_key")}
        reply = await self._pool.call(agent, (data, doors, place))
        if context.episode is not None:
            context.episode.processes += [ProcessRecord(**record) for record in reply["processes"]]
            context.episode.reward_extra |= reply["facts"]
            context.episode.scalars += [(name, value) for name, value in reply["scalars"]]
        if "error" in reply:
            raise rebuilt(*reply["error"])
        return reply["reward"]

    async def aclose(self) -> None:
        """Kill all processes."""
        self._pool.close()
