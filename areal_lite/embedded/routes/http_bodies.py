"""JSON bodies of requests and replies."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from areal_lite.processes.http_limits import HttpLimits, read_body
from areal_lite.servers.dialects.sglang_errors import wrong_type

LIMITS = web.AppKey("limits", HttpLimits)


def reply_json(body: Any, *, status: int = 200) -> web.Response:
    """Return a JSON reply."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def failure(error: Exception, **fields: Any) -> web.Response:
    """Return SGLang's reply to a weight update that failed."""
    return reply_json({"success": False, "message": str(error), **fields}, status=400)


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


def version_of(given: Any) -> str | None:
    """Return the weight version that a field names; raises BadRequest for another type."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise wrong_type(f"the weight version must be a string, got {given!r}.")
    return None if given is None else str(given)
