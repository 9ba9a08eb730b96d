"""Name the address that an agent's failed call went to, if it is not its model's, from the exception's causes.

Reads attributes that HTTP libraries set (httpx, requests, aiohttp, and the SDKs on top of them), never their texts.
"""

import contextlib
from operator import attrgetter
from urllib.parse import urlsplit

_URLS = attrgetter("request.url"), attrgetter("request_info.real_url"), attrgetter("url")
"""Attributes in which exceptions have the URL of their request."""
_MAX_CHARACTERS = 200


def explain_misrouted_call(error: BaseException, base_url: str) -> None:
    """Add a hint to ``error`` if it comes from a call to another address than ``base_url``."""
    url, reason = _find_call(error)
    if url and _host(url) != _host(base_url):
        hint = (
            f"It called {url}{reason and f' ({reason})'}, but this run's model is at {base_url}: make the model's "
            "client in run(), with the base_url, api_key and http_client given there, or without arguments so that it "
            "reads OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
        )
        with contextlib.suppress(AttributeError):  # a class with slots
            error.failure_hint = hint  # type: ignore[attr-defined]


def _find_call(error: BaseException | None) -> tuple[str, str]:
    """Return the address of the failed call, and why the connection failed; empty if unknown.

    Wrappers may name other addresses: the innermost counts, up to a connection's OSError. Beyond it are earlier calls.
    """
    url = ""
    disconnected = False
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not disconnected:
            url = _url_of(error) or url
            disconnected = bool(url) and isinstance(error, OSError)
        if disconnected and isinstance(error, OSError) and isinstance(error.strerror, str):
            return url, error.strerror
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return url, ""


def _url_of(error: BaseException) -> str:
    for read in _URLS:
        with contextlib.suppress(Exception):  # any object may be there; httpx raises where the request is not set
            parts = urlsplit(str(read(error)))
            if parts.scheme in ("http", "https") and parts.hostname:
                return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:_MAX_CHARACTERS]
    with contextlib.suppress(Exception):
        host, port = attrgetter("host", "port")(error)
        return f"{host}:{port}" if isinstance(host, str) and isinstance(port, int) else ""
    return ""


def _host(url: str) -> str:
    return url.rpartition("//")[2].partition("/")[0].replace("localhost", "127.0.0.1")
