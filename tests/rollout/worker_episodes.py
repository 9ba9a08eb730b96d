"""Workflows that worker processes import; without torch, which takes seconds to load."""

from __future__ import annotations
import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from areal_lite.api import (
    AsyncRewardWrapper,
    InferenceEngine,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.processes.channel import framed
from areal_lite.rollout import workflow_context


class Scripted(RolloutWorkflow):
    """Records where it runs, and does what the row says."""

    def __init__(self, given: Any = None) -> None:
        self.given = given

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Run the script of the row."""
        context, do = workflow_context.get(), data.get("do", "ok")
        workflow_context.record(member=context.member_idx, version=context.version, pid=os.getpid())
        workflow_context.record(engine_version=engine.get_version())
        await misbehave(engine, data)
        if do in ("tensors", "not loadable"):
            from tests.rollout.scripted import TwoTurns

            tensors = await TwoTurns().arun_episode(engine, data)
            return tensors if do == "tensors" else {**tensors, "multi_modal_input": [OfAnotherProcess()]}
        first = await engine.agenerate(ModelRequest(input_ids=data.get("ids", [1, 2, 3]), metadata={"agent": "main"}))
        if do == "reject":
            return None
        if do == "bad":
            return {"input_ids": 3}
        interaction = InteractionWithTokenLogpReward(model_response=first, reward=float(data.get("reward", 1.0)))
        if do != "two turns":
            return {"first": interaction}
        ids = first.input_tokens + first.output_tokens + [5, 6]
        second = await engine.agenerate(ModelRequest(input_ids=ids))
        return {
            "second": InteractionWithTokenLogpReward(
                model_response=second, reward=2.0, parent=interaction, concat=context.member_idx == 0
            )
        }


def block() -> None:
    """Hold the event loop for ever, at no cost to other tests."""
    while True:
        time.sleep(0.01)


class Blocks(Scripted):
    """Blocks in its group's first member as the row says; the others answer."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Block, or answer."""
        loop, way = asyncio.get_running_loop(), data.get("way", "")
        answer = await super().arun_episode(engine, data)
        if way and workflow_context.get().member_idx == 0:
            if way == "coroutine":
                block()
            elif way == "callback":
                loop.call_soon(block)
            elif way == "timer":
                loop.call_later(0.01, block)
            elif way == "done callback":
                future = loop.create_future()
                future.add_done_callback(lambda _: block())
                future.set_result(None)
            elif way == "task nobody awaits":
                self.task = asyncio.create_task(in_a_task())
            elif way == "task":
                await asyncio.create_task(in_a_task())
            elif way == "after its end":
                loop.call_later(0.3, block)
                return answer
            await asyncio.Event().wait()
        return answer


async def in_a_task() -> None:
    """Block."""
    await asyncio.sleep(0)
    block()


class Hostile(Scripted):
    """Sends the run a message of its own through the connection of its worker, and hangs."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Send ``row["body"]``, or answer."""
        if "body" not in data:
            return await super().arun_episode(engine, data)
        engine._sender.sendall(framed(data["body"]))
        await asyncio.Event().wait()


class RunsCode:
    """Makes a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def sends(body: bytes) -> None:
    """Answer the run with a message of its own, in a child of a pool."""
    connections = [each for each in gc.get_objects() if type(each) is socket.socket and each.family == socket.AF_UNIX]
    connections[0].sendall(framed(body))
    threading.Event().wait()


async def misbehave(engine: InferenceEngine, data: dict[str, Any]) -> None:
    """Do what no episode should."""
    do = data.get("do", "ok")
    if do == "raise":
        raise KeyError("broken agent")
    if do == "exit":
        raise SystemExit(3)
    if do == "self-cancel":
        raise asyncio.CancelledError
    if do == "odd" and workflow_context.get().member_idx % 2:
        raise ValueError("odd member")
    if do == "give up":
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.agenerate(ModelRequest(input_ids=[9])), 2.0)
    if do == "block":
        is_new(data["begun"])
        signal.pause()
    if do == "hang":
        await asyncio.Event().wait()
    if do == "die" and is_new(data["mark"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "submit":
        engine.submit({}, Scripted)
    if do == "log":
        logging.getLogger("areal_lite.of_a_worker").warning("said in a worker")
        print("printed in a worker", end="")
        workflow_context.record(inherited=number_of_inheritable_sockets())
    while do == "spin":
        try:
            time.sleep(0.01)  # noqa: ASYNC251
        except Exception:
            continue
    if do == "clean up":
        is_new(data["begun"])
        threading.Thread(target=threading.Event().wait).start()  # the process does not wait for it
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            is_new(data["mark"])


def number_of_inheritable_sockets() -> int:
    """Return how many sockets beside stdin, stdout and stderr a program started here could get."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder itself, which is closed by now
            count += int(path.name) > 2 and path.is_socket() and os.get_inheritable(int(path.name))
    return count


def is_new(path: str) -> bool:
    """Write the id of this process to a file, and return whether the file is new."""
    with contextlib.suppress(FileExistsError), Path(path).open("x") as file:
        file.write(str(os.getpid()))
        return True
    return False


class Judged(RolloutWorkflow):
    """Rewards in a process pool."""

    def __init__(self, reward_fn: Callable[..., float]) -> None:
        self.reward = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Ask once, and judge."""
        response = await engine.agenerate(ModelRequest(input_ids=[1, 2, 3]))
        reward = await self.reward("", "", response.input_tokens, response.output_tokens)
        return {"answer": InteractionWithTokenLogpReward(model_response=response, reward=reward)}


def number_of_tokens(prompt: str, completion: str, prompt_ids: list[int], ids: list[int], **row: Any) -> float:
    """Return the reward."""
    return float(len(ids))


class OfAnotherProcess:
    """Can be pickled, but not loaded."""

    def __reduce__(self) -> Any:
        return int, ("not here",)


class OutOfReach:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return a reward."""
        return 1.0
