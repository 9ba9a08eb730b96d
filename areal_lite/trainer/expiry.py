"""Machines that are reclaimed at a known time: when to save before that."""

from __future__ import annotations

from collections.abc import Mapping

from areal_lite.errors import ConfigError

_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def expires_soon(
    environment: Mapping[str, str],
    now: float,
    *,
    margin_s: float,
    longest_step_s: float,
    saved_at: float | None = None,
) -> bool:
    """Return whether to save now, because the machine may be reclaimed during the next step.

    A run saves once in that window before the machine expires, and not after it.

    Args:
        environment: Environment variables, with the platform's expiration time in seconds since the epoch.
        now: Seconds since the epoch.
        margin_s: Seconds that saving takes, with some to spare.
        longest_step_s: Seconds of the longest step so far.
        saved_at: Time of the last checkpoint, in seconds since the epoch.

    Raises:
        ConfigError: If the platform's value is not a number.
    """
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None:
        return False
    try:
        expires = float(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}: it must be the time at which the machine expires, in seconds since the "
            "epoch; fix or unset it"
        ) from None
    begins = expires - margin_s - longest_step_s
    return begins <= now < expires and (saved_at is None or saved_at < begins)
