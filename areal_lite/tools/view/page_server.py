"""Serves the page on 127.0.0.1, to programs of this machine and to the page itself.

Every answer forbids scripts, styles and connections that are not the page's own. Errors are ``{error, hint}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import web

from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.processes.browser_guard import foreign_page_refusal, loopback_names
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.view.page_data import Answers

HOST = "127.0.0.1"
PORT = 8642
"""Port of a page that names none, if it is free."""
REFRESH_S = 1.0
"""Seconds between looks for new dumps and metrics."""
PING_S = 15.0
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILTER_HINT = "Press ? for the keys and operators of filters."
_NAMES_HINT = "The dumps may have changed: reload the page."
_JSON = orjson.OPT_NON_STR_KEYS
Query = Mapping[str, str]


REQUESTS: dict[str, tuple[Callable[[Answers, Query], Any], str]] = {
    "state": (lambda a, q: a.state(), _NAMES_HINT),
    "episodes": (
        lambda a, q: a.episodes(
            q.get("filter", ""),
            q.get("sort", ""),
            _integer(q, "offset", 0),
            _integer(q, "limit", 100),
            count=q.get("count") != "0",
        ),
        _FILTER_HINT,
    ),
    "summary": (lambda a, q: a.summary(q.get("filter", "")), _FILTER_HINT),
    "episode": (lambda a, q: a.episode(_named(q, "run"), _named(q, "id")), _NAMES_HINT),
    "texts": (lambda a, q: a.texts(_named(q, "run"), _named(q, "id")), _NAMES_HINT),
    "group": (lambda a, q: a.group(_named(q, "run"), _named(q, "group")), _NAMES_HINT),
    "metrics": (lambda a, q: a.metrics([n for n in q.get("extra", "").split(",") if n]), _NAMES_HINT),
    "diagnosis": (lambda a, q: a.diagnosis(q.get("filter", "")), _FILTER_HINT),
    "timeline": (lambda a, q: a.timeline(q.get("filter", "")), _FILTER_HINT),
    "compare": (lambda a, q: a.compare(_named(q, "first"), _named(q, "second"), q.get("filter", "")), _FILTER_HINT),
}
"""The answer to each address of the API, and a hint for errors; see docs/view.md."""


def static_files() -> dict[str, bytes]:
    folder = resources.files("areal_lite.tools.view") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _TYPES}


def serve_page(paths: Sequence[Path], *, port: int | None = None, browser: bool = True, filter: str = "") -> None:
    """Serve the page of the runs in ``paths`` until the command is stopped."""
    with Dumps.open(*paths, may_be_empty=True) as dumps:
        answers = Answers(dumps, filter)
        for note in dumps.notes():
            print(f"note: {note.encode('unicode_escape').decode()}", flush=True)
        asyncio.run(_serve(answers, port, browser))


async def _serve(answers: Answers, port: int | None, browser: bool) -> None:
    listener = _bind(port)  # closed by the runner
    runner = web.AppRunner(page_app(answers), access_log=None, shutdown_timeout=0.5)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        if answers.filter:
            address += f"#episodes?filter={quote(answers.filter)}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        if browser:
            await asyncio.to_thread(webbrowser.open, address)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def _bind(port: int | None) -> socket.socket:
    """Return a socket at ``port``; None is the usual one, or any other if that is in use."""
    for each in (PORT, 0) if port is None else (port,):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, each))
            return listener
        except OSError as error:
            listener.close()
            if port is not None or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"port {each} of {HOST}: {error.strerror}: use another --port, or none") from None
    raise AssertionError("port 0 is always free")


def page_app(answers: Answers) -> web.Application:
    """Return the application: the page at ``/``, its files, and its API below ``/api``."""
    page = _Page(answers)
    app = web.Application(middlewares=[_guard])
    app.router.add_get("/", page.file)
    app.router.add_get("/static/{name}", page.file)
    app.router.add_get("/api/changes", page.changes)
    app.router.add_get("/api/{name}", page.answer)
    app.cleanup_ctx.append(page.follow)
    return app


class _Page:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._files = static_files()
        self._revision = 0
        self._changed = asyncio.Condition()

    async def file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", "index.html")
        if name not in self._files:
            raise web.HTTPNotFound
        return web.Response(
            body=self._files[name], content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8", headers=HEADERS
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["name"] not in REQUESTS:
            raise web.HTTPNotFound
        answer, hint = REQUESTS[request.match_info["name"]]
        try:
            found = await asyncio.to_thread(lambda: to_json(answer(self._answers, request.query)))
        except ArealLiteError as error:
            return _error(400 if isinstance(error, ConfigError) else 500, str(error), hint)
        return web.Response(body=found, content_type="application/json", charset="utf-8", headers=HEADERS)

    async def changes(self, request: web.Request) -> web.StreamResponse:
        """Send the number of changes so far, at once and whenever there is one."""
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        seen = -1
        with contextlib.suppress(ConnectionError):
            while True:
                async with self._changed:
                    if seen == self._revision:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(PING_S):
                                await self._changed.wait()
                line = b": ping\n\n" if seen == self._revision else b"data: %d\n\n" % self._revision
                seen = self._revision
                await response.write(line)
        return response

    async def follow(self, app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _follow(self) -> None:
        state = self._answers.metrics_state()
        while True:
            await asyncio.sleep(REFRESH_S)
            lines = await asyncio.to_thread(self._answers.dumps.refresh)
            metrics = await asyncio.to_thread(self._answers.metrics_state)
            if lines or metrics != state:
                state = metrics
                async with self._changed:
                    self._revision += 1
                    self._changed.notify_all()


def to_json(value: Any) -> bytes:
    """Return ``value`` as JSON; a path that is not UTF-8 is escaped."""
    try:
        return orjson.dumps(value, option=_JSON)
    except TypeError:
        return json.dumps(value).encode()


def _integer(query: Query, name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isdecimal() or len(text) > 15:
        raise ConfigError(f"{name} is {text[:80]!r}: use an integer from 0")
    return int(text)


def _named(query: Query, name: str) -> str:
    if not query.get(name):
        raise ConfigError(f"the request needs {name}=")
    return query[name]


def _error(status: int, message: str, hint: str) -> web.Response:
    body = orjson.dumps({"error": message, "hint": hint})
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8", headers=HEADERS)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HOST_NAMES = loopback_names(HOST)


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    refusal = foreign_page_refusal(request.headers, host_names=_HOST_NAMES, is_document=request.path == "/")
    if refusal is not None:
        return _error(refusal.status, refusal.message, "")
    try:
        return await handler(request)
    except web.HTTPException as error:
        addresses = ", ".join(f"/api/{name}" for name in REQUESTS)
        return _error(error.status, error.reason, f"The page is at /, its API at {addresses}")
