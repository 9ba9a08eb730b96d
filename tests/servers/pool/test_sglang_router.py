"""A router in front of the servers: it gets generations, and only servers with the newest weights are behind it."""

from __future__ import annotations
import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
import orjson
import pytest
from areal_lite.api import InferenceEngineConfig, ModelRequest, RolloutWorkflow
from areal_lite.errors import ConfigError, ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.pool import sglang_router as router
from areal_lite.servers.pool.request_gate import RequestGate, Servers
from areal_lite.servers.pool.server_pool import Server, ServerPool
from tests.rollout.router_stand_in import RouterStandIn
from tests.rollout.scripted import OneTurn, on_a_loop, until
from tests.servers.pool.test_server_faults import accepted, generate, servers
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


class Routed:
    """An engine, its router and the servers behind it."""

    def __init__(self, stack: ExitStack, start_stub: StartStub, start_engine: StartEngine, **config: Any) -> None:
        self.stubs = [start_stub() for _ in range(2)]
        self.router = RouterStandIn()
        self.thread = stack.enter_context(StubThread(self.router))  # type: ignore[arg-type]
        self.engine = start_engine(*self.stubs, router=self.thread.address, **config)

    @property
    def behind_it(self) -> list[int]:
        urls = list(self.router.workers.values())
        return [index for index, stub in enumerate(self.stubs) if f"http://{stub.address}" in urls]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SYNC_S", 0.01)
    monkeypatch.setattr(router, "IDLE_SYNC_S", 0.1)


@pytest.fixture
def routed(stack: ExitStack, start_stub: StartStub, start_engine: StartEngine) -> Routed:
    return Routed(stack, start_stub, start_engine)


