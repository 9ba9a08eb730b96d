"""The child process that runs an agent, one episode at a time; started as a file, so it imports nothing at first.

It reads length-prefixed pickles from the process that started it and answers length-prefixed JSON: code that has
processed model output is not trusted to write pickles.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import spawn
from typing import Any

LENGTH = struct.Struct("!I")
MAX_TEXT = 8192


def main() -> None:
    """Serve the socket whose number is the first argument until the other side closes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    requests = connection.makefile("rb", 1 << 16)
    agents: dict[bytes, Any] = {}
    while header := requests.read(LENGTH.size):
        message = requests.read(LENGTH.unpack(header)[0])
        recorded: dict[str, Any] = {"processes": [], "scalars": [], "facts": {}}
        key, preparation, agent, job = pickle.loads(message)
        try:
            if agent is not None:
                spawn.prepare(preparation)
                agents[key] = pickle.loads(agent)
            reply = {"reward": run_job(agents[key], pickle.loads(job), recorded)}
        except BaseException as error:  # SystemExit too: the exception is the answer
            reply = {"error": _describe(error)}
        reply |= {**recorded, "loaded": key in agents}
        body = json.dumps(reply, default=_plain).encode()
        connection.sendall(LENGTH.pack(len(body)) + body)


def run_job(agent: Any, job: dict[str, Any], recorded: dict[str, Any]) -> Any:
    """Run one episode and return its reward; add the programs it ran, numbers it recorded and facts beside rewards."""
    import asyncio
    from dataclasses import asdict

    from areal_lite.agents.doors.http_transport import socket_client
    from areal_lite.agents.isolation.agent_access import AgentAccess
    from areal_lite.agents.isolation.misrouted_call import explain_misrouted_call
    from areal_lite.api import episode_context
    from areal_lite.api.episode_context import Episode, EpisodeContext

    is_async = inspect.iscoroutinefunction(agent.run)
    episode = Episode(member_idx=job["context"]["member_idx"])
    access = AgentAccess(**job["access"], http_client=None)
    os.environ.update(access.environment)

    def call(client: Any) -> Any:
        own = AgentAccess(**job["access"], http_client=client)
        episode_context.enter(EpisodeContext(**job["context"], episode=episode, agent=own))
        return agent.run(job["data"], base_url=own.base_url, api_key=own.api_key, http_client=client)

    async def main() -> Any:
        async with socket_client(is_async=True) as client:
            return await call(client)

    try:
        if is_async:
            return asyncio.run(main())
        with socket_client(is_async=False) as client:
            return call(client)
    except BaseException as error:
        explain_misrouted_call(error, access.base_url)
        raise
    finally:
        recorded["processes"] += [asdict(record) for record in episode.processes]
        recorded["scalars"] += episode.scalars
        recorded["facts"] |= episode.reward_extra


def _plain(value: Any) -> Any:
    """Return a reward that is no JSON: numbers of numpy and torch, other mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return value.item() if hasattr(value, "item") else float(value)
    except (TypeError, ValueError):
        return repr(value)[:200]


def _describe(error: BaseException) -> list[Any]:
    text = "".join(traceback.format_exception(error))
    try:
        message = str(error.args[0] if len(error.args) == 1 else error)  # str() of a KeyError has quotes
    except Exception:  # a user's class may break its own text
        message = "(its text cannot be read)"
    kind = getattr(error, "failure_kind", None)
    return [
        type(error).__name__,
        message[:MAX_TEXT],
        text[-MAX_TEXT:],
        kind if isinstance(kind, str) else None,
        getattr(error, "failure_hint", ""),
    ]


if __name__ == "__main__":
    main()
