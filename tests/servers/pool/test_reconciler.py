"""How servers are repaired, examined and waited for; their replies are scripted."""

from __future__ import annotations
import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.api import InferenceEngineConfig
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.server_requests import RefusedError
from areal_lite.servers.dialects import Dialect, dialect_of
from areal_lite.servers.dialects.dialect import ControlCall, ErrorReply, ServerInfo, ServerLimits
from areal_lite.servers.pool import reconciler as module
from areal_lite.servers.pool.reconciler import Reconciler
from areal_lite.servers.pool.request_gate import Holder, RequestGate, Servers, failures_of
from areal_lite.servers.pool.server_pool import Server, ServerPool
from areal_lite.servers.weights.published_weights import WeightFolder
from tests.rollout.scripted import on_a_loop

LOAD = "/update_weights_from_disk"


class Requests:
    """Answers at once, as scripted."""

    dialect: Dialect

    def __init__(self) -> None:
        self.infos: list[ServerInfo | Exception] = []
        """What the next servers that are asked report."""
        self.healthy: list[bool] = []
        self.asked: Counter[str] = Counter()
        self.errors: dict[str, Exception] = {}
        """By path, or by URL with path."""
        self.hangs = ""
        """The server whose loads never end."""
        self.given_up: list[str] = []
        self.limits = ServerLimits()

    async def info(self, server: Server) -> ServerInfo:
        self.asked["info"] += 1
        found = self.infos.pop(0) if self.infos else ServerInfo(version=3)
        if isinstance(found, Exception):
            raise found
        return found

    async def control(self, server: Server, call: ControlCall, *, timeout_s: float | None = None) -> None:
        self.asked[call.path] += 1
        if call.path == LOAD and server.url == self.hangs:
            await asyncio.Event().wait()
        if error := self.errors.get(call.path) or self.errors.get(server.url + call.path):
            raise error

    async def is_healthy(self, server: Server) -> bool:
        self.asked["health"] += 1
        return self.healthy.pop(0)

    def give_up(self, server: Server, reason: str) -> None:
        self.given_up.append(f"{server.url} {reason}")


class ScriptedGate(RequestGate):
    """Counts pauses, and calls ``on_change`` with servers that are back."""

    pauses = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.changed: list[Server] = []
        self.on_change: Callable[[Server], None] = self.changed.append

    def hold(self, holder: Holder) -> None:
        self.pauses += 1

    def server_changed(self, server: Server) -> None:
        self.on_change(server)


class Setup:
    def __init__(self, count: int = 1, backend: Any = "sglang", **config: Any) -> None:
        addresses = [f"s:{index}" for index in range(count)]
        self.pool, self.requests = ServerPool(addresses), Requests()
        self.server = self.pool.servers[0]
        self.outages: list[str] = []
        self.gate = ScriptedGate(self.pool, patience_s=30.0, on_outage=lambda error: self.outages.append(str(error)))
        self.gate.running = 1
        settings = InferenceEngineConfig(backend=backend, addresses=addresses, **config)
        self.requests.dialect = dialect_of(backend)
        self.it = Reconciler(Servers(settings, self.pool, self.requests, self.gate))  # type: ignore[arg-type]
        self.loader = self.it._loader

    async def repaired(self) -> None:
        while self.it._tasks:
            await asyncio.wait(self.it._tasks.values())
            await asyncio.sleep(0)


