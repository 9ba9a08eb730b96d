"""A failure says which address a model call went to, whichever library made it, and where the run's model is."""

from __future__ import annotations
import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
import aiohttp
import anthropic
import httpx2
import openai
import pytest
import requests
from areal_lite.agents.isolation.misrouted_call import explain_misrouted_call
from areal_lite.api.failure import Failure
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.agents.scripted_engine import tokenizer
from tests.stub_server import StubServer, StubThread

OURS = "http://127.0.0.1:4321/v1"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
Call = Callable[[str], Any]


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """Return an address where nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    """Return the address of a server that does not know the key."""

    class Refuses(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def by_openai(address: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=MESSAGES)


def by_sync_openai(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client:
        client.responses.create(model="m", input="hello")


async def by_anthropic(address: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=address, api_key="k", max_retries=0) as client:
        await client.messages.create(model="m", max_tokens=9, messages=MESSAGES)


async def by_httpx(address: str) -> None:
    async with httpx2.AsyncClient() as client:
        (await client.post(f"{address}/v1/chat?secret=1", json={})).raise_for_status()


async def by_aiohttp(address: str) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(f"{address}/v1/chat", json={}):
        pass


def by_requests(address: str) -> None:
    requests.post(f"{address}/v1/chat", json={}, timeout=5).raise_for_status()


def by_urllib(address: str) -> None:
    try:
        urllib.request.urlopen(f"{address}/v1/chat", data=b"{}", timeout=5)
    except urllib.error.HTTPError as error:
        error.close()  # else the garbage collector closes its socket, with a warning, in any later test
        raise


LIBRARIES = [by_openai, by_sync_openai, by_anthropic, by_httpx, by_aiohttp, by_requests]


def failure(call: Callable[[], Any], ours: str = OURS) -> Failure:
    async def play() -> None:
        made = call()
        if made is not None:
            await made

    try:
        asyncio.run(play())
    except Exception as error:
        explain_misrouted_call(error, ours)
        return Failure.of(error)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("call", LIBRARIES)
def test_a_refused_connection_names_both_addresses(call: Call, closed: str) -> None:
    broken = failure(lambda: call(closed))
    assert closed.removeprefix("http://") in broken.hint and f"this run's model is at {OURS}" in broken.hint
    assert broken.hint in broken.summary and broken.hint in broken.text and "secret" not in broken.hint


@pytest.mark.parametrize("call", [*LIBRARIES, by_urllib])
def test_a_foreign_server_that_refuses_the_key_is_named(call: Call, foreign: str) -> None:
    assert failure(lambda: call(foreign)).hint.startswith(f"It called {foreign}/v1/")


@pytest.mark.parametrize("call", LIBRARIES)
def test_the_runs_own_address_needs_no_hint(call: Call, foreign: str) -> None:
    for ours in (f"{foreign}/v1", f"{foreign.replace('127.0.0.1', 'localhost')}/v1"):
        assert failure(lambda: call(foreign), ours).hint == ""


def test_an_error_that_is_not_of_a_call_needs_no_hint() -> None:
    async def breaks() -> None:
        raise ExceptionGroup("both", [KeyError("mine"), ValueError("url")])

    assert failure(breaks).hint == ""


def test_the_innermost_address_counts_and_an_earlier_call_does_not(closed: str, foreign: str) -> None:
    """As with LiteLLM, whose own errors have an address that nobody called."""

    class Wrapper(Exception):
        request = httpx2.Request("POST", "https://wrapper.example")

    async def wraps() -> None:
        try:
            await asyncio.to_thread(by_requests, foreign)
        except requests.HTTPError:
            try:
                await by_openai(closed)
            except openai.APIConnectionError as error:
                raise Wrapper("failed") from error
            raise AssertionError from None

    async def in_a_group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wraps())

    for call in (wraps, in_a_group):
        assert failure(call).hint.startswith(f"It called {closed}/v1/chat/completions")


class Stray:
    """Calls another address than its own."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await by_openai(self.address)
        return 1.0


class Refused:
    """Sends a request that its own address refuses."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        messages: list[Any] = [{"role": "nobody", "content": ""}]
        await openai.AsyncOpenAI(**extra_kwargs).chat.completions.create(model="m", messages=messages)
        return 1.0


@pytest.mark.parametrize("isolation", ["inline", "thread", "process"])
def test_the_table_of_a_run_says_where_the_call_went(isolation: Any, closed: str, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    with StubThread(StubServer()) as stub:
        config = InferenceEngineConfig(
            backend="sglang", addresses=[stub.address], tokenizer_path=str(tmp_path), agents={"isolation": isolation}
        )
        with RemoteInfEngine(config) as engine:
            (stray,) = engine.rollout_batch([{}], Stray(closed))
            (refused,) = engine.rollout_batch([{}], Refused())
            table = engine.failures.table()
    assert stray.failure is not None and stray.failure.type == "APIConnectionError" and stray.failure.kind == "agent"
    line = f"agent             APIConnectionError: Connection error. It called {closed}/v1/chat/completions (Connect"
    assert line in table and "this run's model is at http://127.0.0.1:" in table
    assert refused.failure is not None and refused.failure.hint == ""
