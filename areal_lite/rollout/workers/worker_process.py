"""The process of one rollout worker: runs whole groups of episodes on an event loop of its own.

``worker_pool`` starts it and sends it groups. To the episodes it is the inference engine: model calls go to the run's
process, which has the servers. Guarantees one answer per group, whatever its code does short of ending the process.
"""

import asyncio
import contextlib
import itertools
import logging.handlers
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.io_struct import ModelRequest, ModelResponse, TokenPrefix
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.trajectory import TaskId
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.vision.image_encoder import with_spans
from areal_lite.errors import ConfigError
from areal_lite.processes import token_socket
from areal_lite.processes.channel import encode_reply, framed, read_message
from areal_lite.processes.child_process import PickledObject, prepare
from areal_lite.rollout import garbage_collection
from areal_lite.rollout.episodes.grouped_rollout import run_group
from areal_lite.rollout.episodes.workflow_resolution import resolve_workflow
from areal_lite.rollout.loop_thread import LoopThread
from areal_lite.rollout.loop_watchdog import LoopWatchdog
from areal_lite.rollout.workers.messages import RESPONSE_FIELDS, PromptPlace, Reader, pack_call, pack_end
from areal_lite.servers.client.answer import continued, own_copy

SEND_S = 600.0  # seconds that the run's process may leave a message unread


class _RunningGroup:
    def __init__(self, key: int, size: int, deadline: float) -> None:
        self.key = key
        self.size = size
        self.deadline = deadline
        self.task: asyncio.Task[None] | None = None
        self.started = self.stopped = False
        self.calls: set[asyncio.Future[tuple[Any, ...]]] = set()
        self._sent: dict[int, tuple[int, list[int], int]] = {}
        """Number, ids and how many of them were sent, of each list that prompts share, by its identity."""

    def unsent(self, prefix: TokenPrefix) -> tuple[list[int], PromptPlace]:
        """Return the ids that the run's process lacks, and what it needs to make the prefix."""
        number, ids, length = self._sent.get(id(prefix.ids), (len(self._sent), prefix.ids, 0))
        self._sent[id(ids)] = (number, ids, max(length, prefix.length))
        return ids[length : prefix.length], (number, prefix.length, prefix.num_accepted)


