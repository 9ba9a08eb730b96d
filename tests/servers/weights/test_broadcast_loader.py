"""Weight updates over process groups: what is sent in which order, and that a broken group is never used again."""

from __future__ import annotations
import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
import pytest
from areal_lite.errors import ServerError
from areal_lite.servers.client.server_requests import RefusedError
from areal_lite.servers.dialects.dialect import ControlCall, ServerInfo
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.pool.server_pool import Server
from areal_lite.servers.weights.broadcast_loader import BroadcastLoader
from areal_lite.servers.weights.published_weights import WeightBroadcast, WeightBucket
from tests.rollout.scripted import on_a_loop

JOIN, BEGIN, END = "/init_weights_update_group", "/begin_weight_update", "/end_weight_update"
RECEIVE = "/update_weights_from_distributed"
BUCKETS = [WeightBucket({}), WeightBucket({})]


class Group:
    """The trainer's end of a group; ``work`` may raise or hang."""

    master_address, master_port, size, backend = "host", 5, 2, "gloo"

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.name, self.work, self.closed = name, work, False
        self.sent: list[WeightBucket] = []

    def join(self) -> None:
        self.work()

    def send(self, bucket: WeightBucket) -> None:
        self.work()
        self.sent.append(bucket)

    def close(self) -> None:
        self.closed = True


class Setup:
    """Groups of one server, whose replies are scripted."""

    def __init__(self, *, embedded: bool = False) -> None:
        self.events: list[str] = []
        self.calls: list[ControlCall] = []
        self.errors: dict[str, list[Exception | None]] = {}
        """What the next calls of a path raise."""
        self.hangs: set[str] = set()
        self.left: list[str] = []
        """Paths of hanging calls that were cancelled."""
        self.made: list[Group] = []
        self.work: Callable[[], None] = lambda: None
        self.server = Server("http://host:1", 0)
        self.dialect = SGLang(embedded=embedded)
        self.groups = BroadcastLoader(self, timeout_s=5.0)  # type: ignore[arg-type]

    async def control(self, server: Server, call: ControlCall, *, timeout_s: float | None = None) -> None:
        assert server is self.server and timeout_s in (None, 5.0)
        self.events.append(call.path)
        self.calls.append(call)
        errors = self.errors.get(call.path, [])
        if errors and (error := errors.pop(0)) is not None:
            raise error
        if call.path in self.hangs:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.left.append(call.path)
                raise OSError("the connection was closed") from None

    def open_group(self, host: str, *, num_ranks: int, device: str | None) -> Group:
        self.events.append(f"open {host} {num_ranks} {device}")
        self.made.append(Group(f"g{len(self.made)}", lambda: self.work()))
        return self.made[-1]

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        self.events.append("pause")
        yield
        self.events.append("resume")

    async def load(self, version: int = 3) -> None:
        weights = WeightBroadcast(version, BUCKETS, self)  # type: ignore[arg-type]
        await self.groups.load(self.server, weights, self.paused)

    def take(self) -> list[str]:
        events, self.events[:] = self.events.copy(), []
        return events


def raising(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


@pytest.mark.parametrize("embedded", [False, True])
@on_a_loop
async def test_a_server_joins_once_and_pauses_as_long_as_it_must(embedded: bool) -> None:
    setup = Setup(embedded=embedded)
    setup.server.info = ServerInfo(num_ranks=4 if embedded else None, device="cpu")
    await setup.load()
    sent = [BEGIN, RECEIVE, RECEIVE]
    update = [*sent, "pause", END, "resume"] if embedded else ["pause", *sent, END, "resume"]
    assert setup.take() == [f"open host {4 if embedded else 1} cpu", JOIN, *update]
    versions = [call.body.get("weight_version") for call in setup.calls if call.path == RECEIVE]
    assert versions == [None, "3"]
    await setup.load(4)
    assert setup.take() == update
    (group,) = setup.made
    assert group.sent == BUCKETS * 2 and not group.closed
    await setup.groups.close()
    assert group.closed
    setup.groups.drop(setup.server)
    await setup.load()
    assert len(setup.made) == 2 and not setup.made[1].closed


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("bucket", [1, 2])
@on_a_loop
async def test_a_refused_bucket_ends_the_update_and_the_group(embedded: bool, bucket: int) -> None:
    setup = Setup(embedded=embedded)
    setup.errors[RECEIVE] = [None] * (bucket - 1) + [RefusedError("too large")]
    partly = bucket == 2 and not embedded
    with pytest.raises(
        ServerError, match="too large; it has some of the new weights" if partly else "too large$"
    ) as raised:
        await setup.load()
    assert isinstance(raised.value, RefusedError) != partly
    assert setup.events.count(RECEIVE) == bucket and END not in setup.events
    assert setup.made[0].closed
    await setup.load()
    assert len(setup.made) == 2 and not setup.made[1].closed


@on_a_loop
async def test_a_server_that_left_its_group_joins_a_new_one() -> None:
    for error in (RefusedError("no such group"), OSError("reset")):
        setup = Setup()
        await setup.load()
        setup.errors[RECEIVE] = [error]
        await setup.load()
        assert [group.closed for group in setup.made] == [True, False]
        setup.errors[BEGIN] = [ValueError("a bug")]
        with pytest.raises(ValueError, match="a bug"):
            await setup.load()
        assert len(setup.made) == 2


@on_a_loop
async def test_an_update_that_broke_off_is_abandoned_first() -> None:
    setup = Setup()
    setup.errors = {BEGIN: [RefusedError("in an update")], END: [RefusedError("it lacks weights")]}
    await setup.load()
    assert setup.take()[3:] == [BEGIN, END, BEGIN, RECEIVE, RECEIVE, END, "resume"]


async def threads_ended() -> None:
    """Return once the threads' results have reached the loop."""
    for thread in threading.enumerate():
        if thread.name == "weight broadcast":
            await asyncio.to_thread(thread.join, 10)
    for _ in range(3):
        await asyncio.sleep(0)


@on_a_loop
async def test_the_first_error_of_either_side_ends_both(stray_exceptions: Callable[[], list[str]]) -> None:
    setup = Setup()
    setup.hangs.add(JOIN)
    setup.work = raising(OSError("nobody joined"))
    with pytest.raises(OSError, match="nobody joined"):
        await setup.load()
    await asyncio.sleep(0)
    assert setup.left == [JOIN] and setup.made[0].closed

    setup.hangs.clear()
    released, ended = threading.Event(), threading.Event()

    def late() -> None:
        released.wait(10)
        ended.set()
        raise OSError("closed")

    setup.work = late
    setup.errors[JOIN] = [RefusedError("no more groups")]
    with pytest.raises(RefusedError, match="no more groups"):
        await setup.load()
    assert setup.made[1].closed and not ended.is_set()
    closing = asyncio.create_task(setup.groups.close())
    await asyncio.sleep(0.05)
    assert not closing.done()  # a process that ends while a thread is in a collective would crash
    released.set()
    await closing
    assert ended.is_set()

    def fails_too() -> None:
        raise OSError("mine")

    setup.work = fails_too
    setup.errors[JOIN] = [RefusedError("theirs")]
    with pytest.raises((RefusedError, OSError), match="mine|theirs"):
        await setup.load()
    await threads_ended()
    assert stray_exceptions() == []