def test_an_outage_is_told_every_ten_seconds_and_ends_after_the_patience(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(2)

    def look(now: float) -> bool:
        return setup.gate.watch_outage(setup.pool.servers, now, updating=setup.loader.updating)

    assert not look(50.0)
    for server in setup.pool.servers:
        assert not setup.loader.updating
        setup.pool.rest(server, "reset")
    caplog.clear()

    def said() -> list[str]:
        messages, _ = caplog.messages.copy(), caplog.clear()
        return messages

    for at, seconds in ((100.0, None), (109.0, None), (110.0, 10), (119.0, None), (120.0, 20), (129.0, None)):
        assert look(at)
        found = said()
        assert [line.split(":")[0] for line in found] == (
            [] if seconds is None else [f"no inference server was healthy for {seconds} s; the run ends after 30 s"]
        )
        assert not setup.outages
    assert look(130.0)
    why = "http://s:0: reset; http://s:1: reset"
    assert setup.outages == [f"no inference server was healthy for 30 s: {why}"]
    assert look(131.0) and look(160.0) and len(setup.outages) == 1
    assert look(161.0) and len(setup.outages) == 2  # a new wait
    look(170.0)
    setup.gate.running = 0
    assert look(250.0) and len(setup.outages) == 2
    setup.gate.running = 1
    assert look(251.0) and look(280.0) and len(setup.outages) == 2
    setup.loader.updating = True
    assert look(290.0) and len(setup.outages) == 2
    setup.loader.updating = False
    assert look(300.0)
    setup.pool.set_state(setup.server, "trial")
    setup.pool.recovered(setup.server)
    assert look(340.0) and len(setup.outages) == 2  # one serves, the other is watched
    for server in setup.pool.servers:
        setup.pool.set_state(server, "trial")
        setup.pool.recovered(server)
    assert not look(341.0)
    for server in setup.pool.servers:
        setup.pool.set_state(server, "slow", "silent")
    assert look(342.0) and look(400.0) and len(setup.outages) == 2  # slow servers answer
    setup.pool.rest(setup.server, "reset")
    assert look(410.0) and look(480.0) and len(setup.outages) == 2  # the other does


@pytest.mark.parametrize(("count", "end"), [(3, "http://s:2: no answer yet"), (4, "; and 1 more")])
def test_the_reasons_of_three_servers_are_told(count: int, end: str) -> None:
    setup = Setup(count)
    setup.server.last_failure = "reset"
    setup.pool.set_state(setup.pool.servers[1], "behind", "old")
    why = "http://s:0: reset; http://s:1: old; http://s:2: no answer yet"
    assert failures_of(setup.pool.servers).startswith(why) and failures_of(setup.pool.servers).endswith(end)


def silent(server: Server, seconds: float = 100.0) -> None:
    server.outstanding, server.busy_since = 1, time.monotonic() - seconds


def test_silence_begins_with_the_first_request_or_the_last_answer() -> None:
    server = Server("s", 0)
    assert module._silent_s(server) == 0.0
    silent(server)
    assert 100 <= module._silent_s(server) < 160
    server.heard = time.monotonic() - 50
    assert 50 <= module._silent_s(server) < 100


@pytest.mark.parametrize(
    ("healthy", "probes", "state"), [([True], 1, "slow"), ([False, True], 2, "slow"), ([False, False], 2, "down")]
)
@on_a_loop
async def test_a_silent_server_is_slow_if_its_health_route_answers(
    healthy: list[bool], probes: int, state: str
) -> None:
    setup = Setup()
    silent(setup.server)
    setup.requests.healthy = healthy
    setup.requests.errors["/continue_generation"] = OSError("reset")
    await setup.it._examine(setup.server)
    assert setup.requests.asked == {"health": probes, "/continue_generation": probes}
    assert setup.server.state == state
    assert setup.requests.given_up == (["http://s:0 the server hangs"] if state == "down" else [])
    if state == "down":
        assert "no answer to its health probes" in setup.server.last_failure
        silent(setup.server)
        setup.requests.healthy = [True]
        await setup.it._examine(setup.server)
        assert setup.server.state == "down"


@on_a_loop
async def test_a_server_that_answers_meanwhile_is_not_slow() -> None:
    setup = Setup()
    silent(setup.server, 1.0)
    setup.requests.healthy = [True]
    await setup.it._examine(setup.server)
    assert (setup.server.state, setup.requests.asked["health"]) == ("up", 1)


@pytest.mark.parametrize(
    ("status", "fatal"),
    [(404, True), (499, True), (408, False), (429, False), (500, False), (503, False), (None, False)],
)
@on_a_loop
async def test_a_server_is_met_again_unless_it_speaks_another_protocol(status: int | None, fatal: bool) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    setup = Setup(request_retries=7)
    error = OSError() if status is None else ErrorReply(status, "the server said")
    setup.requests.infos = [error] * 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.asyncio, "sleep", sleep)
        with pytest.raises(ConfigError, match="the server said: it does not speak") if fatal else nullcontext():
            said = await setup.it._meet(setup.server)
            assert said == ("http://s:0: OSError" if status is None else "the server said")
            assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 1.6, 1.6] and setup.requests.asked["info"] == 7
            setup.requests.infos = [error]
            assert await setup.it._meet(setup.server) is None


