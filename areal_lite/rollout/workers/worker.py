"""One rollout worker, seen from the run: its process, its connection, and the groups that it runs.

Guarantees that each of its groups ends once: with what the process reports, or as failed when the process has ended and
all that it sent was read. Its reports are plain data; what is not a report ends the connection, and with it the worker.
"""

import asyncio
import contextlib
import itertools
import logging
import pickle
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.io_struct import ModelRequest, TokenPrefix
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import RECORDED, EpisodeStatus
from areal_lite.errors import ServerError
from areal_lite.processes.channel import MAX_MESSAGE, BrokenMessageError
from areal_lite.processes.child_process import PickledObject
from areal_lite.processes.place import HERE, Place, Program, how_ended
from areal_lite.rollout.workers import messages

START_S = 120.0
CLOSE_S = 10.0  # seconds for a worker to close what its episodes shared
UNREAD_S = 1.0  # seconds to read what a process that has ended sent
_MAX_WORKFLOWS = 64  # workflows that a worker keeps loaded
_MAX_EPISODES = 100_000  # episodes of a group, as a worker numbers them


class WorkerGroup:
    def __init__(self, key: int, context: EpisodeContext) -> None:
        self.key = key
        self.end: asyncio.Future[tuple[bool, Failure | None]] = asyncio.get_running_loop().create_future()
        """Whether a cancellation ended it, and why it failed."""
        self._context = context
        assert context.episodes is not None
        self._episodes = context.episodes
        self._ids: dict[int, list[int]] = {}  # lists of ids that prompts share, by number

    def member(self, member_idx: int) -> Episode:
        """Return an episode; a workflow may run more of them than were drawn."""
        if not 0 <= member_idx < _MAX_EPISODES:  # the process runs users' code and chooses the number
            raise BrokenMessageError(f"a worker reports of episode {member_idx} of a group")
        while len(self._episodes) <= member_idx:
            self._episodes.append(Episode(member_idx=len(self._episodes), seed_name=self._episodes[0].seed_name))
        return self._episodes[member_idx]

    def context(self, member_idx: int) -> EpisodeContext:
        return self._context._replace(member_idx=member_idx, episode=self.member(member_idx))

    def prompt(self, ids: list[int], number: int, length: int, num_accepted: int) -> TokenPrefix:
        """Return the prompt of a call from its new ids and its :data:`~messages.PromptPlace`."""
        known = self._ids.setdefault(number, [])
        known += ids
        return TokenPrefix(known, length, num_accepted)

    def finish(self, was_stopped: bool, failure: Failure | None, replies: Sequence[messages.EpisodeReply] = ()) -> None:
        """Take over what its episodes left; none if the worker died."""
        for member_idx, reply in enumerate(replies):
            episode, trajectory = self.member(member_idx), reply.trajectory
            for name in RECORDED:
                setattr(episode, name, reply.records[name])
            if trajectory is None:
                continue
            if trajectory.status in (EpisodeStatus.FAILED, EpisodeStatus.CANCELLED) and trajectory.reward is None:
                episode.end(trajectory.status, trajectory.failure)
            else:
                reply.link(trajectory, episode.calls)
                episode.trajectory = trajectory
        if replies:
            del self._episodes[len(replies) :]
        self.end.set_result((was_stopped, failure))


