"""Functions are found by name or dotted path, and options are checked before they are called."""

from __future__ import annotations
import pytest
from areal_lite.errors import ConfigError
from areal_lite.trainer.rl.algorithm import chosen_function

LIMIT = 3


def double(x: int, extra: int = 0, *, offset: int = 0) -> int:
    return 2 * x + offset + extra


def total(x: int, **numbers: int) -> int:
    return x + sum(numbers.values())


TABLE = {"double": double}


@pytest.mark.parametrize("path", [f"{__name__}.total", f"{__name__}:total"])
def test_a_dotted_path_is_imported(path: str) -> None:
    assert chosen_function(TABLE, path, {"a": 2}, where="f")(1) == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dubble", "f is 'dubble': there is no such function; did you mean 'double'"),
        ("xyz", "no such function: choose one of double, or give the dotted path"),
        (f"{__name__}.LIMIT", "which is 3: it must be a function"),
    ],
)
def test_a_name_without_a_function_is_an_error(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chosen_function(TABLE, name, {}, where="f")


def test_options_are_filled_in_if_the_function_has_them() -> None:
    assert chosen_function(TABLE, "double", {"offset": 1}, where="f")(2) == 5
    for option, says in (("ofset", "has no argument 'ofset'; it has offset"), ("extra", "must be keyword-only")):
        with pytest.raises(ConfigError, match=rf"f_kwargs: .*{says}"):
            chosen_function(TABLE, "double", {option: 1}, where="f")
