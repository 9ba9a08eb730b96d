"""Rollout workers: child processes that run the episodes of groups (``rollout.workers``).

The run's process keeps all that must be one: which group starts when, the policy version, data source, retries,
statistics, dumps, and the servers with their state. A worker runs the code of workflows and agents
(``worker_process``); its model calls are made here, in the name of its episodes, so pause, weight
updates, interruption and seeds work as without workers. Guarantees that a worker that dies fails only its own groups
and is started again, and that none outlives :meth:`Workers.close` or this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind, attributed_to
from areal_lite.api.io_struct import ModelRequest, TokenPrefix
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import EpisodeStatus
from areal_lite.api.turn_tree import unpacked
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.errors import EpisodeError, ServerError
from areal_lite.processes.child_process import ChildProcess, PickledObject, main_command, pickled_object
from areal_lite.rollout.episodes.submission import Submission
from areal_lite.rollout.workers.worker_process import (
    RESPONSE_FIELDS,
    CallRequest,
    EpisodeReply,
    MessageReader,
    WorkerSettings,
    frame,
)

logger = logging.getLogger(__name__)

START_TRIES = 3
"""Times in a row that a worker may die before it is ready."""
START_S = 120.0
CLOSE_S = 10.0
"""Seconds for a worker to close what its episodes shared."""
UNREAD_S = 1.0
"""Seconds to read what a process that has ended sent."""
_MAX_WORKFLOWS = 64
"""Workflows that a worker keeps loaded."""


class Workers:
    """The workers of one engine; lives on its event loop.

    Args:
        engine: Makes the model calls.
        config: Of the engine.
        shared: Counts what the workers count.
        on_broken: Called with the error if a worker cannot be started.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        config: InferenceEngineConfig,
        shared: SharedResources,
        *,
        on_broken: Callable[[Exception], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._shared = shared
        self._on_broken = on_broken
        self._workers: list[_Worker] = []
        """Those that run, ready or not."""
        self._ready = asyncio.Event()
        """Set while at least one is ready."""
        self._keepers: list[asyncio.Task[None]] = []
        self._closing = False

    async def open(self) -> None:
        """Start all workers and wait until they are ready.

        Raises:
            EpisodeError: If one cannot be started.
        """
        loop, config = asyncio.get_running_loop(), self._config
        levels = {name: logging.getLogger(name).level for name in ("", "areal_lite")}
        settings = pickled_object(
            WorkerSettings(config, levels), name="the rollout section", hint="Or set rollout.workers: 1"
        )
        started = [loop.create_future() for _ in range(config.workers)]
        self._keepers = [loop.create_task(self._keep(n, settings, future)) for n, future in enumerate(started)]
        await asyncio.wait(started)
        for error in [future.exception() for future in started]:
            if error is not None:
                raise error

    async def close(self) -> None:
        """End all workers."""
        self._closing = True
        for worker in self._workers:
            worker.close()
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=CLOSE_S)
            for worker in self._workers:
                worker.kill()
            await asyncio.wait(self._keepers)

    def set_version(self, version: int) -> None:
        """Set the policy version that the episodes read."""
        for worker in self._workers:
            worker.send("version", version)

    async def run(self, submission: Submission, deadline: float) -> Failure | None:
        """Run the submission's group in a worker; its episodes get their trajectories and records.

        If cancelled, stop the group and wait until it has cleaned up.

        Returns:
            Why the group failed; None if it finished.
        """
        with attributed_to(FailureKind.DATA):
            data = pickle.dumps(dict(submission.data), pickle.HIGHEST_PROTOCOL)
        while not (ready := [worker for worker in self._workers if worker.is_ready]):
            self._ready.clear()
            await self._ready.wait()
        worker = min(ready, key=lambda worker: len(worker.groups))
        assert submission.recipe.sent is not None
        group = worker.run(submission.recipe.sent, data, episode_context.current(), deadline)
        try:
            _, failure = await asyncio.shield(group.end)
        except asyncio.CancelledError:
            worker.send("cancel", group.key)
            was_stopped, failure = await asyncio.shield(group.end)
            if was_stopped:
                raise
        return failure

    async def _keep(self, number: int, settings: PickledObject, started: asyncio.Future[None]) -> None:
        """Keep one worker running until :meth:`close`."""
        failed_starts = 0
        while not self._closing:
            worker = _Worker(number, self._engine, self._shared)
            self._workers.append(worker)
            is_ready = await worker.open(settings)
            if is_ready:
                failed_starts = 0
                self._ready.set()
                if not started.done():
                    started.set_result(None)
            await worker.ended.wait()
            self._workers.remove(worker)
            if self._closing:
                return
            if is_ready:
                logger.warning("%s; starting it again", worker.end)
                continue
            failed_starts += 1
            if failed_starts == START_TRIES:
                error = EpisodeError(
                    f"{worker.end} before it was ready, {START_TRIES} times in a row: its output above says why"
                )
                self._on_broken(error) if started.done() else started.set_exception(error)
                return


