"""CPU of one model call by an agent, against the bare OpenAI SDK calling a local HTTP stub.

    python benchmarks/agent_call.py [--calls 1000] [--rounds 5] [--tokenizer FOLDER] [--smoke]

All arms run the same agent, one call with an SDK client that it makes around its HTTP client, with the same
messages and the same answer; the stub runs in a process of its own, so only the CPU of agent and service is
counted. `bare` POSTs to the stub's /v1/chat/completions. `session` is an episode's call: in-process
transport, session with exact tokens, and a keep-alive POST of the token ids to the stub's /generate.
`listener` is the same through the loopback listener. `no engine` is `session` without the POST. Eight calls
have the same messages, as the episodes of a group have. All run on uvloop and with the garbage collector's
pace of a run. In `bare` and `listener` every concurrent agent has an HTTP client of its own, as separate programs
have; one pool for all would cost more per call the more of its connections are idle. Connections are open before a
round is measured. The arms take turns, the best round of each counts. A second table shows the cost of turn 1, 10,
100, ... of one session.
"""

from __future__ import annotations
import argparse
import asyncio
import functools
import gc
import itertools
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
import aiohttp
import openai
import orjson
import uvloop
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.completions import ChatCompletions
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.rollout import garbage_collection
from benchmarks.report import Figure, make_parser, write_figures

