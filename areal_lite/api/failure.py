"""Why an episode failed or was stopped: a kind to decide and count by, and the text for people.

Each error is attributed once, where it crosses a boundary (:func:`attributed_to`) or by its class
(``failure_kind`` in :mod:`areal_lite.errors`). No code matches on an error's text.
"""

import contextlib
import traceback
from dataclasses import dataclass
from enum import StrEnum

MAX_TRACEBACK = 4000
"""Maximum characters of a traceback; the last frames are kept."""


class FailureKind(StrEnum):
    """The cause of a failure."""

    DEADLINE = "deadline"
    """The episode ran longer than ``rollout.faults.episode_timeout_s``."""
    ENGINE = "engine"
    """No inference server gave a usable answer."""
    CONTEXT_OVERFLOW = "context_overflow"
    """A prompt leaves no room in the model's context window."""
    AGENT = "agent"
    """The agent or workflow raised."""
    ENVIRONMENT = "environment"
    """The agent's environment raised, or did not answer in time."""
    REWARD = "reward"
    """The reward function raised, timed out, or returned no finite number."""
    OUTPUT = "output"
    """The workflow returned something that breaks its contract."""
    DATA = "data"
    """The dataset row could not be turned into workflow input."""
    WORKER = "worker"
    """The worker process that ran the group died."""
    CANCELLED = "cancelled"
    """The run stopped the episode."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of an episode that failed or was cancelled."""

    kind: FailureKind
    type: str
    """Class name of the exception; empty if nothing was raised."""
    message: str
    traceback: str = ""
    """The last frames and the hint, at most ``MAX_TRACEBACK`` characters; empty if nothing was raised."""
    hint: str = ""
    """Cause and fix that the message does not give: ``failure_hint`` of the exception."""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure of an exception; one without attribution is the agent's."""
        leaf, kind = error, _kind_of(error)
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
            kind = _kind_of(leaf) or kind  # the innermost boundary attributed it first
        hint = getattr(error, "failure_hint", "")
        text = "".join([*traceback.format_exception(error), hint and f"{hint}\n"])[-MAX_TRACEBACK:]
        try:
            message = str(leaf)
        except Exception:  # a user's class may break its own text
            message = "(its text cannot be read)"
        text, message = (each.encode(errors="replace").decode() for each in (text, message))  # no lone surrogates
        return cls(kind or FailureKind.AGENT, type(leaf).__name__, message, text, hint)

    @classmethod
    def cancelled(cls, reason: str) -> "Failure":
        """Return the failure of an episode that the run stopped."""
        return cls(FailureKind.CANCELLED, "", reason)

    @property
    def text(self) -> str:
        """The traceback, or the message without one; for logs and dumps."""
        return self.traceback or self.message

    @property
    def summary(self) -> str:
        """One line: type, message and hint."""
        first_line = self.message.strip().partition("\n")[0][:200]
        if self.hint:
            first_line = f"{first_line.rstrip('.')}. {self.hint}"
        return f"{self.type}: {first_line}" if self.type else first_line


class attributed_to:
    """A context manager that attributes an exception raised inside to ``kind``, unless it is attributed already."""

    # A class, because every episode passes through it: a generator costs several times as much.
    __slots__ = ("_kind",)

    def __init__(self, kind: FailureKind) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not hasattr(error, "failure_kind"):
            with contextlib.suppress(AttributeError):  # a class with slots keeps the default
                error.failure_kind = self._kind  # type: ignore[attr-defined]


def _kind_of(error: BaseException) -> FailureKind | None:
    try:
        return FailureKind(getattr(error, "failure_kind", ""))
    except ValueError:  # it has none, or one of its own
        return None