class WorkerProcess(InferenceEngine):
    """Runs groups until the socket closes or ``close`` arrives; the engine of their episodes."""

    def __init__(
        self, connection: socket.socket, config: InferenceEngineConfig, log_levels: dict[str, int], *, elsewhere: bool
    ) -> None:
        self.config = config
        self._elsewhere = elsewhere
        self.ended = threading.Event()
        self._version = 0
        self._groups: dict[int, _RunningGroup] = {}
        self._by_task: dict[TaskId, _RunningGroup] = {}
        self._workflows: dict[bytes, asyncio.Task[RolloutWorkflow]] = {}
        self._calls: dict[int, tuple[ModelRequest, asyncio.Future[tuple[Any, ...]]]] = {}
        self._call_ids = itertools.count()
        self._shared = SharedResources()
        self._shared.while_blocked.append(lambda *_: self._send("blocked"))
        self._sending = threading.Lock()
        self._sender = connection.dup()
        self._sender.settimeout(SEND_S)
        self._loop = LoopThread("areal-lite-worker")
        logging.getLogger().addHandler(_LogSender(self._send))
        for name, level in log_levels.items():
            logging.getLogger(name).setLevel(level)
        self._watchdog = LoopWatchdog(self._loop, self._shared, self._deadline_of, config.faults.episode_timeout_s)
        garbage_collection.relax()
        self._loop.call(self._connect(connection))

    async def _connect(self, connection: socket.socket) -> None:
        await Reader(self._on_message, self.ended.set).read_from(connection)
        self._send("ready")

    def _send(self, *message: Any, columns: Sequence[bytes] = ()) -> None:
        """Send a message at once, from any thread; the run's process always reads."""
        report = framed(encode_reply(message, columns))
        with self._sending, contextlib.suppress(ConnectionError):
            self._sender.sendall(report)

    def _on_message(self, body: memoryview) -> None:
        kind, *arguments = pickle.loads(body)  # nosec B301 # sent by the run's process
        getattr(self, f"_on_{kind}")(*arguments)

    def _on_workflow(self, sent: PickledObject) -> None:
        loading = asyncio.to_thread(self._load, sent)  # importing its module may take seconds
        self._workflows[sent.key] = asyncio.get_running_loop().create_task(loading)

    def _load(self, sent: PickledObject) -> RolloutWorkflow:
        prepare(sent, elsewhere=self._elsewhere)
        workflow, kwargs = pickle.loads(sent.pickled)  # nosec B301 # sent by the run's process
        return resolve_workflow(workflow, kwargs, self.config)

    def _on_forget_workflows(self) -> None:
        self._workflows.clear()

    def _on_run(
        self, key: int, workflow: bytes, data: bytes, context: dict[str, Any], size: int, seconds: float
    ) -> None:
        group = _RunningGroup(key, size, time.monotonic() + seconds)  # another machine has another clock
        self._groups[key] = self._by_task[context["task_id"]] = group
        run = self._run(group, self._workflows[workflow], data, context)
        group.task = asyncio.get_running_loop().create_task(run)

    def _deadline_of(self, task_id: TaskId) -> float | None:
        group = self._by_task.get(task_id)
        return None if group is None else group.deadline

    def _on_cancel(self, key: int) -> None:
        if (group := self._groups.get(key)) is not None and group.task is not None:
            group.stopped = True
            if group.started:  # a task that is cancelled before its first step would not answer
                group.task.cancel()

    def _on_answer(self, call_id: int, answer: tuple[Any, ...] | Exception) -> None:
        if call_id not in self._calls or (future := self._calls[call_id][1]).done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _on_tokens(self, call_id: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        if call_id not in self._calls or (call := self._calls[call_id])[1].done():
            return
        request, future = call
        assert request.on_tokens is not None
        try:
            request.on_tokens(tokens, logprobs)
        except Exception as error:  # the receiver's error ends the call
            future.set_exception(error)

    def _on_version(self, version: int) -> None:
        self._version = version

    def _on_close(self) -> None:
        async def close() -> None:
            await self._shared.aclose()
            self.ended.set()

        self._closing = asyncio.get_running_loop().create_task(close())

    async def _run(
        self, group: _RunningGroup, loading: asyncio.Task[RolloutWorkflow], data: bytes, context: dict[str, Any]
    ) -> None:
        episodes = [Episode(member_idx=index) for index in range(group.size)]
        episode_context.enter(EpisodeContext(**context, episodes=episodes, episode=episodes[0], shared=self._shared))
        was_stopped, failure = False, None
        group.started = True
        try:
            if group.stopped:
                raise asyncio.CancelledError
            workflow = await asyncio.shield(loading)  # other groups may wait for it, too
            await run_group(workflow, self, pickle.loads(data), episodes, self.config.faults.on_error)  # nosec B301 # sent by the run's process
        except asyncio.CancelledError:
            was_stopped = group.stopped
            if not was_stopped:
                failure = Failure(FailureKind.AGENT, "CancelledError", "the episode cancelled itself")
        except BaseException as error:  # the one place where a group's error becomes data
            failure = Failure.of(error)
        for call in list(group.calls):  # of tasks that its code left behind
            call.cancel()
        try:
            left, columns = pack_end(was_stopped, failure, episodes)
        except Exception as error:  # a workflow returned something beside tensors
            failure = replace(Failure.of(error), kind=FailureKind.OUTPUT)
            left, columns = pack_end(was_stopped, failure, ())
        del self._groups[group.key]
        if self._by_task.get(context["task_id"]) is group:
            del self._by_task[context["task_id"]]
        self._send("ended", group.key, dict(self._shared.counts), left, columns=columns)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        if not self._loop.is_current():
            return await self._loop.acall(self.agenerate(req))
        req = await with_spans(req, self.config)
        context = episode_context.current()
        group = None if context.task_id is None else self._by_task.get(context.task_id)
        prefix = req.prefix or continued(req.input_ids, context.episode)
        ids, place = (req.input_ids, None) if group is None else group.unsent(prefix)
        prompt = prefix.tolist() if req.prefix is None else req.input_ids
        call_id = next(self._call_ids)
        future: asyncio.Future[tuple[Any, ...]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = req, future
        if group is not None:
            group.calls.add(future)
        try:
            packed, columns = pack_call(req, ids, place)
            key = None if group is None else group.key
            self._send("generate", call_id, key, context.member_idx, packed, columns=columns)
            answer = dict(zip(RESPONSE_FIELDS, await future, strict=True))
        except BaseException:
            self._send("drop", call_id)
            raise
        finally:
            del self._calls[call_id]
            if group is not None:
                group.calls.discard(future)
        response = ModelResponse(
            input_tokens=prompt,
            rid=req.rid,
            tokenizer=req.tokenizer,
            metadata=req.metadata,
            images=req.images,
            **answer,
        )
        if context.episode is not None:
            context.episode.calls.append(own_copy(response, prefix))
        return response

    async def cut_short(self, rid: str) -> bool:
        self._send("cut_short", rid)
        return True

    def get_version(self) -> int:
        return self._version

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(
            f"rollout.workers is {self.config.workers}, and in a worker an episode can only generate: call "
            "engine.agenerate() and get_version(), or set rollout.workers: 1"
        )

    submit = wait = rollout_batch = prepare_batch = pause = resume = set_version = _refuse
    asubmit = await_results = arollout_batch = aprepare_batch = apause = aresume = aset_version = _refuse


class _LogSender(logging.handlers.QueueHandler):
    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__(queue=None)  # type: ignore[arg-type]
        self._send = send

    def enqueue(self, record: logging.LogRecord) -> None:
        self._send("log", vars(record))


def main(descriptor: int | None = None) -> None:
    """Serve the socket with this number, or a connection to the run on another machine, until that closes it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a job: the run's process decides
        signal.signal(number, lambda *_: None)
    connection = token_socket.connect() if descriptor is None else socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    with connection.makefile("rb", 0) as unbuffered:  # the event loop reads what follows
        settings = read_message(unbuffered)
    assert settings is not None
    (sent,) = pickle.loads(settings)  # nosec B301 # sent by the run's process
    elsewhere = descriptor is None
    prepare(sent, elsewhere=elsewhere)
    arguments = pickle.loads(sent.pickled)  # nosec B301 # sent by the run's process
    WorkerProcess(connection, *arguments, elsewhere=elsewhere).ended.wait()
    sys.stdout.flush()
    os._exit(0)  # an orderly exit takes seconds where torch is loaded, and waits for threads of episodes
