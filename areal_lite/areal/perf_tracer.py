"""AReaL's tracing names, which do nothing: dumps have the times of every turn (docs/trajectories.md)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class Category:
    """AReaL's categories of trace events."""

    COMPUTE = "compute"
    COMM = "comm"
    IO = "io"
    SYNC = "sync"
    SCHEDULER = "scheduler"
    INSTR = "instr"
    MISC = "misc"


def trace_session(phase: str) -> Callable[[F], F]:
    """Return a decorator that leaves the function as it is."""
    return lambda function: function


def session_context() -> Callable[[F], F]:
    """Return a decorator that leaves the function as it is."""
    return lambda function: function


def trace_perf(name: str, *, category: Any = None) -> Callable[[F], F]:
    """Return a decorator that leaves the function as it is."""
    return lambda function: function


def trace_scope(name: str, category: Any = None, args: Any = None) -> nullcontext[None]:
    """Return a context manager that does nothing."""
    return nullcontext()


def atrace_scope(name: str, category: Any = None, args: Any = None) -> nullcontext[None]:
    """Return an async context manager that does nothing."""
    return nullcontext()


def atrace_session_phase(phase: str, **payload: Any) -> nullcontext[None]:
    """Return an async context manager that does nothing."""
    return nullcontext()
