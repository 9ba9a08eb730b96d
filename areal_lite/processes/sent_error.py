"""An exception of a child process, as it is sent to the run and raised there again."""

from __future__ import annotations

import builtins
import contextlib
import traceback
from typing import Any

_MAX_ERROR_TEXT = 8192


def describe(error: BaseException) -> list[str | None]:
    """Return what :func:`rebuilt` makes an exception of again, in the run."""
    text = "".join(traceback.format_exception(error))
    try:
        message = str(error.args[0] if len(error.args) == 1 else error)  # str() of a KeyError has quotes
    except Exception:  # a user's class may break its own text
        message = "(its text cannot be read)"
    kind, hint = (getattr(error, name, None) for name in ("failure_kind", "failure_hint"))
    return [
        type(error).__name__,
        message[:_MAX_ERROR_TEXT],
        text[-_MAX_ERROR_TEXT:],
        kind if isinstance(kind, str) else None,
        hint if isinstance(hint, str) else None,
    ]


def rebuilt(name: str, message: str, text: str, kind: str | None, hint: str | None) -> Exception:
    """Return the exception: its builtin class, or a RuntimeError of the same name; a note has the child's traceback."""
    known = getattr(builtins, name, None)
    error: Any = None
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and its like take more than a text
            error = known(message)
    if error is None:
        error = type(name, (RuntimeError,), {})(message)
    if kind is not None:
        error.failure_kind = kind
    if hint is not None:
        error.failure_hint = hint
    error.add_note(f"in its worker process:\n{text}")
    raised: Exception = error
    return raised
