"""Makes the blocking and the async method of an engine's operation, which runs on the engine's loop.

An operation that loads a workflow is a function that returns a coroutine: what it does before that, it does in the
thread that calls it. On the loop, the imports of a workflow would stop all episodes that run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from areal_lite.rollout.engine_lifecycle import EngineLifecycle

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=EngineLifecycle)


def blocking_and_async(
    operation: Callable[Concatenate[E, P], Coroutine[Any, Any, T]],
    async_name: str = "",
    *,
    unclaimed: Callable[[E, T], object] | None = None,
) -> tuple[Callable[Concatenate[E, P], T], Callable[Concatenate[E, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the async method of an operation, with its signature and documentation. ``unclaimed``
    gets the engine and the result if the caller was cancelled before it arrived."""

    def lost(engine: E) -> Callable[[T], object] | None:
        return None if unclaimed is None else lambda result: unclaimed(engine, result)

    def blocking(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.running_loop.call(operation(self, *args, **kwargs), lost(self))

    async def asynchronous(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.running_loop.acall(operation(self, *args, **kwargs), lost(self))

    name = operation.__name__.removeprefix("_")
    return _named(blocking, name, operation), _named(asynchronous, async_name or f"a{name}", operation)


def also_async(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]:
    """Return the async form of a method that returns at once."""

    async def asynchronous(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self, *args, **kwargs)

    form: Callable[Concatenate[E, P], Coroutine[Any, Any, T]] = _named(asynchronous, f"a{method.__name__}", method)
    return form


def _named(form: Any, name: str, operation: Callable[..., Any]) -> Any:
    returned = re.sub(r"^Coroutine\[Any, Any, (.*)\]$", r"\1", operation.__annotations__["return"])
    form.__name__, form.__qualname__, form.__doc__ = name, f"RemoteInfEngine.{name}", operation.__doc__
    form.__signature__ = inspect.signature(operation).replace(return_annotation=returned)
    form.__annotations__ = operation.__annotations__ | {"return": returned}
    form.__wrapped__ = operation  # whose module has the names of the annotations
    return form