class Worker:
    def __init__(self, number: int, engine: InferenceEngine, shared: SharedResources, place: Place = HERE) -> None:
        self.groups: dict[int, WorkerGroup] = {}
        self.ended = asyncio.Event()  # set once the process has ended and all that it sent was read
        self.end: str  # how it ended, for people
        self._number = number
        self._engine = engine
        self._shared = shared
        self._place = place
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._keys = itertools.count()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._cuts: set[asyncio.Task[bool]] = set()
        self._workflows: set[bytes] = set()
        self._counts: dict[str, float] = {}
        self._process: Program | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._exited = self._disconnected = self._closing = False

    async def open(self, settings: PickledObject) -> bool:
        """Start the process and return whether it is ready; if not, it has ended or will soon."""
        loop = asyncio.get_running_loop()

        def on_end() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(self._on_exit)

        try:
            self._process, connection = await self._place.start_connected(
                "areal_lite.rollout.workers.worker_process", on_end
            )
        except OSError as error:
            self.end = f"worker {self._number} could not be started ({error})"
            self.ended.set()
            return False
        reader = messages.Reader(self._on_message, self._on_disconnect, max_bytes=MAX_MESSAGE)
        self._transport = await reader.read_from(connection)
        if self._exited:  # before it was connected; what it left running may hold the connection open
            self._transport.abort()
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
        return self._ready.done() and self._ready.result() and not self._disconnected

    def send(self, *message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(messages.request(*message))

    def run(self, workflow: PickledObject, data: bytes, context: EpisodeContext, deadline: float) -> WorkerGroup:
        if workflow.key not in self._workflows:
            if len(self._workflows) == _MAX_WORKFLOWS:
                self._workflows.clear()
                self.send("forget_workflows")
            self._workflows.add(workflow.key)
            self.send("workflow", workflow)
        group = WorkerGroup(next(self._keys), context)
        self.groups[group.key] = group
        place = {name: getattr(context, name) for name in ("is_eval", "task_id", "group_id", "version", "reward_key")}
        assert context.episodes is not None
        self.send("run", group.key, workflow.key, data, place, len(context.episodes), deadline - time.monotonic())
        return group

    def _on_message(self, body: memoryview) -> None:
        kind, *arguments = messages.read_report(body)
        if kind not in messages.REPORTS:  # the process runs users' code and chooses the kind
            raise BrokenMessageError(f"a worker reports nothing of the kind {kind!r:.80}")
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_ready(self, ready: bool = True) -> None:
        if not self._ready.done():
            self._ready.set_result(ready)

    def _on_generate(
        self,
        call_id: int,
        key: int | None,
        member_idx: int,
        call: ModelRequest,
        streams: bool,
        place: messages.PromptPlace | None,
    ) -> None:
        group = None if key is None else self.groups.get(key)
        if group is not None and place is not None:
            call.prefix = group.prompt(call.input_ids, *place)
            call.input_ids = call.prefix.tolist()
        if streams:
            call.on_tokens = lambda *tokens: self.send("tokens", call_id, *tokens)
        context = EpisodeContext() if group is None else group.context(member_idx)
        task = asyncio.get_running_loop().create_task(self._answer(call_id, context, call))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._calls.pop(call_id))

    async def _answer(self, call_id: int, context: EpisodeContext, request: ModelRequest) -> None:
        episode_context.enter(context)
        answer: tuple[Any, ...] | Exception
        try:
            response = await self._engine.agenerate(request)
            answer = tuple(getattr(response, name) for name in messages.RESPONSE_FIELDS)
        except Exception as error:
            answer = _sendable(error)
        self.send("answer", call_id, answer)

    def _on_cut_short(self, rid: str) -> None:
        self._cuts.add(task := asyncio.get_running_loop().create_task(self._engine.cut_short(rid)))
        task.add_done_callback(self._cuts.discard)

    def _on_drop(self, call_id: int) -> None:
        if (task := self._calls.get(call_id)) is not None:
            task.cancel()

    def _on_ended(self, key: int, counts: dict[str, float], left: Any, columns: messages.ReadColumns) -> None:
        for name, count in counts.items():
            self._shared.counts[name] = self._shared.counts.get(name, 0.0) + count - self._counts.get(name, 0.0)
        self._counts = counts
        group = self.groups.pop(key)
        try:
            group.finish(*messages.read_end(left, columns))
        except Exception as error:  # its workflow returned what breaks the record
            group.finish(False, replace(Failure.of(error), kind=FailureKind.OUTPUT))

    def _on_blocked(self) -> None:
        self._shared.blocked_at = time.monotonic()

    def _on_log(self, record: logging.LogRecord) -> None:
        target = logging.getLogger(record.name)
        if target.isEnabledFor(record.levelno):
            target.handle(record)

    def close(self) -> None:
        self._closing = True
        self.send("close")

    def kill(self) -> None:
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
        """Note that no message follows; kill the process if it does not end."""
        self._disconnected = True
        if self._exited:
            self._finish()
        else:
            asyncio.get_running_loop().call_later(CLOSE_S, self.kill)  # usually it is about to end

    def _finish(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        assert code is not None
        self.end = f"worker {self._number} (process {self._process.pid}{self._place.where}) {how_ended(code)}"
        failure = Failure(
            FailureKind.WORKER,
            "",
            self.end,
            hint="The system may have run out of memory, or native code crashed: with rollout.agents.isolation: "
            "process that ends one episode instead of all groups of a worker",
        )
        for group in self.groups.values():
            group.finish(False, failure)
        for call in self._calls.values():
            call.cancel()
        self._on_ready(False)
        self.ended.set()


def _sendable(error: Exception) -> Exception:
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))  # nosec B301 # our own copy
        return copy
    except Exception:  # a class whose constructor takes more than a text
        return ServerError(f"{type(error).__name__}: {error}")