@on_a_loop
async def test_a_server_without_control_routes_may_be_met_and_a_paused_one_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup()
    setup.requests.errors["/continue_generation"] = RefusedError("no such route")
    setup.requests.infos = [ServerInfo(paused=True), ServerInfo(paused=False)]
    for _ in range(2):
        assert await setup.it._meet(setup.server) is None
        assert caplog.messages == ["server http://s:0 is paused: resuming it"]
    assert setup.requests.asked["/continue_generation"] == 2


class Group:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("down", "reports", "loads"), [(False, 0, 1), (True, 3, 0), (True, 0, 1), (True, None, 1)])
@on_a_loop
async def test_a_server_is_compared_and_leaves_its_group_only_if_it_was_down(
    down: bool, reports: int | None, loads: int
) -> None:
    setup = Setup()
    await setup.it.update_weights(WeightFolder("folder", 3))
    setup.requests.asked.clear()
    setup.requests.infos = [OSError("reset"), ServerInfo(version=reports)] if down else []
    group = setup.loader.broadcasts._groups[setup.server] = Group()  # type: ignore[assignment]
    if down:
        setup.it.failed(setup.server, "reset", at_once=True)
    else:
        setup.it.behind(setup.server, "old")
    assert not setup.server.usable
    await setup.repaired()
    assert (setup.requests.asked["info"], setup.requests.asked[LOAD]) == (2 if down else 0, loads)
    assert group.closed == down
    assert setup.gate.changed == [setup.server] and setup.server.state == "trial" and setup.server.version == 3
    if not down:  # a second time in a row it rests
        setup.it.behind(setup.server, "old again")
        assert (setup.server.state, setup.server.reason) == ("down", "old again")
        await setup.it.close()
        assert group.closed and not setup.it._others


@on_a_loop
async def test_a_server_that_fails_before_the_first_update_needs_no_weights() -> None:
    setup = Setup()
    setup.requests.infos = [OSError(), ServerInfo(version=0)]
    for _ in range(3):
        assert not setup.it._tasks
        setup.it.failed(setup.server, "reset")
    assert setup.it._wake.is_set()  # the watch looks more often now
    await setup.repaired()
    assert setup.server.state == "trial" and setup.requests.asked == {"info": 2, "/continue_generation": 1}
    setup.it.failed(setup.server, "reset")  # on trial, so once is enough
    await setup.repaired()
    assert setup.requests.asked["info"] == 3


@on_a_loop
async def test_a_server_that_fails_again_at_the_end_of_its_repair_is_repaired_again() -> None:
    setup = Setup()

    def fail_again(server: Server) -> None:
        setup.gate.changed.append(server)
        if len(setup.gate.changed) == 1:
            setup.it.failed(server, "reset", at_once=True)
        elif len(setup.gate.changed) == 2:
            setup.pool.set_state(server, "behind", "old")

    setup.gate.on_change = fail_again
    setup.it.failed(setup.server, "reset", at_once=True)
    await setup.repaired()
    assert len(setup.gate.changed) == 3 and setup.server.state == "trial"


@on_a_loop
async def test_a_server_that_is_away_at_the_start_is_repaired_and_all_are_watched() -> None:
    setup = Setup(2, request_retries=1)
    setup.requests.infos = [OSError("reset"), ServerInfo()]
    await setup.it.open()
    assert [server.reason for server in setup.pool.servers] == ["http://s:0: reset", ""]
    assert len(setup.it._others) == 1
    await setup.repaired()
    assert setup.pool.servers[0].state == "trial"
    await setup.it.close()
    await asyncio.sleep(0)
    assert not setup.it._others
    setup = Setup(2, request_retries=1)
    setup.requests.infos = [OSError("reset"), OSError("refused")]
    with pytest.raises(ServerError, match=r"answers: http://s:0: reset; http://s:1: refused\. Are they up"):
        await setup.it.open()