class Conversation(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        for turn in range(4):
            await engine.agenerate(ModelRequest(input_ids=[data["row"], turn]))


def test_generations_go_through_the_router_and_all_else_to_the_servers(routed: Routed) -> None:
    assert routed.behind_it == [0, 1]
    routed.engine.update_weights_from_disk("ckpt", 1)
    answers = [generate(routed.engine) for _ in range(4)]
    assert [set(answer.output_versions) for answer in answers] == [{1}] * 4
    assert sorted(routed.router.sent.values()) == [2, 2]
    assert [stub.server.seen["update"] for stub in routed.stubs] == [1, 1]
    figures = routed.engine.server_metrics()
    assert (figures["router/requests"], figures["0/requests"]) == (4, 0)


def test_the_calls_of_an_episode_go_to_one_server(routed: Routed) -> None:
    routed.engine.rollout_batch([{"row": row} for row in range(6)], Conversation)
    prompts = [{request["input_ids"][0] for request in stub.server.requests} for stub in routed.stubs]
    assert prompts[0] | prompts[1] == set(range(6))
    assert not prompts[0] & prompts[1]
    assert all(prompts)


def test_a_stream_passes_through(routed: Routed) -> None:
    tokens: list[int] = []
    request = ModelRequest(input_ids=[1, 2, 3], on_tokens=lambda ids, _: tokens.extend(ids))
    answer = asyncio.run(routed.engine.agenerate(request))
    assert tokens == answer.output_tokens == answer_tokens([1, 2, 3], 0, 8)


def test_a_server_with_outdated_weights_is_taken_out_and_comes_back(routed: Routed) -> None:
    old = routed.stubs[1].server
    old.stays_old = True
    routed.engine.update_weights_from_disk("ckpt", 1)
    answers = [generate(routed.engine) for _ in range(6)]
    assert [set(answer.output_versions) for answer in answers] == [{1}] * 6
    assert routed.behind_it == [0]
    old.stays_old = False
    until(lambda: routed.behind_it == [0, 1])
    assert old.version == "1"


def test_outdated_replies_are_refused_while_the_router_does_not_remove_their_server(routed: Routed) -> None:
    routed.router.frozen = True
    old = routed.stubs[1].server
    old.stays_old = True
    routed.engine.update_weights_from_disk("ckpt", 1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(lambda: [generate(routed.engine) for _ in range(4)])
        until(lambda: old.seen["generate"] > 0)
        old.stays_old = routed.router.frozen = False
        assert [set(answer.output_versions) for answer in running.result(20)] == [{1}] * 4


def test_an_update_that_a_server_refuses_takes_it_out_before_any_request(routed: Routed) -> None:
    refusing = routed.stubs[0].server
    refusing.fail_updates = True
    routed.engine.update_weights_from_disk("ckpt", 1)
    assert [set(generate(routed.engine).output_versions) for _ in range(4)] == [{1}] * 4
    assert refusing.seen["generate"] == 0
    refusing.fail_updates = False
    until(lambda: routed.behind_it == [0, 1])


def test_a_dead_server_costs_no_episode_and_comes_back(routed: Routed) -> None:
    routed.stubs[0].server.dead = True
    assert accepted(routed.engine, 20) == 20
    assert routed.behind_it == [1]
    assert servers(routed.engine)[0].state == "down"
    routed.stubs[0].server.dead = False
    until(lambda: routed.behind_it == [0, 1])
    assert not any(server.unhealthy for server in servers(routed.engine))
    assert accepted(routed.engine, 20) == 20
    assert routed.stubs[0].server.seen["generate"] > 0


def test_a_router_that_restarts_gets_the_servers_again(routed: Routed) -> None:
    routed.thread.call(routed.router.workers.clear)
    assert accepted(routed.engine, 10) == 10
    until(lambda: routed.behind_it == [0, 1])


def test_a_constrained_answer_stays_on_its_server_during_an_update(routed: Routed) -> None:
    for stub in routed.stubs:
        stub.call(lambda stub=stub: setattr(stub.server, "hold", asyncio.Event()))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, routed.engine, regex="a+")
        until(lambda: bool(sum(stub.server.seen["generate"] for stub in routed.stubs)))
        routed.engine.update_weights_from_disk("ckpt", 1)
        for stub in routed.stubs:
            stub.call(lambda stub=stub: stub.server.hold.set())
        assert running.result(10).attempts == 1


def test_a_router_that_stays_away_ends_the_run(start_stub: StartStub, start_engine: StartEngine) -> None:
    with ExitStack() as until_it_dies:
        routed = Routed(until_it_dies, start_stub, start_engine, faults={"outage_patience_s": 1.0})
    begin = time.monotonic()
    reason = "unusable for 1 s: .*Cannot connect to host"
    with pytest.raises(ServerError, match=f"the router http://{routed.thread.address} was {reason}"):
        routed.engine.rollout_batch([{}], OneTurn)
    assert time.monotonic() - begin < 10


def test_an_address_without_a_router_fails_the_start(
    stack: ExitStack, start_stub: StartStub, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "START_TIMEOUT_S", 1.0)
    stub = start_stub()
    with pytest.raises(ServerError, match="is not ready: .* said HTTP 404.*is it sglang-router"):
        start_engine(stub, router=stub.address)


def test_a_router_with_other_servers_fails_the_start(
    stack: ExitStack, start_stub: StartStub, start_engine: StartEngine
) -> None:
    stand_in = RouterStandIn()
    stand_in.workers["a"] = "http://10.0.0.9:30000"
    thread = stack.enter_context(StubThread(stand_in))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sends requests to http://10.0.0.9:30000, which is not in rollout.addresses"):
        start_engine(start_stub(), router=thread.address)


def test_a_request_that_is_refused_makes_no_server_suspect(routed: Routed) -> None:
    for stub in routed.stubs:
        stub.server.fault = lambda number: "400"
    asked = [stub.server.seen["info"] for stub in routed.stubs]
    with pytest.raises(ConfigError, match="scheduled 400"):
        generate(routed.engine)
    assert [stub.server.seen["info"] for stub in routed.stubs] == asked


def test_an_interrupted_episode_is_aborted_on_its_server_also_if_another_is_dead(routed: Routed) -> None:
    dead, busy = routed.stubs
    dead.server.refuses.add("/abort_request")
    routed.router.sent[f"http://{dead.address}"] = 1  # the other gets the next request
    busy.call(lambda: setattr(busy.server, "hold", asyncio.Event()))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(routed.engine.rollout_batch, [{}], OneTurn)
        busy.until_held(1)
        (episode,) = [call.episode for call in routed.engine._client._calls if call.episode is not None]
        assert routed.engine._loop is not None
        routed.engine._loop.call(routed.engine._client.interrupt([episode]))
        assert len(episode.calls[0].output_tokens) == 4  # half of the answer, kept
        routed.engine.fail(ServerError("the end"))
        with pytest.raises(ServerError, match="the end"):
            running.result(10)


def test_a_parameter_that_the_router_drops_is_an_error(routed: Routed) -> None:
    with pytest.raises(ConfigError, match="does not pass on the sampling parameter 'logit_bias'"):
        generate(routed.engine, logit_bias={5: 1.0})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"backend": "vllm", "addresses": ["a:1"]}, "rollout.backend is vllm"),
        ({"backend": "embedded", "addresses": ["a:1"]}, "rollout.backend is embedded"),
        ({"backend": "sglang"}, "rollout.router is set and rollout.addresses is empty"),
        ({"backend": "sglang", "addresses": ["a:1"], "weight_update": "adapter"}, "weight_update is adapter"),
    ],
)
def test_impossible_settings_are_errors(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        InferenceEngineConfig(router="b:1", **settings)


class Discovered(Routed):
    """An engine whose only address is the router."""

    def __init__(self, stack: ExitStack, start_stub: StartStub, **config: Any) -> None:
        self.stubs = [start_stub() for _ in range(2)]
        self.router = RouterStandIn()
        self.router.workers = {str(index): f"http://{stub.address}" for index, stub in enumerate(self.stubs)}
        self.thread = stack.enter_context(StubThread(self.router))  # type: ignore[arg-type]
        settings = InferenceEngineConfig(backend="sglang", addresses=[self.thread.address], **config)
        self.engine = stack.enter_context(RemoteInfEngine(settings))


def test_adapters_are_refused_behind_a_router_that_an_address_names(stack: ExitStack, start_stub: StartStub) -> None:
    with pytest.raises(ConfigError, match="is a router, and rollout.weight_update is adapter"):
        Discovered(stack, start_stub, weight_update="adapter")


def test_an_address_of_a_router_stands_for_the_servers_behind_it(stack: ExitStack, start_stub: StartStub) -> None:
    routed = Discovered(stack, start_stub)
    routed.engine.update_weights_from_disk("ckpt", 1)
    assert [stub.server.seen["update"] for stub in routed.stubs] == [1, 1]
    assert [set(generate(routed.engine).output_versions) for _ in range(4)] == [{1}] * 4
    assert sorted(routed.router.sent.values()) == [2, 2]
    assert {server.url for server in routed.engine.servers} == {f"http://{stub.address}" for stub in routed.stubs}
    routed.engine.rollout_batch([{"row": row} for row in range(6)], Conversation)
    prompts = [{one["input_ids"][0] for one in stub.server.requests[2:]} for stub in routed.stubs]
    assert prompts[0] | prompts[1] == set(range(6)) and not prompts[0] & prompts[1]
    assert set(prompts[0]) and set(prompts[1])


def test_a_server_behind_the_address_of_a_router_serves_the_newest_weights_or_nothing(
    stack: ExitStack, start_stub: StartStub
) -> None:
    routed = Discovered(stack, start_stub)
    old = routed.stubs[1].server
    old.stays_old = True
    routed.engine.update_weights_from_disk("ckpt", 1)
    assert [set(generate(routed.engine).output_versions) for _ in range(4)] == [{1}] * 4
    assert routed.behind_it == [0]
    old.stays_old = False
    until(lambda: routed.behind_it == [0, 1])


@pytest.mark.parametrize(
    ("changes", "beside", "says"),
    [
        ({}, ["127.0.0.1:1"], "is a router, which sends requests to servers of its own: name it alone"),
        ({"workers": {}}, [], "has no servers: start it with --worker-urls"),
        ({"of_worker": {"worker_type": "prefill"}}, [], r"has the server http://10.0.0.9:30000 \(prefill\): use one"),
        ({"workers": {"a": "grpc://10.0.0.9:30000"}}, [], "has the server grpc://10.0.0.9:30000"),
        ({"is_old": True}, [], "is older than sglang-router 0.3"),
    ],
)
def test_an_address_of_a_router_that_cannot_be_used_fails_the_start(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], beside: list[str], says: str
) -> None:
    monkeypatch.setattr(router, "START_TIMEOUT_S", 0.1)
    stand_in = RouterStandIn()
    for name, value in ({"workers": {"a": "http://10.0.0.9:30000"}} | changes).items():
        setattr(stand_in, name, value)
    thread = stack.enter_context(StubThread(stand_in))  # type: ignore[arg-type]
    with pytest.raises((ConfigError, ServerError), match=says):
        RemoteInfEngine(InferenceEngineConfig(backend="sglang", addresses=[thread.address, *beside])).initialize()


