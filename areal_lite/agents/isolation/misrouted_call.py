"""Name the address that an agent's failed call went to, if it is not its model's, from the exception's causes.

Reads attributes that HTTP libraries set (httpx, requests, aiohttp, and the SDKs on top of them), never their texts.
"""

from __future__ import annotations

import contextlib
from typing import Any
from urllib.parse import urlsplit

_URLS = (("request", "url"), ("request_info", "real_url"), ("url",))
"""Attributes of an exception that lead to the URL of its request."""
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

    Wrappers may name an address of their own, so the innermost one counts, up to the OSError of a connection. Addresses
    beyond it belong to earlier calls.
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
    for names in _URLS:
        value: Any = error
        for name in names:
            value = _read(value, name)
        with contextlib.suppress(Exception):  # any object may be there
            parts = urlsplit(str(value))
            if parts.scheme in ("http", "https") and parts.hostname:
                return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:_MAX_CHARACTERS]
    host, port = _read(error, "host"), _read(error, "port")
    return f"{host}:{port}" if isinstance(host, str) and isinstance(port, int) else ""


def _read(value: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # httpx raises RuntimeError where the request is not set
        return getattr(value, name)
    return None


def _host(url: str) -> str:
    return url.rpartition("//")[2].partition("/")[0].replace("localhost", "127.0.0.1")
