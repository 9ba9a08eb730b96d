"""A reward that a function returned, checked; imports little, because each process that computes rewards loads it."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LARGEST_REWARD = 3.4028234663852886e38  # numpy.finfo(numpy.float32).max


def as_reward(value: Any) -> float:
    """Return ``value`` as a float."""
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
    """A reward and what its function returned beside it."""

    value: float | list[float]
    """One number, or one for each token of the answer."""
    facts: dict[str, float | str | None]
    """Numbers and texts beside the reward, by name."""


def read_reward(returned: Any, key: str | None = None) -> Reward:
    """Return the reward, and the facts beside it if ``returned`` is a dict with ``score`` or ``reward``, or ``key``."""
    facts: dict[str, float | str | None] = {}
    if key is not None and not (isinstance(returned, Mapping) and key in returned):
        raise ValueError(
            f"the reward is {repr(returned)[:200]}: rollout.rewards.key is {key!r}, so return a dict with it"
        )
    if isinstance(returned, Mapping):
        names = ("score", "reward") if key is None else (key,)
        if (name := next((name for name in names if name in returned), None)) is None:
            raise ValueError(f"the reward is a dict of {[*returned][:8]}: give the number as 'score'")
        facts = {str(key): _fact(str(key), value) for key, value in returned.items() if key != name}
        returned = returned[name]
    if getattr(returned, "ndim", None) == 1 and len(returned) > 1:  # of numpy or torch
        returned = returned.tolist()
    if isinstance(returned, list | tuple):
        return Reward([as_reward(number) for number in returned], facts)
    return Reward(as_reward(returned), facts)


def reward_of(function: Callable[..., Any], key: str | None, /, *args: Any, **kwargs: Any) -> float | dict[str, Any]:
    """Call a reward function; return its reward as JSON, with the facts beside it as :func:`read_reward` takes them."""
    value, facts = read_reward(function(*args, **kwargs), key)
    return {key or "score": value, **facts} if facts or key or not isinstance(value, float) else value


def _fact(name: str, value: Any) -> float | str | None:
    if value is None or isinstance(value, str):
        return value and value.encode(errors="replace").decode()  # without lone surrogates, which no JSON has
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"the reward's {name!r} is {repr(value)[:200]}: beside the score, give numbers and texts"
        ) from None
