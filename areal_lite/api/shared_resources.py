"""Objects that all episodes of an engine share, such as HTTP clients: made on first use, closed with the engine."""

import asyncio
import contextvars
import importlib.metadata
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class SharedResources:
    """Resources by name; lives on one event loop."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}
        """Numbers that they count; the engine reports them with its metrics."""
        self.while_blocked: list[Callable[[Any, str], None]] = []
        """Called from another thread while an episode blocks the event loop, many times a second: with how that
        episode's agent reaches its model (None in a workflow), and a sentence for people."""
        self.blocked_at = 0.0
        """When an episode was last seen blocking the event loop, on the monotonic clock."""
        self._made: dict[str, Any] = {}
        self._making = asyncio.Lock()

    async def get(self, name: str, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the resource ``name``; the first caller makes it."""
        if name not in self._made:
            async with self._making:
                if name not in self._made:
                    # In a context of its own: what it keeps of the context must not be the first caller's episode.
                    self._made[name] = await asyncio.create_task(make(), context=contextvars.Context())
        made: T = self._made[name]
        return made

    async def aclose(self) -> None:
        """Close all resources, the newest first."""
        while self._made:
            _, resource = self._made.popitem()
            closing = resource.aclose() if hasattr(resource, "aclose") else resource.close()
            if closing is not None:
                await closing
        self._making = asyncio.Lock()  # the next event loop's


def sdk_httpx() -> Any:
    """Return the HTTP library of the installed OpenAI SDK: ``httpx`` up to its version 2, ``httpx2`` since."""
    major = int(importlib.metadata.version("openai").partition(".")[0])
    return importlib.import_module("httpx2" if major > 2 else "httpx")