@pytest.mark.parametrize(
    ("info", "bad", "state"),
    [
        (ServerInfo(version=3), False, "up"),
        (ServerInfo(version=None), False, "up"),
        (ServerInfo(version=2), True, "behind"),
        (OSError(), True, "down"),
        (ErrorReply(500, "oops"), True, "down"),
    ],
)
@on_a_loop
async def test_an_examined_server_is_bad_if_it_does_not_answer_or_has_other_weights(
    info: Any, bad: bool, state: str
) -> None:
    setup = Setup()
    setup.requests.infos = [ServerInfo(version=7)]
    assert not await setup.it.examine(setup.server)  # any weights will do before the first update
    await setup.it.update_weights(WeightFolder("folder", 3))
    setup.requests.infos = [info]
    assert await setup.it.examine(setup.server) == bad
    assert setup.server.state == state
    assert setup.server.last_failure == {"down": "oops" if isinstance(info, ErrorReply) else "OSError"}.get(state, "")
    if state == "behind":
        assert setup.server.reason == "it acknowledged version 3 and reports version 2"
    await setup.it.close()


@on_a_loop
async def test_an_update_that_all_refuse_leaves_the_servers_as_they_were() -> None:
    setup = Setup(2)
    assert setup.requests.limits.newest_version == 0
    await setup.it.update_weights(WeightFolder("first", 0))
    assert (setup.requests.limits.newest_version, setup.gate.pauses) == (0, 2)
    await setup.it.update_weights(WeightFolder("second", 3))
    assert setup.requests.limits.newest_version == 3 and len(setup.loader._loaded) == 2
    setup.requests.errors[LOAD] = RefusedError("no such folder")
    with pytest.raises(ServerError, match="no server took policy version 2 from third: no such folder$"):
        await setup.it.update_weights(WeightFolder("third", 2))
    assert setup.requests.limits.newest_version == 3 and not setup.loader.updating
    assert [(s.version, s.usable, setup.loader.has_newest(s)) for s in setup.pool.servers] == [(3, True, True)] * 2
    assert setup.requests.asked["/continue_generation"] == setup.requests.asked["/pause_generation"] == 6
    assert not setup.it._tasks and not setup.it._others


@pytest.mark.parametrize("repaired", [True, False])
@on_a_loop
async def test_an_update_that_no_server_takes_in_time_fails_with_the_reason(
    repaired: bool, caplog: pytest.LogCaptureFixture
) -> None:
    setup = Setup(faults={"outage_patience_s": 30.0})
    setup.requests.errors[LOAD] = OSError("reset")
    if not repaired:
        setup.pool.rest(setup.server, "reset")
    with pytest.MonkeyPatch.context() as patch:
        seconds = itertools.count()
        patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
        patch.setattr(module, "WATCH_S", 0)
        with pytest.raises(ServerError, match="no server took policy version 1 from f for 30 s: http://s:0: .*reset"):
            await setup.it.update_weights(WeightFolder("f", 1))
        assert next(seconds) == 32  # the beginnings of both waits, and 30
    lines = [line for line in caplog.messages if line.startswith("no server took policy version 1 from f for ")]
    assert [line.partition(" f for ")[2][:4] for line in lines] == ["10 s", "20 s"]
    assert not setup.loader.updating and bool(setup.it._tasks) == repaired
    await setup.it.close()
    assert not setup.it._tasks


@pytest.mark.parametrize(("error", "reason"), [(OSError("reset"), "reset"), (OSError(), "OSError")])
@on_a_loop
async def test_only_servers_that_fail_an_update_are_behind(error: Exception, reason: str) -> None:
    setup = Setup(3)
    good, bad, away = setup.pool.servers
    await setup.it.update_weights(WeightFolder("old", 1))
    setup.pool.rest(away, "away")
    setup.requests.errors[bad.url + LOAD] = error
    await setup.it.update_weights(WeightFolder("new", 2))
    assert [server.reason for server in setup.pool.servers] == ["", f"version 2 failed to load: {reason}", "away"]
    assert good.state == "up" and list(setup.loader._loaded) == [good]  # the old weights are freed
    await setup.it.close()


@on_a_loop
async def test_an_update_leaves_a_server_behind_that_takes_far_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRAGGLER_S", 0.0)
    setup = Setup(2)
    setup.requests.hangs = "http://s:1"
    await setup.it.update_weights(WeightFolder("folder", 1))
    reason = "version 1 failed to load: it takes far longer than on other servers"
    assert [server.last_failure for server in setup.pool.servers] == ["", ""]
    assert [server.reason for server in setup.pool.servers] == ["", reason]
    assert [setup.loader.has_newest(server) for server in setup.pool.servers] == [True, False]
    await setup.it.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@on_a_loop
