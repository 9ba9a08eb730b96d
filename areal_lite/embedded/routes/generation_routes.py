"""SGLang's ``/generate`` and ``/abort_request``.

Guarantees: an invalid request gets a 4xx and never reaches the model; a disconnected client's requests are aborted.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
import orjson
from aiohttp import web
from areal_lite.embedded.bad_request import BadRequest, invalid_value
from areal_lite.embedded.generate_body import checked_prompt, parse_generate
from areal_lite.embedded.generation_request import Decode, GenerationRequest
from areal_lite.embedded.grammar import GrammarCompiler
from areal_lite.embedded.model_thread import ModelThread
from areal_lite.embedded.routes.http_server import fields_of, json_of, reply_json
from areal_lite.embedded.routes.weight_routes import WeightRoutes

T = TypeVar("T")


class GenerationRoutes:
    """Turns bodies into requests to the model, and their tokens into replies."""

    def __init__(
        self, model: ModelThread, weights: WeightRoutes, *, decode: Decode, grammars: GrammarCompiler, seed: int
    ) -> None:
        """Take what requests need: ``weights`` knows the adapter that they may name, ``grammars`` compiles their
        constraints, and ``seed`` is that of the generator that draws their seeds, if they have none."""
        self._model = model
        self._scheduler = model.scheduler
        self.runner = model.scheduler.runner
        self.weights = weights
        self._decode = decode
        self._grammars = grammars
        self._draw = random.Random(seed)
        self._live: dict[str, GenerationRequest] = {}
        # One thread: a tokenizer is not thread-safe, and a long text must not block the event loop.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/generate", self._generate)
        router.add_post("/abort_request", self._abort_request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await json_of(request)
        start = body.get("logprob_start_len") if isinstance(body, dict) else None
        if type(start) is int and start >= 0:
            return await self._score(body, start)
        try:
            one = await self._accept(body)
        except BadRequest as error:
            message = error.body["error"]["message"] if isinstance(error.body.get("error"), dict) else None
            if message is not None and isinstance(body, dict) and body.get("stream") is True:
                return await _stream_error(request, message)
            raise
        with self._running(one):
            if one.stream:
                return await self._stream(request, one)
            while one.finish_reason is None:
                await one.changed.wait()
                one.changed.clear()
            if one.finish_reason.get("status_code"):
                raise invalid_value(one.finish_reason["message"], status=one.finish_reason["status_code"])
            return reply_json(await self._reply(one))

    async def _score(self, body: dict[str, Any], start: int) -> web.Response:
        """Answer with the log-probs of the prompt's own tokens after ``start`` and none sampled, as SGLang does."""
        params, runner = body.get("sampling_params"), self.runner
        if not isinstance(params, dict) or params.get("max_new_tokens") != 0 or params.get("temperature", 1) != 1:
            raise invalid_value(
                f"logprob_start_len {start} asks for the prompt's log-probs, which the embedded server gives with "
                "max_new_tokens 0 and temperature 1 alone."
            )
        if odd := [name for name in ("images", "image_data", "text", "input_embeds") if body.get(name)]:
            raise invalid_value(f"{odd[0]} cannot be scored: logprob_start_len takes input_ids alone.")
        prompt = checked_prompt(body, runner, new_tokens=0).input_ids
        if start >= len(prompt):
            raise invalid_value(f"logprob_start_len is {start}: it must be below the prompt's {len(prompt)} tokens.")
        self.weights.check_adapter(body)
        score = partial(runner.score, prompt, start)
        scores, version = await self._model.command(lambda: (score(), self._scheduler.weight_version))
        pairs = zip([None, *scores], prompt[start:], strict=True)
        meta = {
            "id": body.get("rid"),
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(prompt),
            "completion_tokens": 0,
            "weight_version": version,
            "input_token_logprobs": [[score, token, None] for score, token in pairs],
        }
        return reply_json({"text": "", "output_ids": [], "meta_info": meta})

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a ``/generate`` call of this process; closing aborts it. BadRequest if it is invalid."""
        one = await self._accept(body)
        with self._running(one):
            async for event in self._events(one):
                yield event

    async def _accept(self, body: Any) -> GenerationRequest:
        """Return the request of a body, registered to be aborted; :meth:`_running` must follow without waiting."""
        one = await self._in_tokenizer_thread(
            lambda: parse_generate(body, grammar=self._grammars.grammar, runner=self.runner, draw=self._draw)
        )
        self.weights.check_adapter(body)
        if self._live.setdefault(one.rid, one) is not one:
            raise invalid_value(f"Duplicate request ID detected: {one.rid}")
        return one

    @contextmanager
    def _running(self, one: GenerationRequest) -> Iterator[None]:
        """Submit a request; at the end, abort it unless it has ended."""
        try:
            self._model.submit(one)
            yield
        finally:
            self._live.pop(one.rid, None)
            if one.finish_reason is None:
                self._model.discard(one)

    async def _stream(self, request: web.Request, one: GenerationRequest) -> web.StreamResponse:
        response = await _open_stream(request)
        async for event in self._events(one):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, one: GenerationRequest) -> AsyncIterator[dict[str, Any]]:
        ended, sent = False, 0
        while not ended:
            await one.changed.wait()
            one.changed.clear()
            event = one.new_part(sent) if one.incremental else await self._reply(one)
            ended = event["meta_info"]["finish_reason"] is not None
            sent = event["meta_info"]["completion_tokens"]
            yield event

    async def _reply(self, one: GenerationRequest) -> dict[str, Any]:
        version = self._scheduler.weight_version
        return await self._in_tokenizer_thread(lambda: one.reply(self._decode, current_version=version))

    async def _in_tokenizer_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def _abort_request(self, request: web.Request) -> web.Response:
        fields = await fields_of(request)
        if fields.get("abort_all") is True:
            await self._model.command(self._scheduler.abort_all)
        elif one := self._live.get(str(fields.get("rid"))):
            await self._model.command(lambda: self._scheduler.abort([one]))
        return web.Response()


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _stream_error(request: web.Request, message: str) -> web.StreamResponse:
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    response = await _open_stream(request)
    await response.write(b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n")
    return response
