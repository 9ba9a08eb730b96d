"""Machines that are lent until a known time: whether to save before it comes."""

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
    """Return whether this is the time to save: the next step might not end, and nothing was saved in that time yet.

    So a run saves once before its machine goes, and not at all after that.

    Args:
        environment: Where the platform says when the machine goes, in seconds since the epoch.
        now: Seconds since the epoch.
        margin_s: Seconds that saving takes, and some to spare.
        longest_step_s: Seconds of the longest step so far.
        saved_at: When the last checkpoint was saved, in seconds since the epoch.

    Raises:
        ConfigError: If the platform's value is no number.
    """
    name = next((name for name in _VARIABLES if environment.get(name)), None)
    if name is None:
        return False
    try:
        expires = float(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}: it must be the seconds since the epoch at which the machine goes; mend "
            "or unset it"
        ) from None
    begins = expires - margin_s - longest_step_s
    return begins <= now < expires and (saved_at is None or saved_at < begins)