class _Group:
    """A group that runs in a worker."""

    def __init__(self, key: int, context: EpisodeContext) -> None:
        self.key = key
        self.end: asyncio.Future[tuple[bool, Failure | None]] = asyncio.get_running_loop().create_future()
        """Whether a cancellation ended it, and why it failed."""
        self._context = context
        assert context.episodes is not None
        self._episodes = context.episodes
        self._ids: dict[int, list[int]] = {}
        """Lists of ids that prompts share, by number."""

    def member(self, member_idx: int) -> Episode:
        """Return an episode; a workflow may run more of them than were drawn."""
        while len(self._episodes) <= member_idx:
            self._episodes.append(Episode(member_idx=len(self._episodes), seed_name=self._episodes[0].seed_name))
        return self._episodes[member_idx]

    def context(self, member_idx: int) -> EpisodeContext:
        """Return the context of an episode's model calls."""
        return self._context._replace(member_idx=member_idx, episode=self.member(member_idx))

    def prompt(self, call: CallRequest) -> TokenPrefix | None:
        """Return the prompt of a call, whose ids the group's prompts may share."""
        if call.prefix is None:
            return None
        number, length, num_accepted = call.prefix
        ids = self._ids.setdefault(number, [])
        ids += call.ids
        return TokenPrefix(ids, length, num_accepted)

    def finish(self, was_stopped: bool, failure: Failure | None, replies: list[EpisodeReply]) -> None:
        """Take over what its episodes left; none if the worker died."""
        for member_idx, reply in enumerate(replies):
            episode = self.member(member_idx)
            for name, value in reply.records.items():
                setattr(episode, name, value)
            if reply.trajectory is None:
                continue
            own = reply.trajectory["own"]
            if own["status"] in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED) and own["reward"] is None:
                episode.end(own["status"], own["failure"])
            else:
                episode.trajectory = unpacked(reply.trajectory, episode.calls)
        if replies:
            del self._episodes[len(replies) :]
        self.end.set_result((was_stopped, failure))


