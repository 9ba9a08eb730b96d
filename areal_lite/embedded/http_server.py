"""SGLang's native HTTP dialect in front of the scheduler.

Guarantees: an invalid request gets a 4xx with a JSON body and never reaches the model; a web page's request is refused;
when a client disconnects, its requests are aborted; ``/health`` answers at once in every state. The scheduler owns
sampling, batching and weights.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import orjson
import torch
from aiohttp import web

from areal_lite import __version__
from areal_lite.embedded.adapter import Adapter, read_adapter
from areal_lite.embedded.generate_body import GenerateCall, Limits, parse_generate
from areal_lite.embedded.generation_request import Decode, GenerationRequest
from areal_lite.embedded.grammar import GrammarCompiler
from areal_lite.embedded.sampling_params import SamplingParams
from areal_lite.embedded.scheduler import Scheduler
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.files import model_folder as checkpoint
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.servers.dialects.sglang_errors import BadRequest, invalid_value, wrong_type
from areal_lite.servers.weights.receiver import WeightReceiver

_MAX_BODY_BYTES = 64 * 2**20
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SGLangDialect:
    """The HTTP application of one served model."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        encode: Callable[[str], list[int]],
        decode: Decode,
        grammars: GrammarCompiler,
        model_path: str,
        limits: Limits,
        seed: int,
        description: dict[str, Any],
    ) -> None:
        """Prepare the application; ``app`` builds it.

        Args:
            encode: Text to token ids.
            decode: ``(ids, skip_special_tokens)`` to text.
            grammars: Compiles the constraints of requests.
            model_path: Directory of the served weights; updates change it.
            seed: Seed of the generator that draws seeds for requests without one.
            description: Fields that ``/server_info`` shows besides the counters.
        """
        self._scheduler = scheduler
        self._encode = encode
        self._decode = decode
        self._grammars = grammars
        self._model_path = model_path
        self._can_restore = True
        """Whether ``model_path`` holds the served weights."""
        self._adapter: str | None = None
        """Name of the adapter on the weights."""
        self.context_length = limits.context_length
        self._limits = limits
        self._draw = random.Random(seed)
        self._description = description
        self._live: dict[str, list[GenerationRequest]] = {}
        self._updating = asyncio.Lock()
        self._receiver = WeightReceiver(scheduler.runner.device)
        # One thread: a tokenizer is not thread-safe, and a long text must not block the event loop.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def app(self, *, host: str) -> web.Application:
        """Return the application with all routes, for a server bound to ``host``."""
        app = web.Application(
            middlewares=[_programs_only(loopback_names(host)), _errors_as_json],
            client_max_size=_MAX_BODY_BYTES,
        )
        both = ("GET", "POST")
        for methods, path, handler in (
            (("POST", "PUT"), "/generate", self._generate),
            (("POST",), "/abort_request", self._abort_request),
            (("POST",), "/pause_generation", self._pause),
            (("POST",), "/continue_generation", self._continue),
            (("POST",), "/update_weights_from_disk", self._update_weights),
            (("POST",), "/init_weights_update_group", self._join_group),
            (("POST",), "/destroy_weights_update_group", self._leave_group),
            (("POST",), "/begin_weight_update", self._begin_update),
            (("POST",), "/update_weights_from_distributed", self._receive_weights),
            (("POST",), "/end_weight_update", self._end_update),
            (("POST",), "/update_weight_version", self._update_version),
            (("POST",), "/load_lora_adapter", self._load_adapter),
            (("POST",), "/unload_lora_adapter", self._unload_adapter),
            (both, "/flush_cache", self._flush_cache),
            (("GET",), "/model_info", self._model_info),
            (("GET",), "/get_model_info", self._model_info),
            (("GET",), "/server_info", self._server_info),
            (("GET",), "/get_server_info", self._server_info),
            (("GET",), "/v1/loads", self._loads),
            (("GET",), "/v1/models", self._models),
            (("GET",), "/health", self._health),
            (("GET",), "/ready", self._health),
            (("GET",), "/ping", self._health),
            (("GET",), "/health_generate", self._health_generate),
            (("POST",), "/tokenize", self._tokenize),
        ):
            for method in methods:
                app.router.add_route(method, path, handler)
        return app

    # -- generating --------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _json(request)
        try:
            call = await self._accept(body)
        except BadRequest as error:
            message = error.body["error"]["message"] if isinstance(error.body.get("error"), dict) else None
            if message is not None and isinstance(body, dict) and body.get("stream") is True:
                return await _stream_error(request, message)
            raise
        with self._running(call):
            if call.stream:
                return await self._stream(request, call)
            replies = []
            for one in call.requests:
                while one.finish_reason is None:
                    await one.changed.wait()
                    one.changed.clear()
                replies.append(await self._reply(one, call))
            for one in call.requests:
                if one.finish_reason is not None and one.finish_reason.get("status_code"):
                    raise invalid_value(one.finish_reason["message"], status=one.finish_reason["status_code"])
            return _reply_json(replies if call.as_list else replies[0])

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a streamed ``/generate`` call, for programs in this process.

        Closing the iterator aborts the call.

        Raises:
            BadRequest: If the body is invalid.
        """
        call = await self._accept(body)
        with self._running(call):
            async for event in self._events(call):
                yield event

    async def _accept(self, body: Any) -> GenerateCall:
        """Return the checked call of a body, registered to be aborted; :meth:`_running` must follow without waiting."""
        call = await self._in_tokenizer_thread(
            lambda: parse_generate(
                body,
                encode=self._encode,
                grammar=self._grammars.grammar,
                limits=self._limits,
                draw=self._draw,
            )
        )
        self._check_adapter(body)
        self._register(call)
        return call

    @contextmanager
    def _running(self, call: GenerateCall) -> Iterator[None]:
        """Submit the requests of a call; at the end, abort those that have not ended."""
        try:
            self._scheduler.submit(call.requests)
            yield
        finally:
            for owner in set(call.owners):
                self._live.pop(owner, None)
            if unfinished := [one for one in call.requests if one.finish_reason is None]:
                self._scheduler.discard(unfinished)

    def _register(self, call: GenerateCall) -> None:
        for owner in set(call.owners):
            if owner in self._live:
                raise invalid_value(f"Duplicate request ID detected: {owner}")
        for owner, one in zip(call.owners, call.requests, strict=True):
            self._live.setdefault(owner, []).append(one)

    async def _stream(self, request: web.Request, call: GenerateCall) -> web.StreamResponse:
        response = await _open_stream(request)
        async for event in self._events(call):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _events(self, call: GenerateCall) -> AsyncIterator[dict[str, Any]]:
        one, ended, sent = call.requests[0], False, 0
        while not ended:
            await one.changed.wait()
            one.changed.clear()
            event = one.new_part(sent) if call.incremental else await self._reply(one, call)
            ended = event["meta_info"]["finish_reason"] is not None
            sent = event["meta_info"]["completion_tokens"]
            yield event

    async def _reply(self, one: GenerationRequest, call: GenerateCall) -> dict[str, Any]:
        version, token_texts = self._scheduler.weight_version, call.return_text_in_logprobs
        reply = await self._in_tokenizer_thread(
            lambda: one.reply(self._decode, current_version=version, token_texts=token_texts)
        )
        return reply | {"prompt_token_ids": one.prompt} if call.return_prompt_token_ids else reply

    async def _in_tokenizer_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    async def _tokenize(self, request: web.Request) -> web.Response:
        prompt = _fields(await _json(request)).get("prompt")
        if not isinstance(prompt, str):
            raise wrong_type(f"prompt must be a string, got {prompt!r}.")
        ids = await self._in_tokenizer_thread(lambda: self._encode(prompt))
        return _reply_json({"tokens": ids, "count": len(ids), "max_model_len": self._limits.context_length})

    # -- control -----------------------------------------------------------------------------------------------------

    async def _abort_request(self, request: web.Request) -> web.Response:
        fields = _fields(await _json(request))
        if fields.get("abort_all") is True:
            await self._scheduler.command(self._scheduler.abort_all)
        elif requests := self._live.get(str(fields.get("rid"))):
            await self._scheduler.command(lambda: self._scheduler.abort(requests))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = _fields(await _json(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise wrong_type(f"mode: Input should be 'abort', 'retract' or 'in_place', got {mode!r}.")
        await self._scheduler.command(lambda: self._scheduler.pause(mode))
        return _reply_json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        _fields(await _json(request))
        await self._scheduler.command(self._scheduler.resume)
        return _reply_json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, _request: web.Request) -> web.Response:
        await self._scheduler.command(self._scheduler.flush_cache)
        return web.Response(text=_FLUSHED)

    async def _update_version(self, request: web.Request) -> web.Response:
        fields = _fields(await _json(request))
        version = _version(fields.get("new_version"))
        if version is None:
            raise wrong_type("new_version: Field required.")

        def change() -> None:
            if fields.get("abort_all_requests", True):
                self._scheduler.abort_all()
            self._scheduler.weight_version = version

        await self._scheduler.command(change)
        message = f"Weight version updated to {version}"
        return _reply_json({"success": True, "message": message, "new_version": version})

    async def _update_weights(self, request: web.Request) -> web.Response:
        """Check the checkpoint outside the model thread, then load it between two steps."""
        fields = _fields(await _json(request))
        path, version = fields.get("model_path"), _version(fields.get("weight_version"))
        if not isinstance(path, str):
            raise wrong_type(f"model_path: Field required, a string; got {path!r}.")
        async with self._updating:
            try:
                header = await asyncio.to_thread(self._check_checkpoint, path)
                await self._scheduler.command(
                    lambda: self._scheduler.change_weights(
                        lambda: self._load(header),
                        version,
                        abort_all=fields.get("abort_all_requests") is True,
                    )
                )
            except (ArealLiteError, OSError) as error:
                return _failure(error, num_paused_requests=0)
            self._model_path, self._can_restore, self._adapter = path, True, None
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        paused = len(self._scheduler.running) if self._scheduler.paused else 0
        return _reply_json({"success": True, "message": message, "num_paused_requests": paused})

    async def _join_group(self, request: web.Request) -> web.Response:
        fields = _fields(await _json(request))
        message = "Succeeded to initialize custom process group."
        return await self._in_update(lambda: self._receiver.join(fields), message)

    async def _leave_group(self, request: web.Request) -> web.Response:
        name = str(_fields(await _json(request)).get("group_name"))
        return await self._in_update(lambda: self._receiver.leave(name), "Succeeded to destroy custom process group.")

    async def _begin_update(self, request: web.Request) -> web.Response:
        _fields(await _json(request))
        return await self._in_update(self._receiver.begin, "Success")

    async def _receive_weights(self, request: web.Request) -> web.Response:
        """Receive weights while generation goes on; ``/end_weight_update`` loads them."""
        fields = _fields(await _json(request))
        version = _version(fields.get("weight_version"))
        answer = await self._in_update(lambda: self._receiver.receive(fields), "Succeeded to receive weights.")
        if version is not None:
            self._receiver.version = version
        return answer

    async def _end_update(self, request: web.Request) -> web.Response:
        """Load the received weights between two steps, if they are complete."""
        _fields(await _json(request))
        async with self._updating:
            try:
                tensors, version = self._receiver.end(), self._receiver.version
                shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
                served, tied = self._scheduler.runner.weight_shapes()
                checkpoint.check_shapes("the broadcast", shapes, served, tied)
                checkpoint.check_tied("the broadcast", shapes, tied, lambda a, b: torch.equal(tensors[a], tensors[b]))

                def load() -> None:
                    self._can_restore = False
                    self._scheduler.runner.load_tensors(tensors.items(), shapes)
                    self._scheduler.runner.adapt(None)

                await self._scheduler.command(lambda: self._scheduler.change_weights(load, version, abort_all=False))
                self._adapter = None
            except ArealLiteError as error:
                return _failure(error)
        return _reply_json({"success": True, "message": "Success"})

    async def _in_update(self, work: Callable[[], None], message: str) -> web.Response:
        """Run ``work`` in a thread; a failure is SGLang's answer with status 400."""
        try:
            await asyncio.to_thread(work)
        except ArealLiteError as error:
            return _failure(error)
        return _reply_json({"success": True, "message": message})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Put an adapter on the weights, for every request from here on, in place of the one before."""
        fields = _fields(await _json(request))
        name, path, version = fields.get("lora_name"), fields.get("lora_path"), _version(fields.get("weight_version"))
        if not isinstance(name, str) or not isinstance(path, str):
            raise wrong_type("lora_name and lora_path: Fields required, strings.")
        async with self._updating:
            try:
                adapter = await asyncio.to_thread(read_adapter, path, self._scheduler.runner.model)
            except (ArealLiteError, OSError) as error:
                return _reply_json({"success": False, "error_message": str(error)}, status=400)
            await self._change_adapter(adapter, name, version)
        return _reply_json({"success": True, "loaded_adapters": {name: path}})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """Serve the weights without an adapter again."""
        fields = _fields(await _json(request))
        name, version = fields.get("lora_name"), _version(fields.get("weight_version"))
        async with self._updating:
            if name is None or name != self._adapter:
                message = f"LoRA with name {name} does not exist."
                return _reply_json({"success": False, "error_message": message}, status=400)
            await self._change_adapter(None, None, version)
        return _reply_json({"success": True, "loaded_adapters": {}})

    async def _change_adapter(self, adapter: Adapter | None, name: str | None, version: str | None) -> None:
        self._adapter, runner = name, self._scheduler.runner  # requests from here on run after the command
        await self._scheduler.command(
            lambda: self._scheduler.change_weights(lambda: runner.adapt(adapter), version, abort_all=False)
        )

    def _check_adapter(self, body: Any) -> None:
        """Refuse a request that names another adapter; its ``submit`` must follow without waiting."""
        wanted = body.get("lora_path") if isinstance(body, dict) else None
        if wanted and wanted != self._adapter:
            raise invalid_value(f"the adapter {wanted!r} is not loaded; the weights have {self._adapter!r}.")

    def _check_checkpoint(self, model_path: str) -> checkpoint.CheckpointHeader:
        path = Path(model_path).expanduser()
        header = checkpoint.read_checkpoint_header(path)
        checkpoint.check_manifest(path)
        served, tied = self._scheduler.runner.weight_shapes()
        source = f"checkpoint {str(path)!r}"
        checkpoint.check_shapes(source, header.shapes, served, tied)
        checkpoint.check_tied(source, header.shapes, tied, header.same_data)
        return header

    def _load(self, header: checkpoint.CheckpointHeader) -> None:
        """Load checked weights in place of weights and adapter; if it fails halfway, restore the served ones."""
        runner = self._scheduler.runner
        try:
            runner.load_tensors(header.tensors(), header.shapes)
            runner.adapt(None)
        except Exception as error:
            if not self._can_restore:
                self._scheduler.weight_version = "mixed"  # no client takes tokens of it
                raise ConfigError(f"loading {str(header.path)!r} failed ({error}); send weights again.") from error
            served = checkpoint.read_checkpoint_header(Path(self._model_path))
            runner.load_tensors(served.tensors(), served.shapes)
            raise ConfigError(
                f"loading {str(header.path)!r} failed ({error}); the server restored its weights."
            ) from error

    # -- information -------------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=200 if self._scheduler.alive else 503)

    async def _health_generate(self, request: web.Request) -> web.Response:
        if not self._scheduler.paused and self._scheduler.alive:
            one = GenerationRequest(rid="health", prompt=[0], params=SamplingParams(max_new_tokens=1), seed=0)
            self._scheduler.submit([one])
            await one.changed.wait()
        return await self._health(request)

    async def _model_info(self, _request: web.Request) -> web.Response:
        return _reply_json(self._info())

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": self._model_path,
            "served_model_name": self._model_path,
            "tokenizer_path": self._model_path,
            "is_generation": True,
            "weight_version": self._scheduler.weight_version,
            "is_paused": self._scheduler.paused,
            **self._description,
            "context_length": self._limits.context_length,
            "vocab_size": self._limits.vocab_size,
            "max_running_requests": self._scheduler.max_running_requests,
            "max_total_num_tokens": self._limits.max_total_tokens,
        }

    async def _server_info(self, _request: web.Request) -> web.Response:
        states = [self._load_numbers()]
        return _reply_json({**self._info(), "version": __version__, "internal_states": states})

    async def _loads(self, _request: web.Request) -> web.Response:
        load = {"timestamp": time.time(), "dp_rank": 0, **self._load_numbers()}
        return _reply_json({"timestamp": time.time(), "version": __version__, "num_accelerators": 1, "loads": [load]})

    def _load_numbers(self) -> dict[str, Any]:
        scheduler = self._scheduler
        used = sum(len(one.prompt) + len(one.output_ids) for one in tuple(scheduler.running))
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "num_used_tokens": used,
            "max_total_num_tokens": self._limits.max_total_tokens,
            "max_running_requests": scheduler.max_running_requests,
            "token_usage": used / self._limits.max_total_tokens,
            "generated_tokens": scheduler.generated_tokens,
            "paused": scheduler.paused,
        }

    async def _models(self, _request: web.Request) -> web.Response:
        path, length = self._model_path, self._limits.context_length
        model = {"id": path, "object": "model", "created": int(time.time()), "owned_by": "areal_lite"}
        model |= {"root": path, "parent": None, "max_model_len": length}
        adapter = {"id": self._adapter, "object": "model", "root": self._adapter, "parent": path}
        return _reply_json({"object": "list", "data": [model, *([adapter] if self._adapter else [])]})


def _reply_json(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _failure(error: Exception, **fields: Any) -> web.Response:
    return _reply_json({"success": False, "message": str(error), **fields}, status=400)


async def _json(request: web.Request) -> Any:
    raw = await request.read()
    if not raw:
        raise wrong_type("body: Field required, a JSON object.")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise wrong_type(f"body: JSON decode error: {error}") from error


def _fields(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise wrong_type(f"the body must be a JSON object, got {type(body).__name__}.")
    return body


def _version(given: Any) -> str | None:
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise wrong_type(f"the weight version must be a string, got {given!r}.")
    return None if given is None else str(given)


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _stream_error(request: web.Request, message: str) -> web.StreamResponse:
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    response = await _open_stream(request)
    await response.write(b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n")
    return response


def _programs_only(host_names: frozenset[str]) -> Any:
    """Return a middleware that refuses what a web page makes a browser send."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = refusal_of(request.headers, has_body=request.can_read_body, host_names=host_names)
        if refusal is not None:
            return _reply_json({"error": {"message": refusal.message}}, status=refusal.status)
        return await handler(request)

    return guard


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _reply_json(error.body, status=error.status)
    except web.HTTPRequestEntityTooLarge:
        message = f"the body is larger than {_MAX_BODY_BYTES} bytes; send shorter prompts, or fewer at once."
        return _reply_json({"error": {"message": message}}, status=413)
    except web.HTTPException as error:
        return _reply_json({"detail": error.reason}, status=error.status)
