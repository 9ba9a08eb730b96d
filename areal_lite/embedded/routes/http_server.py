"""SGLang's native HTTP dialect of one served model.

Guarantees: an invalid request gets a 4xx with a JSON body; a web page's request is refused; a slow client is cut off.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from areal_lite.embedded.model_thread import ModelThread
from areal_lite.embedded.routes.control_routes import ControlRoutes
from areal_lite.embedded.routes.generation_routes import GenerationRoutes
from areal_lite.embedded.routes.http_bodies import LIMITS, reply_json
from areal_lite.embedded.routes.weight_routes import WeightRoutes
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.processes.http_limits import BodyError, HttpLimits
from areal_lite.servers.dialects.sglang_errors import BadRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model in its thread, and the routes to it."""

    model: ModelThread
    generation: GenerationRoutes
    weights: WeightRoutes
    control: ControlRoutes

    def app(self, *, host: str, limits: HttpLimits) -> web.Application:
        """Return the application with all routes, for a server bound to ``host``."""
        app = web.Application(middlewares=[_programs_only(loopback_names(host)), _errors_as_json])
        app[LIMITS] = limits
        for routes in (self.generation, self.weights, self.control):
            routes.add_to(app.router)
        return app


def _programs_only(host_names: frozenset[str]) -> Any:
    """Return a middleware that refuses what a web page makes a browser send."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = refusal_of(request.headers, has_body=request.can_read_body, host_names=host_names)
        if refusal is not None:
            return reply_json({"error": {"message": refusal.message}}, status=refusal.status)
        return await handler(request)

    return guard


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return reply_json(error.body, status=error.status)
    except BodyError as error:
        hint = "; send shorter prompts, or fewer at once." if error.status == 413 else ""
        return reply_json({"error": {"message": f"{error}{hint}"}}, status=error.status)
    except web.HTTPException as error:
        return reply_json({"detail": error.reason}, status=error.status)
