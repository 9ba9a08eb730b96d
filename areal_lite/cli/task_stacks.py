"""Where every asyncio task of this process waits, for a process that hangs."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any


def task_stacks() -> str:
    """Return the stack of each task of every loop, outermost call first, equal ones once with their number.

    Any thread may call this; it takes as long as a garbage collection.
    """
    tasks = [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task) and not each.done()]
    stacks = Counter("".join(_calls(task.get_coro())) for task in tasks)
    return "\n".join(f"{count} x\n{stack}" for stack, count in stacks.most_common())


def _calls(awaited: Any) -> Iterator[str]:
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield f"  {frame.f_code.co_qualname} at {frame.f_code.co_filename}:{frame.f_lineno}\n"
        awaited = awaited.cr_await
