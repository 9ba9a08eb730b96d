"""What a rule says of one key of another system, and the conversions that the tables of rules share.

A rule that needs other keys of the origin asks for them; :data:`UNUSED` means that the key has no effect in the origin,
or no counterpart with this value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

UNUSED = object()
Get = Callable[[str], Any]
"""Returns the value of a key of the origin: what the config sets, else the default."""
Convert = Callable[[Any, Get], Any]


def same(value: Any, get: Get) -> Any:
    return value


class Rule(NamedTuple):
    """What a key of the origin is here."""

    origin: str
    default: Any
    """Of the origin; :data:`UNUSED` if it has none, so that only a config that sets the key needs it here."""
    key: str
    convert: Convert = same
    why: str = ""


def number(value: Any) -> float:
    """Return ``value`` as a number; 0 if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def named(names: Mapping[Any, Any]) -> Convert:
    return lambda value, get: names.get(value, UNUSED if value in (None, "") else value)


def limit(value: Any, get: Get) -> Any:
    return None if value is None or number(value) < 0 else value


def given(value: Any, get: Get) -> Any:
    return UNUSED if value is None else value


def when(condition: Callable[[Get], Any], convert: Convert = same) -> Convert:
    return lambda value, get: convert(value, get) if condition(get) else UNUSED


def minibatches(value: Any, batch: Any) -> Any:
    return max(1, int(number(batch) // size)) if (size := number(value)) >= 1 else UNUSED


KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "low_var_kl+": "k3+"}
"""Estimators of the KL divergence by the names of others."""
LOSS = "trainer.loss_kwargs."
