"""``mcp:COMMAND`` or ``mcp:URL``: the tools of an MCP server, a program on this machine or an address.

Each episode has its own connection, and with a command its own process, so no state of a server leaks between episodes.
The model calls tools until it answers with text, which the reward function judges.

The connection lives in a task of its own: when a server dies, its client cancels the task that opened it, which must
not be the episode's.
"""

import asyncio
import inspect
import shlex
from collections.abc import Callable
from typing import Any
from mcp import Client, MCPError, StdioServerParameters
from areal_lite.api import episode_context
from areal_lite.config.dotted_path import load_object
from areal_lite.environments.environment import Messages, Step, ToolCall
from areal_lite.environments.environment_process import box_around
from areal_lite.errors import ConfigError


class McpServer:
    """The tools of a server, around the prompt of a row.

    Args:
        server: A command line, or an address that begins with http.
        reward: ``function(answer: str, row: dict) -> float``, plain or async, or its dotted path.
        prompt_key: Column of the prompt: text or messages.
    """

    def __init__(
        self, server: str, *, reward: str | Callable[..., Any] | None = None, prompt_key: str = "prompt"
    ) -> None:
        if reward is None:
            raise ConfigError(
                f"env mcp:{server} has no reward: name a function of answer and row, "
                "workflow_kwargs: {kwargs: {reward: my_module.reward}}"
            )
        self._reward = load_object(reward, where="workflow_kwargs.kwargs.reward") if isinstance(reward, str) else reward
        self._server, self._prompt_key = server, prompt_key
        self._schemas: list[dict[str, Any]] = []
        self._closing = asyncio.Event()
        self._connection: asyncio.Task[None] | None = None

    @staticmethod
    def rows(server: str, **kwargs: Any) -> list[dict[str, Any]]:
        raise ConfigError(
            f"env mcp:{server} has tools and no rows: set train_dataset.path, and eval_dataset.path or leave it out"
        )

    async def reset(self, row: dict[str, Any], seed: int) -> Messages:
        self._row, self._opened = row, asyncio.get_running_loop().create_future()
        self._connection = asyncio.create_task(self._connect(), name=f"mcp server {self._server}")
        self._client = await self._opened
        cursor = None
        while True:
            listed = await self._client.list_tools(cursor=cursor)
            for tool in listed.tools:
                about = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
                self._schemas.append({"type": "function", "function": about})
            if (cursor := listed.next_cursor) is None:
                prompt: Messages = row[self._prompt_key]
                return prompt

    def tools(self) -> list[dict[str, Any]]:
        return self._schemas

    async def step(self, action: str | list[ToolCall]) -> Step:
        if not isinstance(action, str):
            return Step([call.result(await self._result(call)) for call in action])
        reward = self._reward(action, self._row)
        return Step(reward=await reward if inspect.isawaitable(reward) else reward, done=True)

    async def close(self) -> None:
        if self._connection is not None:
            self._closing.set()
            if not self._opened.done() or self._opened.cancelled():
                self._connection.cancel()
            await asyncio.wait({self._connection})

    async def _connect(self) -> None:
        try:
            command, *arguments = [*box_around(episode_context.current().agent), *shlex.split(self._server)]
            is_address = self._server.startswith(("http://", "https://"))
            server = self._server if is_address else StdioServerParameters(command=command, args=arguments)
            async with Client(server) as client:
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # while it opens, reset raises it; later the next call finds the connection closed
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _result(self, call: ToolCall) -> str:
        try:
            result = await self._client.call_tool(call.name, call.arguments)
        except MCPError as error:
            if error.error.code != -32602:  # JSON-RPC's code for arguments that do not fit
                raise
            return f"Error: {error}"
        text = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return f"Error: {text}" if result.is_error else text
