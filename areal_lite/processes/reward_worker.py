"""The child process that runs reward functions; started as a file, so it imports none of areal_lite.

It reads length-prefixed pickles from the process that started it and answers ``kind, length, body``,
where the body is a double or JSON: code that has processed model output is not trusted to write
pickles.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import pickle
import resource
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = struct.Struct("!I")
REPLY = struct.Struct("!cI")
NUMBER = struct.Struct("!d")
LOADED, REWARD, DETAILS, RAISED = b"l", b"r", b"d", b"e"
MAX_TEXT = 8192


LARGEST_REWARD = 3.4028234e38
"""Largest finite float32."""


def as_reward(value: Any) -> float:
    """Return ``value`` as a float.

    Raises:
        ValueError: If it is not a real number that is finite in float32 (int, float, array of one, Fraction, ...).
    """
    if not isinstance(value, str | bytes | bytearray):
        if getattr(value, "size", None) == 1:  # a numpy array of one element
            value = value.item()
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if abs(number) <= LARGEST_REWARD:
            return number
    raise ValueError(f"the reward is {repr(value)[:200]}: it must be a finite number; raise an error instead")


class Reward(NamedTuple):
    """What a reward function returned."""

    value: float | list[float]
    """One number, or one for each token of the answer."""
    facts: dict[str, float | str | None]
    """What it returned beside the reward, by name."""


def read_reward(returned: Any) -> Reward:
    """Return the reward, and the facts beside it if ``returned`` is a dict with ``score`` or ``reward``.

    Raises:
        ValueError: If there is no reward, a number is not finite, or a fact is neither a number nor text.
    """
    facts: dict[str, float | str | None] = {}
    if isinstance(returned, Mapping):
        if (name := next((name for name in ("score", "reward") if name in returned), None)) is None:
            raise ValueError(f"the reward is a dict of {[*returned][:8]}: give the number as 'score'")
        facts = {str(key): _fact(str(key), value) for key, value in returned.items() if key != name}
        returned = returned[name]
    if getattr(returned, "ndim", None) == 1 and len(returned) > 1:  # of numpy or torch
        returned = returned.tolist()
    if isinstance(returned, list | tuple):
        return Reward([as_reward(number) for number in returned], facts)
    return Reward(as_reward(returned), facts)


def _fact(name: str, value: Any) -> float | str | None:
    if value is None or isinstance(value, str):
        return value and value.encode(errors="replace").decode()  # without lone surrogates, which no JSON has
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"the reward's {name!r} is {repr(value)[:200]}: beside the score, give numbers and texts"
        ) from None


def main() -> None:
    """Serve the socket whose number is the first argument until the other side closes it."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    _limit_memory(int(sys.argv[2]))
    requests = connection.makefile("rb", 1 << 16)
    functions: dict[int, Callable[..., Any]] = {}
    while header := requests.read(LENGTH.size):
        message = requests.read(LENGTH.unpack(header)[0])
        try:
            key, arguments, keywords = pickle.loads(message)
            if arguments is None:
                function, preparation = keywords
                spawn.prepare(preparation)
                functions[key] = pickle.loads(function)
                kind, body = LOADED, b""
            else:
                value, facts = read_reward(functions[key](*arguments, **keywords))
                if isinstance(value, float) and not facts:
                    kind, body = REWARD, NUMBER.pack(value)
                else:
                    kind, body = DETAILS, json.dumps({"score": value, **facts}).encode()
        except BaseException as error:  # SystemExit too: the exception is the answer
            kind, body = RAISED, _describe(error)
        connection.sendall(REPLY.pack(kind, len(body)) + body)


def _describe(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    message = str(error.args[0] if len(error.args) == 1 else error)  # str() of a KeyError has quotes
    return json.dumps([type(error).__name__, message[:MAX_TEXT], text[-MAX_TEXT:]]).encode()


def rebuild(body: bytes) -> Exception:
    """Return the exception that :func:`_describe` wrote, as its own type where that is a builtin."""
    name, message, text = json.loads(body)
    kind = getattr(builtins, str(name), None)
    error: Exception = RuntimeError(f"{name}: {message}")
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError and its like take more than a text
            error = kind(message)
    error.add_note(f"in the reward worker:\n{text}")
    return error


def _limit_memory(limit_bytes: int) -> None:
    # Not RLIMIT_AS: libraries that are only mapped, CUDA's say, are no bomb.
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    oom = Path("/proc/self/oom_score_adj")
    if oom.exists():
        oom.write_text("1000")


if __name__ == "__main__":
    main()
