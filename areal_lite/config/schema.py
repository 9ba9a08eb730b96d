"""Strictness, number types, rules and docstrings, which all config records share."""

import os
from typing import Annotated, Any
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from areal_lite.errors import ConfigError

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True)
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
Above1 = Annotated[float, Field(gt=1)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
LocalOrName = Annotated[str, AfterValidator(os.path.expanduser)]
"""A folder, which may begin with ~, or a hub name."""
Share = Annotated[float, Field(ge=0, le=1)]


def checked(value: Any, annotation: Any, where: str) -> Any:
    """Return ``value`` as the type of ``annotation``, such as ``Above0 | None``; ConfigError if it is none."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError as error:
        rule = error.errors(include_url=False)[0]["msg"].replace("Input should", "it must")
        raise ConfigError(f"{where} is {value!r}: {rule}") from None


def refuse(faults: dict[str, bool]) -> None:
    """Raise ConfigError with every message whose condition holds."""
    if messages := [message for message, holds in faults.items() if holds]:
        raise ConfigError("; ".join(messages))


def meaning_of(record: type[Any], name: str) -> str:
    """Return the docstring of a field as plain text on one line, searching base classes; empty if there is none."""
    infos = [getattr(base, "__pydantic_fields__", {}).get(name) for base in record.__mro__]
    docstring = next((info.description for info in infos if info and info.description), "")
    return " ".join(docstring.replace("``", "").split())
