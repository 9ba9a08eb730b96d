"""Streams through the agents' listener: delay of the first token, and many streams at once on one core.

    python benchmarks/agent_streams.py [--streams 2000] [--tokens 64] [--interval-ms 50] [--calls 200] [--smoke]

Three kinds of processes: a server that streams one token after another in SGLang's form, the service (listener,
sessions, and an HTTP stream to the server for each call; held to one core), and clients with raw sockets.
First table: time from sending a request to the first piece of text, at the server itself and through the
listener, one call at a time, in turns; the difference is what the service adds. Second table: all streams
at once, each with a session of its own; a stream is dropped if it ends without its whole text.

Bars: at most 2 ms are added to the first token (median); no stream is dropped.
"""

from __future__ import annotations
import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
import aiohttp
import orjson
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.config.generation import GenerationHyperparameters
from benchmarks.agent_call import make_tokenizer
from benchmarks.report import Figure, make_parser, write_figures

CLIENT_PROCESSES = 2
LETTER = ord("a")


def serve_tokens(ready: Connection, tokens: list[int], interval_s: float) -> None:
    """Be the inference server: stream ``tokens``, the first at once."""

    async def generate(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for place, token in enumerate(tokens):
            if place:
                await asyncio.sleep(interval_s)
            await response.write(b"data: %d\n\n" % token)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    allow_sockets()
    asyncio.run(main())


class StreamingEngine:
    """The least an engine client does with a stream."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http, self._url = http, url

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Stream one answer from the server."""
        ids: list[int] = []
        async with self._http.post(self._url, data=orjson.dumps({"input_ids": req.input_ids})) as reply:
            async for line in reply.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: ["):
                    ids.append(int(line[6:]))
                    if req.on_tokens is not None:
                        req.on_tokens(ids[-1:], [-0.5])
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=ids,
            output_logprobs=[-0.5] * len(ids),
            output_versions=[0] * len(ids),
            tokenizer=req.tokenizer,
        )


def serve_agents(ready: Connection, server_port: int, sessions: int, one_core: bool) -> None:
    """Be the service: open ``sessions`` and report port and keys, then the CPU seconds spent when asked."""

    async def main() -> None:
        doors = await Listener(AgentService()).open()
        renderer = ChatRenderer(make_tokenizer(None))
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as http:
            engine: Any = StreamingEngine(http, f"http://127.0.0.1:{server_port}/generate")
            keys = [
                doors.service.open(ChatSession(engine, renderer, GenerationHyperparameters())) for _ in range(sessions)
            ]
            ready.send((doors.access("").base_url.removesuffix("/v1"), keys))
            while True:
                await asyncio.to_thread(ready.recv)
                ready.send(time.process_time())

    allow_sockets()
    if one_core and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    asyncio.run(main())


def run_clients(results: Connection, url: str, keys: list[str], text: str) -> None:
    """Stream once with each key, all at the same time; send ``(first token, whole text?)`` for each."""

    async def main() -> None:
        results.send(await asyncio.gather(*(one_stream(url, key, text, delay=i * 5e-4) for i, key in enumerate(keys))))

    allow_sockets()
    asyncio.run(main())


async def one_stream(url: str, key: str, text: str, *, delay: float = 0) -> tuple[float, bool]:
    """Return the seconds to the first piece of text, and whether the whole text came."""
    await asyncio.sleep(delay)
    body = orjson.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]})
    start, first, received = time.perf_counter(), float("inf"), ""
    try:
        reader, writer = await connect(url)
        writer.write(head("/v1/chat/completions", url, len(body), key) + body)
        async for line in reader:
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    break
                continue
            for choice in json.loads(line[6:])["choices"]:
                received += choice["delta"].get("content") or ""
            if received and first == float("inf"):
                first = time.perf_counter() - start
        writer.close()
    except OSError as error:
        print(f"a client failed: {error!r}")
    return first, received == text


