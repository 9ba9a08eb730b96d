"""The embedded server with OpenAI's chat completions and completions, which answer with its own model.

``areal-lite serve`` runs it as a program with the arguments of :mod:`areal_lite.embedded`. The APIs are those of
:mod:`areal_lite.agents`, without keys: each request is a session of its own, and the client sets the sampling.
"""

import sys
from contextlib import aclosing
from dataclasses import replace
from typing import cast
from aiohttp import web
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.listener import send_reply
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.data.chat.hermes_tools import drops_tools
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.embedded.__main__ import main
from areal_lite.embedded.bad_request import BadRequest
from areal_lite.embedded.routes.generation_routes import GenerationRoutes
from areal_lite.embedded.routes.http_server import body_of
from areal_lite.errors import ConfigError, ServerError
from areal_lite.servers.client.answer import Answer, said_full
from areal_lite.servers.dialects.dialect import ErrorReply
from areal_lite.servers.dialects.sglang import SGLang

PATHS = ("/v1/chat/completions", "/v1/completions")
_NO_TEMPLATE = "{{ raise_exception('the tokenizer has no chat template: send a prompt to /v1/completions') }}"


class OpenService(AgentService):
    """The agents' APIs without keys, and the engine of their sessions, which generates in this process."""

    def __init__(self, generation: GenerationRoutes) -> None:
        super().__init__()
        tokenizer = load_tokenizer(generation.weights.model_path)
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _NO_TEMPLATE
        self._renderer = ChatRenderer(tokenizer, tools_in_system_prompt=drops_tools(tokenizer, {}))
        self._generation = generation
        self._protocol = SGLang(embedded=True)
        self._said_full = False
        length = generation.runner.context_length
        self._gconfig = GenerationHyperparameters(max_new_tokens=length, max_tokens=length)

    def _session(self, key: str) -> ChatSession:
        return ChatSession(cast(InferenceEngine, self), self._renderer, self._gconfig, agent_samples=True)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the answer to one request; a client that leaves aborts it; raises ConfigError or ServerError."""
        answer, gconfig, finish = Answer(req, None, must_stay=False), req.gconfig, "stop"
        response = answer.response
        call = answer.next_call(req.input_ids, gconfig.max_new_tokens, gconfig.seed)
        body = self._protocol.generate_body(replace(call, stream=True))
        try:
            async with aclosing(self._generation.events(body)) as events:
                async for event in events:
                    chunk = self._protocol.parse(event, len(response.output_tokens), top_logprobs=req.top_logprobs)
                    if chunk is None:
                        continue
                    if chunk.finish == "abort":
                        raise ServerError("the server was paused or its weights changed: send the request again")
                    answer.extend(chunk)
                    if req.on_tokens is not None and chunk.tokens:
                        req.on_tokens(chunk.tokens, chunk.logprobs)
                    finish = chunk.finish or finish
        except BadRequest as error:
            details = error.body.get("error", error.body)
            raise ConfigError(str(details.get("message", details))) from error
        except ErrorReply as error:
            raise (ServerError if error.status >= 500 else ConfigError)(error.message) from error
        response.output_versions = [-1] * len(response.output_tokens)
        answer.finish(req.input_ids, finish)
        self._said_full = self._said_full or said_full(response, gconfig.max_tokens, gconfig.max_new_tokens)
        return response


def add_routes(generation: GenerationRoutes, app: web.Application) -> None:
    service = OpenService(generation)

    async def handle(request: web.Request) -> web.StreamResponse:
        reply = await service.handle(request.method, request.raw_path, request.headers, await body_of(request))
        return await send_reply(request, reply)

    for path in PATHS:
        app.router.add_post(path, handle)


if __name__ == "__main__":
    sys.exit(main(extend=add_routes))
