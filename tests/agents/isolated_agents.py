"""Agents of the tests of isolation. Processes that run them import this module and no more."""

from __future__ import annotations
import asyncio
import contextvars
import os
import shlex
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any
import numpy as np
import openai
from areal_lite.api.episode_context import record_reward_facts
from areal_lite.rollout import workflow_context

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


def shown(path: Path) -> bool:
    """Return whether a process has written its id to a file."""
    return path.exists() and path.read_text().endswith("\n")


class AsyncAgent:
    """Calls the model with the client it is given, streamed and whole."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 if both calls answer."""
        client = openai.AsyncOpenAI(**extra_kwargs)
        await client.chat.completions.create(model="m", messages=MESSAGES)
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert len(chunks) > 1 and workflow_context.get().task_id is not None
        if "wait" in data:
            show_pid(data["wait"])
            await asyncio.Event().wait()
        return 1.0


def show_pid(path: str) -> None:
    """Write the id of this process to a file."""
    Path(path).write_text(str(os.getpid()))


class BlockingAgent:
    """Uses the sync SDK inside its coroutine."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 if the call answers."""
        openai.OpenAI().chat.completions.create(model="m", messages=MESSAGES)
        return 1.0


class PlainAgent:
    """A plain function with the sync SDK."""

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        """Return the reward of its completion."""
        with openai.OpenAI(**extra_kwargs) as client:
            completion = client.chat.completions.create(model="m", messages=MESSAGES)
        if data.get("do") == "raise":
            raise ZeroDivisionError("the agent's own bug")
        if data.get("do") == "own error":
            raise OwnError("a class of its own")
        if data.get("do") == "exit":
            os._exit(3)
        if data.get("do") == "hang":
            time.sleep(60)
        record_reward_facts({"acc": 1.0, "pred": "yes"})
        return {completion.id: 0.5}


class RecordingAgent(PlainAgent):
    """Records a number."""

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        """Return the reward of its completion."""
        workflow_context.record(number=data["number"])
        return super().run(data, **extra_kwargs)


class OwnError(Exception):
    """Known to the agent's module only."""


class Hanging:
    """Never returns."""

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> None:
        """Show the process and hang."""
        show_pid(data["path"])
        while True:
            pass


class Reader:
    """Calls no model."""

    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> np.float32:
        """Return 0.5 from another process than the row's."""
        return np.float32(0.5 if Path(data["path"]).read_text() != str(os.getpid()) else 0)


class Unloadable:
    """Cannot be made in another process."""

    def __reduce__(self) -> Any:
        return fail_to_load, ()


def fail_to_load() -> None:
    """Raise."""
    raise LookupError("no such model folder here")


class OneConversation:
    """Uses the event loop as it should."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 after one call through the listener."""
        async with openai.AsyncOpenAI() as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            if data.get("sleep"):
                time.sleep(data["sleep"])  # noqa: ASYNC251 -- what the test is about
            await client.chat.completions.create(model="m", messages=MESSAGES)
        return 1.0


class Bystander:
    """Blocks the loop while a thread calls the model with another episode's key."""

    keys: list[tuple[str, str]] = []
    opened = asyncio.Event()
    answered = asyncio.Event()
    answers: list[int] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """The first episode lends its key; the second blocks."""
        client = openai.AsyncOpenAI(**extra_kwargs)
        await client.chat.completions.create(model="m", messages=MESSAGES)
        if data["n"] == 0:
            self.keys.append((extra_kwargs["base_url"], extra_kwargs["api_key"]))
            self.opened.set()
            await self.answered.wait()
            return 1.0
        await self.opened.wait()
        url, key = self.keys[0]
        loop = asyncio.get_running_loop()

        def call() -> None:
            request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request) as response:
                self.answers.append(response.status)
            loop.call_soon_threadsafe(self.answered.set)

        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(2.5)  # noqa: ASYNC251 -- what the test is about
        assert not self.answers  # it waits, and is not refused
        return 1.0


class ProgramAgent:
    """Runs what the row says in another program."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 if the program exits with 0."""
        agent = workflow_context.get().agent
        done = await agent.run_process(data["command"], **data.get("options", {}))
        if data.get("call", True):
            client = openai.AsyncOpenAI(**extra_kwargs)
            await client.chat.completions.create(model="m", messages=MESSAGES)
        return float(done.returncode == 0)


class Leaving:
    """Starts a process in its own way and leaves it behind."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 once the process has shown its id, or wait forever."""
        await openai.AsyncOpenAI(**extra_kwargs).chat.completions.create(model="m", messages=MESSAGES)
        command, loop = data["command"], asyncio.get_running_loop()
        match data["how"]:
            case "asyncio":
                await asyncio.create_subprocess_exec(*command)
            case "shell":
                await asyncio.create_subprocess_shell(shlex.join(command), env={"PATH": os.environ["PATH"]})
            case "executor":
                await loop.run_in_executor(None, subprocess.Popen, command)
            case "Popen":
                subprocess.Popen(command)  # noqa: ASYNC220
            case "shared":
                contextvars.Context().run(subprocess.Popen, command)
            case "waits in threads":
                await asyncio.gather(*(asyncio.to_thread(subprocess.run, command) for _ in range(40)))
        while not shown(Path(data["pid"])):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if data.get("hang"):
            await asyncio.Event().wait()
        return 1.0


class LateStart:
    """Starts a process in a thread that has outlived its episode."""

    errors: list[str] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return 1 after one call."""
        await openai.AsyncOpenAI(**extra_kwargs).chat.completions.create(model="m", messages=MESSAGES)

        def start() -> None:
            time.sleep(2)
            try:
                subprocess.Popen(["sleep", "1000"])
            except RuntimeError as error:
                self.errors.append(str(error))

        asyncio.get_running_loop().run_in_executor(None, start)
        return 1.0