OUTPUT_TOKENS = 64
CONCURRENCY = 64
GROUP_SIZE = 8
TURN_SESSIONS = 3
QUESTION = "Which is the largest number: 12, 89, 41,"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Reply with a number only."},
    {"role": "user", "content": f"{QUESTION} 7?"},
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def serve_stub(ready: Any, completion: bytes, generated: bytes) -> None:
    """Serve both canned answers until killed; tells its port on ``ready``."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        body = generated if request.path == "/generate" else completion
        return web.Response(body=body, content_type="application/json")

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


class HttpEngine:
    """The least an inference client can do: one keep-alive POST; or nothing, where there is no server."""

    def __init__(self, http: aiohttp.ClientSession | None, url: str, output_ids: list[int]) -> None:
        self._http, self._url, self._output_ids = http, url, output_ids

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        ids, logprobs = self._output_ids, [-0.5] * len(self._output_ids)
        if self._http is not None:
            body = orjson.dumps({"input_ids": req.input_ids, "return_logprob": True})
            async with self._http.post(self._url, data=body) as response:
                answer = orjson.loads(await response.read())
            pairs = answer["meta_info"]["output_token_logprobs"]
            ids, logprobs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=ids,
            output_logprobs=logprobs,
            output_versions=[0] * len(ids),
            tokenizer=req.tokenizer,
        )


def make_tokenizer(path: str | None) -> Any:
    """Return the tokenizer of ``path``, or a byte-level one."""
    if path is not None:
        return load_tokenizer(path)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = CHATML
    return tokenizer


async def create(session: ChatSession, messages: list[Any]) -> dict[str, Any]:
    """Answer a chat completion without HTTP."""
    call = ChatCompletions(orjson.dumps({"messages": messages}), session)
    return call.reply(await session.answer(call.request, call.id))


async def cpu_per_call(call: Callable[[], Awaitable[Any]], calls: int) -> float:
    """Return this process's CPU seconds per call, ``CONCURRENCY`` of them at once."""

    async def worker() -> None:
        for _ in range(calls // CONCURRENCY):
            await call()

    await asyncio.gather(*(call() for _ in range(CONCURRENCY)))  # opens the connections
    gc.collect()
    start = time.process_time()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return (time.process_time() - start) / (calls // CONCURRENCY * CONCURRENCY)


async def measure(args: argparse.Namespace, renderer: ChatRenderer, output_ids: list[int], port: int) -> list[Figure]:
    doors = await Listener(AgentService()).open()
    through_socket = [openai.DefaultAsyncHttpxClient() for _ in range(CONCURRENCY)]
    access = doors.access("")
    connector = aiohttp.TCPConnector(limit=CONCURRENCY)
    timeout = aiohttp.ClientTimeout(total=None)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=jar
    ) as http:
        engine = HttpEngine(http, f"http://127.0.0.1:{port}/generate", output_ids)
        no_engine = HttpEngine(None, "", output_ids)

        calls = itertools.count()

        async def agent(base_url: str, key: str, http_client: Any) -> None:
            client = openai.AsyncOpenAI(base_url=base_url, api_key=key, http_client=http_client)
            messages = [*MESSAGES[:-1], {"role": "user", "content": f"{QUESTION} {next(calls) // GROUP_SIZE}?"}]
            await client.chat.completions.create(model="default", messages=messages)

        async def own_socket(base_url: str, key: str) -> None:
            http_client = through_socket.pop()
            await agent(base_url, key, http_client)
            through_socket.append(http_client)

        def episode(engine: Any, run: Callable[[str], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
            async def call() -> None:
                session = ChatSession(engine, renderer, GenerationHyperparameters())
                key = doors.service.open(session)
                await run(key)
                doors.service.close(key)

            return call

        async def in_process(key: str) -> None:
            await agent(access.base_url, key, access.http_client)

        async def listener(key: str) -> None:
            await own_socket(access.base_url, key)

        arms: dict[str, Callable[[], Awaitable[None]]] = {
            "bare": lambda: own_socket(f"http://127.0.0.1:{port}/v1", "none"),
            "session": episode(engine, in_process),
            "listener": episode(engine, listener),
            "no engine": episode(no_engine, in_process),
        }
        best = dict.fromkeys(arms, float("inf"))
        for _ in range(args.rounds):
            for name, call in arms.items():
                best[name] = min(best[name], await cpu_per_call(call, args.calls))
        print(f"{'arm':<12}{'CPU ms/call':>12}{'ratio':>8}")
        for name, seconds in best.items():
            print(f"{name:<12}{seconds * 1e3:>12.3f}{seconds / best['bare']:>8.2f}")
        figures = [Figure(f"CPU per call, {name}", s * 1e3, "ms", ratio=s / best["bare"]) for name, s in best.items()]
        figures += await per_turn(no_engine, renderer, smoke=args.smoke)
    for http_client in through_socket:
        await http_client.aclose()
    await doors.close()
    return figures


async def per_turn(engine: Any, renderer: ChatRenderer, *, smoke: bool) -> list[Figure]:
    """Print and return the CPU of growing turns in the service alone, from a body's bytes to its reply's.

    Beside it, what a parse of the whole body and one copy of the prompt's ids take.
    """
    shown = (1, 10) if smoke else (1, 10, 50, 100, 250, 500, 1000)
    best = dict.fromkeys(shown, (float("inf"),) * 3)
    mean = 0.0
    for _ in range(TURN_SESSIONS):
        service = AgentService()
        session = ChatSession(engine, renderer, GenerationHyperparameters(max_tokens=10**6))
        headers = {"x-api-key": service.open(session)}
        messages: list[Any] = []
        for turn in range(1, shown[-1] + 1):
            messages.append({"role": "user", "content": f"{QUESTION} {turn}?"})
            body = orjson.dumps({"messages": messages, "model": "default"})
            start = time.process_time()
            reply = await service.handle("POST", "/v1/chat/completions", headers, body)
            spent = time.process_time() - start
            mean += spent / shown[-1] / TURN_SESSIONS
            if turn in shown:
                ids = next(reversed(session.interactions.values())).model_response.input_tokens
                seconds = (spent, cpu_of(functools.partial(orjson.loads, body)), cpu_of(ids.copy))
                best[turn] = tuple(map(min, seconds, best[turn]))
            messages.append(orjson.loads(reply.body)["choices"][0]["message"])
        assert session.forks == 0
    print(f"\n{'turn':<8}{'CPU ms':>8}{'parse of the body':>20}{'copy of the ids':>18}")
    for turn, (spent, parse, copy) in best.items():
        print(f"{turn:<8}{spent * 1e3:>8.3f}{parse * 1e3:>20.3f}{copy * 1e3:>18.3f}")
    print(f"{'mean':<8}{mean * 1e3:>8.3f}")
    return [Figure(f"CPU of turn {turn}", spent * 1e3, "ms") for turn, (spent, _, _) in best.items()]


def cpu_of(step: Callable[[], Any]) -> float:
    """Return this process's CPU seconds of one step."""
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokenizer")
    args = parser.parse_args()
    if args.smoke:
        args.calls, args.rounds = CONCURRENCY, 1
    renderer = ChatRenderer(make_tokenizer(args.tokenizer))
    text = "The largest of these numbers is eighty-nine. " * 4
    output_ids = renderer.tokenizer.encode(text, add_special_tokens=False)[: OUTPUT_TOKENS - 1]
    output_ids.append(renderer.stop_ids[0])
    generated = {"text": "", "meta_info": {"output_token_logprobs": [[-0.5, i, None] for i in output_ids]}}
    session = ChatSession(HttpEngine(None, "", output_ids), renderer, GenerationHyperparameters())  # type: ignore[arg-type]
    completion = asyncio.run(create(session, MESSAGES))
    parent, child = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve_stub, args=(child, orjson.dumps(completion), orjson.dumps(generated)), daemon=True
    )
    server.start()
    garbage_collection.relax()
    try:
        write_figures(args.json, uvloop.run(measure(args, renderer, output_ids, parent.recv())))
    finally:
        server.kill()


if __name__ == "__main__":
    main()
