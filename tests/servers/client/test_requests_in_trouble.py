"""Requests while a server is full, hangs, refuses a name, or holds generation; and what each of a run's calls draws."""

from __future__ import annotations
import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
import orjson
import pytest
from aiohttp import web
from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    ModelRequest,
    ModelResponse,
    episode_context,
)
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.dialects.dialect import ControlCall
from areal_lite.servers.pool import reconciler, server_pool
from tests.rollout.scripted import until
from tests.stub_server import StubServer, StubThread


@contextmanager
def engine_of(*stubs: StubThread, **settings: Any) -> Iterator[RemoteInfEngine]:
    config = {"backend": "sglang", "addresses": [stub.address for stub in stubs], "dump_to_file": False}
    with RemoteInfEngine(InferenceEngineConfig(**(config | settings))) as engine:
        yield engine


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def request() -> ModelRequest:
    return ModelRequest(input_ids=[1, 2, 3], gconfig=GenerationHyperparameters(max_new_tokens=8))


def ask(threads: ThreadPoolExecutor, engine: RemoteInfEngine, asked: ModelRequest) -> Future[ModelResponse]:
    return threads.submit(engine.running_loop.call, engine._client.generate(asked))


def hold(stub: StubThread) -> None:
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))


def let_go(stub: StubThread) -> None:
    stub.call(lambda: stub.server.hold.set())


def test_an_update_reaches_a_server_whose_connections_are_all_busy(threads: ThreadPoolExecutor) -> None:
    with StubThread(StubServer()) as stub, engine_of(stub, faults={"max_connections_per_server": 2}) as engine:
        hold(stub)
        answers = [ask(threads, engine, request()) for _ in range(4)]
        until(lambda: stub.server.seen["generate"] == 2)
        update = threads.submit(engine.update_weights_from_disk, "x", 1)
        until(lambda: stub.server.seen["pause"] == 1)
        let_go(stub)
        update.result(20)
        assert [answer.result(20).output_len for answer in answers] == [8] * 4


class LiveNames(StubServer):
    """As SGLang: the id of a request whose client has left is refused until the server notices."""

    live: set[str] = set()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        rid = orjson.loads(await request.read())["rid"]
        if rid in self.live:
            return web.json_response({"error": {"message": f"Duplicate request ID detected: {rid}"}}, status=400)
        self.live.add(rid)
        if len(self.live) == 1:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return await super().generate(request)


def test_a_request_that_is_sent_again_has_another_name(threads: ThreadPoolExecutor) -> None:
    with StubThread(LiveNames()) as stub, engine_of(stub) as engine:
        asked = request()
        answer = ask(threads, engine, asked).result(20)
        assert (answer.output_len, answer.attempts, answer.rid) == (8, 2, asked.rid)
        assert len(LiveNames.live) == 2


def test_a_client_that_leaves_while_generation_is_held_ends_its_call(threads: ThreadPoolExecutor) -> None:
    with StubThread(StubServer()) as stub, engine_of(stub) as engine:
        engine.pause()
        asked = request()
        answer = ask(threads, engine, asked)
        until(lambda: engine._client._calls)
        engine.running_loop.call(engine._client.cut_short(asked.rid))
        assert (answer.result(20).stop_reason, stub.server.seen["generate"]) == ("abort", 0)


def test_a_server_on_trial_with_a_long_first_answer_is_slow_and_no_outage(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "WATCH_S", 0.02)
    monkeypatch.setattr(reconciler, "SILENCE_S", 0.1)
    monkeypatch.setattr(server_pool, "FIRST_REST_S", 0.02)
    stub = StubThread(StubServer(fault=lambda number: "503" if number < 3 else None))
    with stub, engine_of(stub, faults={"outage_patience_s": 10.0}) as engine:
        hold(stub)
        answers = [ask(threads, engine, request()) for _ in range(3)]
        until(lambda: engine.servers[0].state == "slow" and engine.servers[0].outstanding == 3)
        let_go(stub)
        assert [answer.result(20).output_len for answer in answers] == [8] * 3


class Renders(StubServer):
    status = 200

    def app(self) -> web.Application:
        async def render(request: web.Request) -> web.Response:
            return web.json_response({}, status=self.status)

        app = super().app()
        app.router.add_post("/render", render)
        return app


def test_a_render_route_that_fails_is_a_failure_of_its_server(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StubThread(Renders()) as broken, StubThread(Renders()) as sound, engine_of(broken, sound) as engine:
        broken.server.status = 500  # type: ignore[attr-defined]
        dialect = engine._client.requests.dialect
        monkeypatch.setattr(dialect, "images_call", lambda call: ControlCall("/render", {}))
        monkeypatch.setattr(dialect, "with_features", lambda body, call, features: body)
        assert [ask(threads, engine, request()).result(20).output_len for _ in range(6)] == [8] * 6
        assert broken.server.seen["generate"] == 0 < engine.servers[0].failed_requests
        assert [url for url, *_ in engine.probe([1, 2], 2)] == [f"http://{sound.address}"]


def test_an_engine_that_starts_again_watches_its_servers() -> None:
    with StubThread(StubServer()) as stub:
        engine = RemoteInfEngine(InferenceEngineConfig(backend="sglang", addresses=[stub.address], dump_to_file=False))
        for _ in range(2):
            with engine:
                watched = engine._client._reconciler
                engine.running_loop.call(asyncio.sleep(0))
                assert not watched._closed and len(watched._others) == 1


def test_each_call_of_an_episode_has_its_own_seed_also_those_to_the_older_policy() -> None:
    settings = {"backend": "embedded", "seed": 1}
    with StubThread(StubServer()) as stub, StubThread(StubServer()) as older_stub:
        with engine_of(stub, **settings) as engine, engine_of(older_stub, **settings) as older:
            engine.older = older

            async def main() -> None:
                episode = Episode(seed_name="group")
                episode_context.enter(EpisodeContext(episode=episode, episodes=[episode], task_id=1))
                for metadata in list[dict[str, Any]]([{"agent": OLDER_POLICY}, {"agent": OLDER_POLICY}, {}]):
                    asked = request()
                    asked.metadata = metadata
                    await engine.agenerate(asked)

            engine.running_loop.call(main())
        bodies = [*older_stub.server.requests, *stub.server.requests]
        assert len({body["sampling_params"]["sampling_seed"] for body in bodies}) == 3
