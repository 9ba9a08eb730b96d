"""Strictness, number types, rules and docstrings, which all config records share."""

from typing import Annotated, Any
from pydantic import ConfigDict, Field
from areal_lite.errors import ConfigError

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True)
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def refuse(faults: dict[str, bool]) -> None:
    """Raise ConfigError with every message whose condition holds."""
    if messages := [message for message, holds in faults.items() if holds]:
        raise ConfigError("; ".join(messages))


def meaning_of(record: type[Any], name: str) -> str:
    """Return the docstring of a field as plain text on one line, searching base classes; empty if there is none."""
    infos = [getattr(base, "__pydantic_fields__", {}).get(name) for base in record.__mro__]
    docstring = next((info.description for info in infos if info and info.description), "")
    return " ".join(docstring.replace("``", "").split())
