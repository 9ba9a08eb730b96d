"""Makes the blocking and the async method of an engine's operation, which runs on the engine's loop.

An operation is a function, not a coroutine function: it checks its arguments and loads the workflow in the thread that
calls it. On the loop, the imports of a workflow would stop all episodes that run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

from areal_lite.rollout.engine_lifecycle import EngineLifecycle

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=EngineLifecycle)


class Operation(NamedTuple, Generic[T]):
    coroutine: Coroutine[Any, Any, T]
    unclaimed: Callable[[T], object] | None = None  # gets the result if its caller was cancelled before it arrived


def blocking_and_async(
    operation: Callable[Concatenate[E, P], Operation[T]], async_name: str = ""
) -> tuple[Callable[Concatenate[E, P], T], Callable[Concatenate[E, P], Coroutine[Any, Any, T]]]:
    """Return the blocking and the async method of an operation, with its signature and documentation."""

    def blocking(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.running_loop.call(*operation(self, *args, **kwargs))

    async def asynchronous(self: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.running_loop.acall(*operation(self, *args, **kwargs))

    returned = str(operation.__annotations__["return"]).removeprefix("Operation[").removesuffix("]")
    signature = inspect.signature(operation).replace(return_annotation=returned)
    name = operation.__name__.removeprefix("_")
    form: Any
    for form, form_name in ((blocking, name), (asynchronous, async_name or f"a{name}")):
        form.__name__, form.__qualname__ = form_name, f"RemoteInfEngine.{form_name}"
        form.__doc__, form.__signature__ = operation.__doc__, signature
        form.__annotations__ = operation.__annotations__ | {"return": returned}
        form.__wrapped__ = operation  # whose module has the names of the annotations
    return blocking, asynchronous
