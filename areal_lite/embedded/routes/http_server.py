"""JSON bodies and replies of all routes, and the checks around every request.

Guarantees: an invalid request gets a 4xx with a JSON body; a web page's request is refused; a slow client is cut off.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol
import orjson
from aiohttp import web
from areal_lite.embedded.bad_request import BadRequest, wrong_type
from areal_lite.errors import ArealLiteError
from areal_lite.processes.browser_guard import loopback_names, refusal_of
from areal_lite.processes.http_limits import BodyError, HttpLimits, read_body

LIMITS = web.AppKey("limits", HttpLimits)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes(Protocol):
    def add_to(self, router: web.UrlDispatcher) -> None: ...


def application(routes: Iterable[Routes], *, host: str, limits: HttpLimits) -> web.Application:
    """Return the application with these routes, for a server bound to ``host``."""
    app = web.Application(middlewares=[_checked(loopback_names(host))])
    app[LIMITS] = limits
    for one in routes:
        one.add_to(app.router)
    return app


def reply_json(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def body_of(request: web.Request) -> bytes:
    """Return the body; raises BodyError if it is too large, too slow or broken."""
    return await read_body(request, request.app[LIMITS])


async def json_of(request: web.Request) -> Any:
    """Return the parsed body; raises BadRequest if there is none, and BodyError."""
    raw = await body_of(request)
    if not raw:
        raise wrong_type("body: Field required, a JSON object.")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise wrong_type(f"body: JSON decode error: {error}") from error


async def fields_of(request: web.Request) -> dict[str, Any]:
    """Return the body, a JSON object; raises BadRequest if it is none."""
    body = await json_of(request)
    if not isinstance(body, dict):
        raise wrong_type(f"the body must be a JSON object, got {type(body).__name__}.")
    return body


def _checked(host_names: frozenset[str]) -> Any:
    """Return a middleware that refuses what a web page makes a browser send, and answers errors as SGLang does."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = refusal_of(request.headers, has_body=request.can_read_body, host_names=host_names)
        if refusal is not None:
            return reply_json({"error": {"message": refusal.message}}, status=refusal.status)
        try:
            return await handler(request)
        except BadRequest as error:
            return reply_json(error.body, status=error.status)
        except BodyError as error:
            hint = "; send shorter prompts, or fewer at once." if error.status == 413 else ""
            return reply_json({"error": {"message": f"{error}{hint}"}}, status=error.status)
        except ArealLiteError as error:  # of new weights or an adapter; SGLang has the text under either name
            failure = {"success": False, **dict.fromkeys(("message", "error_message"), str(error))}
            return reply_json(failure | {"num_paused_requests": 0}, status=400)
        except web.HTTPException as error:
            return reply_json({"detail": error.reason}, status=error.status)

    return answer
