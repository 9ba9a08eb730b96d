"""``areal-lite view``: serves the page on 127.0.0.1, to programs of this machine and to the page itself. Every answer
forbids scripts, styles and connections that are not the page's own. Errors are ``{error, hint}``."""

import argparse
import asyncio
import contextlib
import errno
import socket
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.processes.browser_guard import foreign_page_refusal, loopback_names
from areal_lite.tools.argument_types import positive_integer
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.view.page_data import Answers, to_json
from areal_lite.tools.view.single_file import export_page, static_files

HOST = "127.0.0.1"
_HOST_NAMES = loopback_names(HOST)
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
Query = Mapping[str, str]
REQUESTS: dict[str, Callable[[Answers, Query], Any]] = {
    "state": lambda a, q: a.state(),
    "episodes": lambda a, q: a.episodes(
        q.get("filter", ""),
        q.get("sort", ""),
        _integer(q, "offset", 0),
        _integer(q, "limit", 100),
        count=q.get("count") != "0",
    ),
    "summary": lambda a, q: a.summary(q.get("filter", "")),
    "episode": lambda a, q: a.episode(_named(q, "run"), _named(q, "id")),
    "texts": lambda a, q: a.texts(_named(q, "run"), _named(q, "id")),
    "group": lambda a, q: a.group(_named(q, "run"), _named(q, "group")),
    "metrics": lambda a, q: a.metrics([n for n in q.get("extra", "").split(",") if n]),
    "diagnosis": lambda a, q: a.diagnosis(q.get("filter", "")),
    "timeline": lambda a, q: a.timeline(q.get("filter", "")),
    "compare": lambda a, q: a.compare(_named(q, "first"), _named(q, "second"), q.get("filter", "")),
}
"""The answer to each address of the API; see docs/view.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Serves a page of runs on 127.0.0.1, also while they write. docs/view.md describes it."
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="RUN", help="a run's folder, a folder of runs or dumps, or a dump")
    add("--filter", default="", metavar="FILTER", help="what to show first, or to export; such as 'status=failed'")
    add("--port", type=positive_integer, metavar="N", help="port of the page (default: 8642, or any free one)")
    add("--no-browser", action="store_true", help="only print the address")
    add("--export", type=Path, metavar="FILE.html", help="write the page to one file that needs no server, and end")


def run(options: argparse.Namespace) -> int:
    """Serve the page of the runs until the command is stopped, or write it to one file."""
    if options.export is not None:
        print(export_page(options.paths, options.export, filter=options.filter))
        return 0
    with Dumps.open(*options.paths, may_be_empty=True) as dumps:
        answers = Answers(dumps, options.filter)
        for note in dumps.notes():
            print(f"note: {note.encode('unicode_escape').decode()}", flush=True)
        asyncio.run(_serve(answers, options.port, browser=not options.no_browser))
    return 0


async def _serve(answers: Answers, port: int | None, *, browser: bool) -> None:
    listener = _listen(port)  # closed by the runner
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


def _listen(port: int | None) -> socket.socket:
    """Return a socket at ``port``; None is the usual one, or any other if that is in use."""
    for each in (PORT, 0) if port is None else (port,):
        try:
            return socket.create_server((HOST, each))
        except OSError as error:
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
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=self._files[name], content_type=kind, charset="utf-8", headers=HEADERS)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (answer := REQUESTS.get(request.match_info["name"])) is None:
            raise web.HTTPNotFound
        try:
            found = await asyncio.to_thread(lambda: to_json(answer(self._answers, request.query)))
        except ArealLiteError as error:
            hint = _FILTER_HINT if "filter" in request.query else _NAMES_HINT
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
            with contextlib.suppress(ArealLiteError, OSError):  # the next look may work
                lines = await asyncio.to_thread(self._answers.dumps.refresh)
                metrics = await asyncio.to_thread(self._answers.metrics_state)
                if lines or metrics != state:
                    state = metrics
                    async with self._changed:
                        self._revision += 1
                        self._changed.notify_all()


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
