"""Stands in for SGLang's kernels on a CPU: every name imports, and raises when called."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this machine")

    return missing