async def test_an_update_does_not_wait_for_a_server_that_is_behind_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRAGGLER_S", 1000.0)
    setup = Setup(2)
    good, late = setup.pool.servers
    setup.requests.hangs = late.url
    setup.loader.want(WeightFolder("first", 1))
    setup.it.behind(late, "old")
    async with asyncio.timeout(10):
        await setup.it.update_weights(WeightFolder("second", 2))
    assert (good.state, late.state, late.reason) == ("up", "behind", "old")
    await setup.it.close()


@pytest.mark.parametrize(
    ("error", "seconds", "given_up"), [(TimeoutError(), 100.0, 1), (TimeoutError(), 30.0, 0), (OSError(), 100.0, 0)]
)
@on_a_loop
async def test_a_silent_server_that_leaves_a_repair_unanswered_loses_its_requests(
    error: Exception, seconds: float, given_up: int
) -> None:
    """Nobody examines a server that is repaired."""
    setup = Setup()
    setup.requests.infos = [error]
    silent(setup.server, seconds)
    setup.it.failed(setup.server, "reset", at_once=True)
    await setup.repaired()
    assert setup.requests.given_up == ["http://s:0 the server hangs"] * given_up


@on_a_loop
async def test_an_update_that_is_cancelled_loads_no_longer() -> None:
    setup = Setup()
    setup.requests.hangs = setup.server.url
    update = asyncio.create_task(setup.it.update_weights(WeightFolder("folder", 1)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert setup.requests.asked[LOAD] == 1
    update.cancel()
    await asyncio.wait([update, *setup.it._others], timeout=5)
    assert update.cancelled() and not setup.loader.updating
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("what", "examined"), [("", 1), ("quick", 0), ("repaired", 0), ("updating", 0)])
@on_a_loop
async def test_only_silent_servers_that_nobody_repairs_are_examined(what: str, examined: int) -> None:
    setup = Setup()
    silent(setup.server, 30.0 if what == "quick" else 100.0)
    setup.loader.updating = what == "updating"
    if what == "repaired":
        setup.it._begin(setup.server, asyncio.Event().wait())  # type: ignore[arg-type]
    watch = asyncio.create_task(setup.it._watch())
    for turn in (1, 2):
        setup.requests.healthy = [True]
        setup.it._wake.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert setup.requests.asked["health"] == examined * turn
        assert not setup.it._wake.is_set()
    watch.cancel()
    await asyncio.wait([watch])
    await setup.it.close()


@pytest.mark.parametrize("differs", [True, False])
@on_a_loop
async def test_servers_are_watched_closely_while_one_is_not_well(
    monkeypatch: pytest.MonkeyPatch, differs: bool
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.0 if differs else 1000.0)
    monkeypatch.setattr(module, "IDLE_WATCH_S", 1000.0 if differs else 0.0)
    setup, looks = Setup(), asyncio.Semaphore(0)

    def look(servers: Any, now: float, *, updating: bool) -> bool:
        looks.release()
        return differs

    monkeypatch.setattr(setup.gate, "watch_outage", look)
    watch = asyncio.create_task(setup.it._watch())
    async with asyncio.timeout(10):
        for _ in range(3):
            await looks.acquire()
    watch.cancel()
    await asyncio.wait([watch])


@pytest.mark.parametrize(
    ("backend", "hint"),
    [
        ("sglang", "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj o_proj"),
        ("vllm", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 --enable-lora --max-lora-rank 8 --max-loras 4 --max-cpu-loras 16"),
        ("embedded", None),
    ],
)
def test_servers_that_refuse_adapters_are_told_how_to_start(backend: str, hint: str | None) -> None:
    setup = Setup(backend=backend)
    weights = WeightFolder("folder", 3, AdapterShape(8, ("q_proj", "o_proj")))
    said = f". Adapters need servers that were started with {hint}" if hint else ""
    assert setup.loader.hint(weights) == said
    assert setup.loader.hint(WeightFolder("folder", 3)) == ""
