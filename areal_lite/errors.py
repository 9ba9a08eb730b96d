"""Every error a user can meet, each with the exit code the command line ends with.

ArealLiteError            70  internal: an invariant of ours is broken
├── ConfigError           64  a value the user can fix: config, workflow, row, request
│   └── ContextOverflowError  a prompt leaves no room in the context window
├── RunDirBusyError       73  another run holds the run directory
├── StorageError          74  disk full or not writable
├── ServerError           75  inference servers gone or out of order; trying again may help
├── StarvationError       75  nothing was accepted for a bounded number of batches
├── EpisodeError          70  an episode failed under ``on_error: raise``
├── TrainingError         70  training diverged or cannot go on
└── CheckpointError       78  no valid checkpoint to resume from
"""

from __future__ import annotations


class ArealLiteError(Exception):
    """Base of all errors raised on purpose; ``exit_code`` is what the command line returns."""

    exit_code = 70


class ConfigError(ArealLiteError, ValueError):
    """A value that breaks a rule; the message says value, rule and fix."""

    exit_code = 64


class ContextOverflowError(ConfigError):
    """A prompt leaves no room for an answer in the context window."""

    failure_kind = "context_overflow"


class RunDirBusyError(ArealLiteError):
    """Another live process owns the run directory."""

    exit_code = 73


class StorageError(ArealLiteError):
    """A file that must not be lost could not be written."""

    exit_code = 74


class ServerError(ArealLiteError):
    """An inference server gave no usable answer within the retry budget."""

    exit_code = 75
    failure_kind = "engine"


class StarvationError(ArealLiteError):
    """Too many episodes in a row ended without an accepted trajectory."""

    exit_code = 75


class EpisodeError(ArealLiteError):
    """An episode failed while ``rollout.on_error`` is ``raise``."""


class TrainingError(ArealLiteError):
    """Training cannot go on; the message names step and cause."""


class CheckpointError(ArealLiteError):
    """Checkpoints exist but none can be used."""

    exit_code = 78