class CountingGate(RequestGate):
    """Counts how often all requests were woken."""

    woken = 0

    def wake_all(self) -> None:
        self.woken += 1


class Listed:
    """A router's list, without a router."""

    def __init__(self, count: int = 2) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self.error: Exception | None = None
        self.bad: set[int] = set()
        """Servers that an examination finds to be bad."""
        self.examined: list[int] = []
        self.owned: list[asyncio.Task[Any]] = []
        self.outages: asyncio.Queue[str] = asyncio.Queue()
        addresses = [f"s:{index}" for index in range(count)]
        config = InferenceEngineConfig(
            backend="sglang", addresses=addresses, router="r:1", faults={"outage_patience_s": 0.05}
        )
        self.pool = ServerPool(addresses)
        self.gate = CountingGate(
            router.router_pool("r:1"), patience_s=30.0, on_outage=lambda error: self.outages.put_nowait(str(error))
        )
        self.gate.running = 1
        self.it = router.Router(Servers(config, self.pool, self, self.gate), self)  # type: ignore[arg-type]
        (self.target,) = self.gate.pool.servers

    async def ask(self, server: Server, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        assert server is self.target
        if self.error is not None:
            raise self.error
        if method == "POST":
            assert body is not None
            self.workers[body["url"]] = {"id": f"id-{body['url']}", "url": body["url"]}
        elif method == "DELETE":
            del self.workers[path.removeprefix("/workers/id-")]
        return orjson.dumps({"workers": list(self.workers.values())})

    def own(self, task: asyncio.Task[Any]) -> None:
        self.owned.append(task)

    async def examine(self, server: Server) -> bool:
        self.examined.append(server.index)
        await asyncio.sleep(0)
        return server.index in self.bad


@on_a_loop
async def test_the_routers_list_becomes_that_of_the_servers_that_serve() -> None:
    listed = Listed()
    assert listed.target.is_router
    assert not await listed.it.sync()  # added, and not listed yet
    assert (listed.target.waits, listed.gate.woken) == (1, 1) and not listed.target.usable
    for _ in range(2):
        assert await listed.it.sync()
        assert (listed.target.waits, listed.gate.woken) == (0, 2) and listed.target.usable
    listed.it.failed(listed.target, "one error is no outage")
    assert listed.target.usable and listed.gate.servers_changed.is_set()
    for worker in listed.workers.values():
        worker["is_healthy"] = False
    for _ in range(2):
        assert not await listed.it.sync()
        assert (listed.target.waits, listed.gate.woken) == (1, 3)
    listed.workers["http://s:1"]["is_healthy"] = True
    assert await listed.it.sync()
    assert (listed.target.waits, listed.gate.woken) == (0, 4)
    listed.pool.rest(listed.pool.servers[1], "reset")
    assert not await listed.it.sync()
    assert list(listed.workers) == ["http://s:0"]
    listed.it.failed(listed.target, "reset", at_once=True)
    assert listed.target.reason == "reset"
    changes = listed.gate.woken
    await listed.it.sync()
    assert listed.target.state == "trial" and listed.gate.woken > changes
    listed.it.failed(listed.target, "reset")
    assert listed.target.reason == "reset"


@on_a_loop
async def test_a_server_behind_the_router_is_well_again_after_an_examination() -> None:
    listed = Listed(4)
    resting, good, bad, failed = listed.pool.servers
    listed.bad = {2}
    listed.pool.rest(resting, "reset")
    for server in (good, bad):
        listed.pool.rest(server, "reset")
        listed.pool.set_state(server, "trial")
    listed.pool.failed(failed, "reset")
    await listed.it.update(3)
    assert listed.target.version == 3
    assert listed.examined == [1, 2]
    assert [server.unhealthy for server in listed.pool.servers] == [True, False, True, False]
    assert bad.state == "trial" and good.state != "trial"
    assert list(listed.workers) in (["http://s:1", "http://s:3"], ["http://s:3", "http://s:1"])
    listed.examined.clear()
    assert await asyncio.gather(listed.it.examine(), listed.it.examine()) == [False, False]
    assert listed.examined == [1, 3]  # once for both
    listed.bad = {3}
    listed.error = OSError("reset")
    assert await listed.it.examine()
    assert listed.examined == [1, 3, 1, 3]
    assert len(listed.owned) == 2  # they end with the reconciler


@pytest.mark.parametrize(("error", "reason"), [(OSError("reset"), "reset"), (TimeoutError(), "TimeoutError")])
@on_a_loop
async def test_a_router_that_is_away_for_longer_than_the_patience_is_told_again_and_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(router, "IDLE_SYNC_S", 1000.0)
    listed = Listed()
    await listed.it.sync()  # blocks it: none is listed yet
    listed.error = error
    began = time.monotonic()
    watch = asyncio.create_task(listed.it._watch())
    for count in (1, 2):
        assert (
            await asyncio.wait_for(listed.outages.get(), 20)
            == f"the router http://r:1 was unusable for 0.05 s: {reason}"
        )
        assert time.monotonic() - began >= 0.05 * count
    listed.error = None
    changed = asyncio.Event()
    listed.gate.wake_all = changed.set  # type: ignore[method-assign]
    await asyncio.wait_for(changed.wait(), 10)
    assert listed.target.usable
    watch.cancel()
    await asyncio.wait([watch])


@pytest.mark.parametrize("sound", [False, True])
@on_a_loop
async def test_only_those_who_wait_for_a_router_that_is_away_run_out_of_patience(
    monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    listed = Listed()
    for _ in range(2):
        await listed.it.sync()
    listed.gate.running = int(sound)
    if not sound:
        listed.it.failed(listed.target, "reset", at_once=True)
        listed.error = OSError("reset")
    watching = asyncio.create_task(listed.it._watch())
    for _ in range(5):
        listed.gate.servers_changed.set()
        for _ in range(10):
            await asyncio.sleep(0)
    assert next(seconds) >= 5 and listed.outages.empty()
    watching.cancel()


@pytest.mark.parametrize("reply", [{"workers": 3}, {}, [], {"workers": ["http://s:0"]}])
@on_a_loop
async def test_a_router_without_a_list_of_workers_is_an_error(monkeypatch: pytest.MonkeyPatch, reply: Any) -> None:
    listed = Listed()

    async def ask(*_: object) -> bytes:
        return orjson.dumps(reply)

    monkeypatch.setattr(listed, "ask", ask)
    with pytest.raises(ServerError, match="http://r:1/workers sent no list of workers"):
        await listed.it.sync()
