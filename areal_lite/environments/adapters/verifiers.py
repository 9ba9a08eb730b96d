"""``verifiers:ID``: tasksets of verifiers, which plays each episode itself, with its harness, tools and rewards.

Its programs ask a model over HTTP. Here the model is a server of the episode's own on this machine: what a program asks
is what the environment shows, and the next action is the answer.
"""

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar
from aiohttp import web
from verifiers.v1 import Episode, EvalClientConfig, ModelContext, Task
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
from areal_lite.environments.adapters.task_split import FIRST_HELD_OUT, task_of
from areal_lite.environments.environment import Messages, Step, ToolCall

# The programs beside its interpreter, as uv, are found though the run began with another one.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


class VerifiersTaskset:
    """One task of a taskset: of a finite one as :func:`.task_of` says, of an endless one the even tasks in order, and
    the odd ones for rows that are held out.

    Args:
        name: Id of the taskset: a package that is installed, or a taskset of verifiers itself.
        taskset: Settings of the taskset.
        agent: Settings of verifiers' agent, beside a conversation with the task's tools (harness ``null``), whose
            programs run on this machine.
        config: Further settings of verifiers' environment.
    """

    _tasks: ClassVar[dict[str, list[Task]]] = {}

    def __init__(
        self,
        name: str,
        *,
        taskset: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        settings = {**(config or {}), "taskset": {"id": name, **(taskset or {})}}
        settings["agent"] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **(agent or {})}
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        self._env = load_environment(resolve_env_config(settings))
        self._requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._episode: asyncio.Task[Episode] | None = None
        self._closed = False
        self._talk: list[dict[str, Any]] = []
        self._tools: list[dict[str, Any]] = []

    async def reset(self, row: dict[str, Any], seed: int) -> Messages:
        self._episode = asyncio.create_task(self._play(self._task(int(row["number"]))))
        if (step := await self._next()).done:
            raise RuntimeError(f"verifiers ended the task before it asked the model, with the reward {step.reward:g}")
        return step.messages

    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    async def step(self, action: str | list[ToolCall]) -> Step:
        message: dict[str, Any] = {"role": "assistant", "content": action if isinstance(action, str) else None}
        if not isinstance(action, str):
            calls = [{"name": call.name, "arguments": json.dumps(call.arguments)} for call in action]
            message["tool_calls"] = [
                {"index": place, "id": call.id, "type": "function", "function": function}
                for place, (call, function) in enumerate(zip(action, calls, strict=True))
            ]
        assert self._answer is not None
        self._answer.set_result(message)
        self._talk.append(message)
        return await self._next()

    async def close(self) -> None:
        if self._episode is None:
            return
        self._closed = True
        self._episode.cancel()
        if self._answer is not None:
            self._answer.cancel()  # else verifiers waits for it
        await asyncio.wait({self._episode})

    def _task(self, number: int) -> Task:
        if self._env.taskset.INFINITE:
            place = 2 * (number % FIRST_HELD_OUT) + (number >= FIRST_HELD_OUT)
            return next(islice(iter(self._env.taskset), place, None))
        if (tasks := self._tasks.get(self._settings)) is None:
            tasks = self._tasks[self._settings] = list(self._env.taskset)
        return tasks[task_of(number, len(tasks))]

    async def _play(self, task: Task) -> Episode:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions", self._reply)
        model = web.AppRunner(app)
        await model.setup()
        try:
            await web.TCPSite(model, "127.0.0.1", 0).start()
            client = EvalClientConfig(base_url=f"http://127.0.0.1:{model.addresses[0][1]}/v1", api_key_var="NO_KEY")
            async with self._env.serving():
                return await self._env.run_episode(task, ModelContext("default", client))
        finally:
            await model.cleanup()

    async def _next(self) -> Step:
        """Wait for what the model is asked next, or for the end and its rewards."""
        assert self._episode is not None
        asked = asyncio.create_task(self._requests.get())
        await asyncio.wait({asked, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return _end(await self._episode)
        request = asked.result()
        before = len(self._talk)
        if [_said(each) for each in request["messages"][:before]] != [_said(each) for each in self._talk]:
            raise RuntimeError("the taskset begins a second conversation, or rewrites the first: it has to grow")
        self._talk, self._tools = request["messages"], request.get("tools", [])
        return Step(self._talk[before:])

    async def _reply(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if self._closed:
            raise web.HTTPServiceUnavailable
        self._answer = asyncio.Future()
        self._requests.put_nowait(asked)
        message = await self._answer
        usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        choice = {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        body = {"id": "0", "created": 0, "model": "default", "usage": usage}
        if not asked.get("stream"):
            return web.json_response({**body, "object": "chat.completion", "choices": [{**choice, "message": message}]})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        body |= {"object": "chat.completion.chunk", "choices": [{**choice, "delta": message}]}
        await reply.write(f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode())
        return reply


def _said(message: Mapping[str, Any]) -> tuple[str, Any]:
    """Return what two forms of a message must share; an answer may come back trimmed or parsed."""
    return message["role"], None if message["role"] == "assistant" else message.get("content")


def _end(episode: Episode) -> Step:
    if not episode.ok:
        problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(problems[-1].message if problems else "verifiers gave up the episode without an error")
    (trace,) = episode.traces
    parts = {name: each.value for name, each in trace.rewards.items() if each is not None}
    return Step("", trace.reward, not trace.is_truncated, trace.is_truncated, parts | trace.metrics)
