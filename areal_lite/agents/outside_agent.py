"""An agent that runs outside: a program takes an episode as a session, calls the model and sends the reward.

``areal-lite serve CONFIG.yaml --train`` is ``train`` with this agent. Within its own deadline, an episode waits for
``POST /rl/start_session``, then for the reward of ``POST /rl/end_session``. The same address serves the model.
"""

import asyncio
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any
from areal_lite.agents.doors.agent_service import JSON_HEADERS, AgentService, Reply, error_reply
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.session.request_fields import RequestError, json_object
from areal_lite.api import episode_context
from areal_lite.api.shared_resources import SharedResources

KEY = "AREAL_LITE_KEY"
"""Environment variable with the key that takes sessions."""


class OutsideAgent:
    """Waits for a program outside, on this ``port`` of 127.0.0.1."""

    def __init__(self, port: int = 8900) -> None:
        self._port = port

    async def run(self, data: dict[str, Any], *, api_key: str, **_: Any) -> Any:
        """Return the reward that comes from outside."""
        context = episode_context.current()
        shared = context.shared or SharedResources()
        doors = await shared.get("agents", lambda: Listener(AgentService()).open(shared))
        desk = await shared.get("sessions", lambda: Listener(SessionDesk(doors.service), port=self._port).open())
        place = {"task_id": context.task_id, "member_idx": context.member_idx, "is_eval": context.is_eval}
        base_url = f"http://127.0.0.1:{desk.port}/v1"
        assert isinstance(desk.service, SessionDesk)
        return await desk.service.reward_of({"base_url": base_url, "api_key": api_key, "row": data, **place})


class SessionDesk(AgentService):
    """Gives waiting episodes to those who have its key, and takes their rewards; other requests go to ``service``."""

    def __init__(self, service: AgentService) -> None:
        super().__init__()
        self._key = os.environ[KEY].encode()
        self._service = service
        self._offers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._rewards: dict[str, asyncio.Future[Any]] = {}
        """Those awaited, by the key of their session."""

    async def reward_of(self, offer: dict[str, Any]) -> Any:
        """Offer an episode and return its reward."""
        key = offer["api_key"]
        self._rewards[key] = asyncio.get_running_loop().create_future()
        self._offers.put_nowait(offer)
        try:
            return await self._rewards[key]
        finally:
            del self._rewards[key]

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Reply:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        try:
            if (method, path) == ("POST", "/rl/start_session"):
                reply = await self._start(key)
            elif (method, path) == ("POST", "/rl/end_session"):
                reply = self._end(key, json_object(body))
            else:
                return await self._service.handle(method, path, headers, body)
        except RequestError as error:
            return error_reply(path, error)
        plain = lambda value: value.tolist() if hasattr(value, "tolist") else str(value)  # noqa: E731 -- of numpy
        return Reply(200, JSON_HEADERS, json.dumps(reply, default=plain).encode())  # orjson refuses 2**64

    async def _start(self, key: str) -> dict[str, Any]:
        if not hmac.compare_digest(key.encode(errors="surrogatepass"), self._key):
            raise RequestError(f"the key takes no sessions: send the one that the run has in {KEY}", status=401)
        while (offer := await self._offers.get())["api_key"] not in self._rewards:
            pass  # its episode ended while it waited
        return offer

    def _end(self, key: str, body: dict[str, Any]) -> dict[str, Any]:
        if (reward := self._rewards.get(key)) is None or reward.done():
            raise RequestError("no session has this key: it has ended, or its deadline is over", status=410)
        match body:
            case {"reward": value}:
                reward.set_result(value)
            case {"error": text}:
                reward.set_exception(RuntimeError(str(text)[:2000]))
            case _:
                raise RequestError("send {'reward': what run() may return}, or {'error': text}")
        return {}
