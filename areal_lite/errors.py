"""The exceptions of areal_lite and the exit code of the command line for each.

ArealLiteError            70  base of all errors
├── ConfigError           64  invalid input: config, workflow, row, request
│   └── ContextOverflowError  the prompt fills the context window
├── RunDirBusyError       73  another process uses the run directory
├── StorageError          74  disk full or read-only
├── ServerError           75  inference servers down or failing; a retry may help
├── StarvationError       70  too many batches in a row without an accepted group; 75 if servers failed
├── EpisodeError          70  no episode succeeded, or one failed with ``on_error: raise``; 75 if servers failed
├── TrainingError         70  training diverged or cannot continue
└── CheckpointError       78  no valid checkpoint to resume from
"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "", *, count: int = 1) -> str:
    """Return "; did you mean 'A' or 'B'?" of the ``count`` known names that are nearest, ``otherwise`` if none is."""
    close = difflib.get_close_matches(name, [*known], count)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else otherwise


class ArealLiteError(Exception):
    """Base class; ``exit_code`` is the exit code of the command line."""

    exit_code = 70


class ConfigError(ArealLiteError, ValueError):
    """Invalid input; the message gives the value, the rule and the fix."""

    exit_code = 64


class ContextOverflowError(ConfigError):
    """A prompt leaves no room for an answer in the context window."""

    failure_kind = "context_overflow"


class RunDirBusyError(ArealLiteError):
    """Another live process uses the run directory."""

    exit_code = 73


class StorageError(ArealLiteError):
    """A required file could not be written."""

    exit_code = 74


class ServerError(ArealLiteError):
    """No inference server gave a valid answer within the retry limit."""

    exit_code = 75
    failure_kind = "engine"


class EpisodeError(ArealLiteError):
    """No episode succeeded, or one failed with ``rollout.faults.on_error: raise``.

    Args:
        message: The causes.
        may_pass: Whether another try may succeed, because servers failed and not the agent.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        if may_pass:
            self.exit_code = ServerError.exit_code


class StarvationError(EpisodeError):
    """Too many groups in a row ended without an accepted one."""


class TrainingError(ArealLiteError):
    """Training cannot continue; the message names step and cause."""


class CheckpointError(ArealLiteError):
    """Checkpoints exist, but none is valid."""

    exit_code = 78