async def first_token_of_server(url: str) -> float:
    """Return the seconds to the server's own first token."""
    body = orjson.dumps({"input_ids": [1, 2, 3]})
    start, first = time.perf_counter(), 0.0
    reader, writer = await connect(url)
    writer.write(head("/generate", url, len(body)) + body)
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            break
        if line.startswith(b"data: ") and not first:
            first = time.perf_counter() - start
    writer.close()
    return first


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def head(path: str, url: str, length: int, key: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {url.removeprefix('http://')}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def allow_sockets() -> None:
    """Raise the limit of open files as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Process:
    """A child process and the pipe to it."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("fork")  # imports are there
        self.pipe, child = context.Pipe()
        self._process = context.Process(target=target, args=(child, *args), daemon=True)
        self._process.start()

    def cpu_seconds(self) -> float:
        """Ask the service for its CPU time."""
        self.pipe.send(None)
        return float(self.pipe.recv())

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def measure_first_token(args: argparse.Namespace, tokens: list[int], text: str) -> list[Figure]:
    """Print the delay of the first token at the server and through the listener."""
    server = Process(serve_tokens, tokens, 0.001)
    server_port = server.pipe.recv()
    service = Process(serve_agents, server_port, args.calls, False)
    url, keys = service.pipe.recv()

    async def calls() -> tuple[list[float], list[float]]:
        own, through = [], []
        for key in keys:
            own.append(await first_token_of_server(f"http://127.0.0.1:{server_port}"))
            through.append((await one_stream(url, key, text))[0])
        return own, through

    own, through = asyncio.run(calls())
    service.kill()
    server.kill()
    print(f"{'first token':<16}{'median ms':>10}{'p95 ms':>10}")
    for name, seconds in (("server", own), ("listener", through)):
        p95 = sorted(seconds)[int(0.95 * len(seconds))]
        print(f"{name:<16}{statistics.median(seconds) * 1e3:>10.2f}{p95 * 1e3:>10.2f}")
    print(f"{'added':<16}{(statistics.median(through) - statistics.median(own)) * 1e3:>10.2f}")
    medians = [statistics.median(seconds) * 1e3 for seconds in (own, through)]
    return [
        Figure("first token, server", medians[0], "ms"),
        Figure("first token, listener", medians[1], "ms", ratio=medians[1] / medians[0]),
    ]


def measure_streams(args: argparse.Namespace, tokens: list[int], text: str) -> list[Figure]:
    """Print how many of the concurrent streams were whole, and what they cost."""
    server = Process(serve_tokens, tokens, args.interval_ms / 1e3)
    service = Process(serve_agents, server.pipe.recv(), args.streams, True)
    url, keys = service.pipe.recv()
    before, start = service.cpu_seconds(), time.perf_counter()
    parts = [keys[i::CLIENT_PROCESSES] for i in range(CLIENT_PROCESSES)]
    clients = [Process(run_clients, url, part, text) for part in parts]
    results = [result for client in clients for result in client.pipe.recv()]
    elapsed, cpu = time.perf_counter() - start, service.cpu_seconds() - before
    service.kill()
    server.kill()
    whole = sum(complete for _, complete in results)
    firsts = sorted(first for first, _ in results)
    print(f"\n{args.streams} streams at once, {len(tokens)} tokens each, one per {args.interval_ms:g} ms")
    print(f"dropped         {args.streams - whole}")
    print(f"first token     {firsts[len(firsts) // 2]:.2f} s median, {firsts[-1]:.2f} s worst")
    print(f"seconds         {elapsed:.1f}")
    print(f"service CPU     {cpu:.1f} s, {cpu / args.streams / len(tokens) * 1e6:.0f} us per token")
    return [
        Figure("whole streams", whole, "", ratio=whole / args.streams),
        Figure("first token of many streams", firsts[len(firsts) // 2], "s"),
        Figure("CPU per token", cpu / args.streams / len(tokens) * 1e6, "us"),
    ]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=50)
    parser.add_argument("--calls", type=int, default=200)
    args = parser.parse_args()
    if args.smoke:
        args.streams, args.tokens, args.interval_ms, args.calls = 50, 8, 5, 10
    renderer = ChatRenderer(make_tokenizer(None))
    text = "".join(chr(LETTER + place % 26) for place in range(args.tokens - 1))
    tokens = [*renderer.tokenizer.encode(text, add_special_tokens=False), renderer.stop_ids[0]]
    figures = measure_first_token(args, tokens, text) + measure_streams(args, tokens, text)
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
