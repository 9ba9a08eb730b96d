"""Functions are found by name or dotted path, and options are checked before they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_lite.errors import ConfigError
from areal_lite.trainer.registry import Registry

LIMIT = 3


def double(x: int, extra: int = 0, *, offset: int = 0) -> int:
    return 2 * x + offset + extra


def total(x: int, **numbers: int) -> int:
    return x + sum(numbers.values())


@pytest.fixture
def registry() -> Registry[Callable[..., Any]]:
    made: Registry[Callable[..., Any]] = Registry("number function")
    assert made.register("double")(double) is double
    return made


def test_a_name_is_registered_once(registry: Registry[Any]) -> None:
    registry.register("double")(double)
    with pytest.raises(ConfigError, match="there is already a number function 'double'"):
        registry.register("double")(total)
    assert registry.get("double", where="f") is double
    registry.register("add")(total)
    assert registry.names() == ["add", "double"]


@pytest.mark.parametrize("path", [f"{__name__}.total", f"{__name__}:total"])
def test_a_dotted_path_is_imported(registry: Registry[Any], path: str) -> None:
    assert registry.get(path, where="f")(1, a=2) == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dubble", "f is 'dubble': there is no such number function; did you mean 'double'"),
        ("xyz", "no such number function; choose one of double, or give the dotted path"),
        (f"{__name__}.LIMIT", "which is 3: it must be a function"),
    ],
)
def test_a_name_without_a_function_is_an_error(registry: Registry[Any], name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        registry.get(name, where="f")


def test_options_are_bound_if_the_function_has_them(registry: Registry[Any]) -> None:
    assert registry.bound("double", {"offset": 1}, where="f")(2) == 5
    assert registry.bound(f"{__name__}.total", {"anything": 4}, where="f")(1) == 5
    for option, says in (("ofset", "has no argument 'ofset'; it has offset"), ("extra", "must be keyword-only")):
        with pytest.raises(ConfigError, match=rf"f_kwargs: .*{says}"):
            registry.bound("double", {option: 1}, where="f")