class _Worker:
    """One worker process and its connection."""

    def __init__(self, number: int, engine: InferenceEngine, shared: SharedResources) -> None:
        self.groups: dict[int, _Group] = {}
        self.ended = asyncio.Event()
        """Set once the process has ended and all that it sent was read."""
        self.end: str
        """How it ended, for people."""
        self._number = number
        self._engine = engine
        self._shared = shared
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._keys = itertools.count()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._workflows: set[bytes] = set()
        self._counts: dict[str, float] = {}
        self._process: ChildProcess | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._exited = self._disconnected = self._closing = False

    async def open(self, settings: PickledObject) -> bool:
        """Start the process and return whether it is ready; if not, it has ended or will soon."""
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._on_exit)

        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = ChildProcess(
                    main_command("areal_lite.rollout.workers.worker_process", theirs.fileno()),
                    environment={"OMP_NUM_THREADS": "1", **os.environ},
                    output=None,
                    pass_fds=[theirs.fileno()],
                    on_end=on_end,
                )
            except OSError as error:
                ours.close()
                self.end = f"worker {self._number} could not be started ({error})"
                self.ended.set()
                return False
        reader = MessageReader(lambda kind, *rest: getattr(self, f"_on_{kind}")(*rest), self._on_disconnect)
        self._transport, _ = await loop.create_unix_connection(lambda: reader, sock=ours)
        self.send(settings)
        self.send("version", self._engine.get_version())
        if self._closing:
            self.send("close")
        try:
            async with asyncio.timeout(START_S):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill()
            return False

    @property
    def is_ready(self) -> bool:
        """Whether it takes groups."""
        return self._ready.done() and self._ready.result() and not self._disconnected

    def send(self, *message: Any) -> None:
        """Send a message, if the process still runs."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def run(self, workflow: PickledObject, data: bytes, context: EpisodeContext, deadline: float) -> _Group:
        """Start a group."""
        if workflow.key not in self._workflows:
            if len(self._workflows) == _MAX_WORKFLOWS:
                self._workflows.clear()
                self.send("forget_workflows")
            self._workflows.add(workflow.key)
            self.send("workflow", workflow)
        group = _Group(next(self._keys), context)
        self.groups[group.key] = group
        place = {name: getattr(context, name) for name in ("is_eval", "task_id", "group_id", "version")}
        assert context.episodes is not None
        self.send("run", group.key, workflow.key, data, place, len(context.episodes), deadline)
        return group

    # -- what the process sends --------------------------------------------------------------------

    def _on_ready(self, ready: bool = True) -> None:
        if not self._ready.done():
            self._ready.set_result(ready)

    def _on_generate(self, call_id: int, key: int | None, member_idx: int, call: CallRequest) -> None:
        group = None if key is None else self.groups.get(key)
        prefix = None if group is None else group.prompt(call)
        request = ModelRequest(
            input_ids=call.ids if prefix is None else prefix.tolist(),
            gconfig=call.gconfig,
            rid=call.rid,
            metadata={} if call.agent is None else {"agent": call.agent},
            on_tokens=(lambda *tokens: self.send("tokens", call_id, *tokens)) if call.streams else None,
            top_logprobs=call.top_logprobs,
            prefix=prefix,
        )
        context = EpisodeContext() if group is None else group.context(member_idx)
        task = asyncio.get_running_loop().create_task(self._answer(call_id, context, request))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._calls.pop(call_id))

    async def _answer(self, call_id: int, context: EpisodeContext, request: ModelRequest) -> None:
        episode_context.enter(context)
        answer: tuple[Any, ...] | Exception
        try:
            response = await self._engine.agenerate(request)
            answer = tuple(getattr(response, name) for name in RESPONSE_FIELDS)
        except Exception as error:
            answer = _sendable(error)
        self.send("answer", call_id, answer)

    def _on_drop(self, call_id: int) -> None:
        if (task := self._calls.get(call_id)) is not None:
            task.cancel()

    def _on_ended(self, key: int, left: bytes, counts: dict[str, float]) -> None:
        for name, count in counts.items():
            self._shared.counts[name] = self._shared.counts.get(name, 0.0) + count - self._counts.get(name, 0.0)
        self._counts = counts
        group = self.groups.pop(key)
        try:
            group.finish(*pickle.loads(left))
        except Exception as error:  # a workflow returned what cannot be loaded here
            group.finish(False, replace(Failure.of(error), kind=FailureKind.OUTPUT), [])

    def _on_blocked(self) -> None:
        self._shared.blocked_at = time.monotonic()

    def _on_log(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(record.name)
        if target.isEnabledFor(record.levelno):
            target.handle(record)

    # -- its end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Have the process end on its own."""
        self._closing = True
        self.send("close")

    def kill(self) -> None:
        """Kill the process and its group."""
        if self._process is not None:
            self._process.kill()

    def _on_exit(self) -> None:
        """Finish once all that it sent was read; what it left running may hold the connection open."""
        self._exited = True
        if self._transport is None or self._disconnected:
            self._finish()
        else:
            asyncio.get_running_loop().call_later(UNREAD_S, self._transport.abort)

    def _on_disconnect(self) -> None:
        self._disconnected = True
        if self._exited:
            self._finish()
        else:
            asyncio.get_running_loop().call_later(CLOSE_S, self.kill)  # usually it is about to end

    def _finish(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.end = f"worker {self._number} (process {self._process.pid}) {how}"
        failure = Failure(
            FailureKind.WORKER,
            "",
            self.end,
            hint="The system may have run out of memory, or native code crashed: with rollout.agents.isolation: "
            "process that ends one episode instead of all groups of a worker",
        )
        for group in self.groups.values():
            group.finish(False, failure, [])
        for call in self._calls.values():
            call.cancel()
        self._on_ready(False)
        self.ended.set()


def _sendable(error: Exception) -> Exception:
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
        return copy
    except Exception:  # a class whose constructor takes more than a text
        return ServerError(f"{type(error).__name__}: {error}")
