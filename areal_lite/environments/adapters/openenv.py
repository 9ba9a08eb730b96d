"""``openenv:URL``: a server of OpenEnv's protocol, a WebSocket session per episode; its package is not needed."""

import json
from typing import Any
import aiohttp
from areal_lite.environments.environment import Step, WrongAction

_ABOUT = ("done", "reward", "metadata")


class OpenEnvServer:
    """One session on a server.

    Args:
        url: Address of the server, http or https.
        action_key: Field of an action that takes the model's text. A model may also write the action as a JSON object.
        text_key: Field of an observation that the model reads; None: all fields, as JSON.
        options: Arguments of the server's reset, beside the seed.
    """

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "message",
        text_key: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._url, self._action_key, self._text_key, self._options = url, action_key, text_key, options or {}
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, row: dict[str, Any], seed: int) -> str:
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(f"{self._url.rstrip('/')}/ws")
        return self._text(await self._ask("reset", self._options | {"seed": seed}))

    async def step(self, action: Any) -> Step:
        made = await self._ask("step", self._action(action.rpartition("</think>")[2].strip()))
        return Step(self._text(made), float(made.get("reward") or 0.0), bool(made.get("done")))

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()

    def _action(self, text: str) -> dict[str, Any]:
        try:
            written = json.loads(text)
        except (ValueError, RecursionError):
            written = None
        return written if isinstance(written, dict) else {self._action_key: text}

    def _text(self, made: dict[str, Any]) -> str:
        seen = made.get("observation") or {}
        if self._text_key is not None:
            return str(seen[self._text_key])
        return json.dumps({name: value for name, value in seen.items() if name not in _ABOUT}, ensure_ascii=False)

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        await self._socket.send_json({"type": kind, "data": data})
        reply = await self._socket.receive_json()
        made: dict[str, Any] = reply.get("data") or {}
        if reply.get("type") == "error":
            if made.get("code") == "VALIDATION_ERROR" and kind == "step":
                raise WrongAction(f"{made.get('message')}: {made.get('errors', data)}")
            raise RuntimeError(f"{self._url} refused {kind}: {made.get('message')} ({made.get('code')})")
        return made
