"""Error answers of SGLang's HTTP dialect, for programs that speak it, and the check of fields that gives them."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar
from pydantic import ConfigDict, ValidationError

STRICT = ConfigDict(strict=True, allow_inf_nan=False)
T = TypeVar("T")


class BadRequest(Exception):
    def __init__(self, body: dict[str, Any], *, status: int = 400) -> None:
        super().__init__(str(body))
        self.body = body
        self.status = status


def invalid_value(message: str, *, status: int = 400) -> BadRequest:
    """Return the error for an invalid value, as SGLang sends it: ``{"error": {"message"}}``."""
    return BadRequest({"error": {"message": message}}, status=status)


def wrong_type(message: str) -> BadRequest:
    """Return the error for a value of the wrong type, as SGLang sends it: ``{"object": "error", ...}``."""
    return BadRequest({"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400})


def checked(kind: type[T], given: Mapping[str, Any]) -> T:
    """Return the ``STRICT`` pydantic dataclass ``kind`` of the values it has fields for; None means the default. Raises
    BadRequest for the first wrong value."""
    fields: Any = kind.__dict__["__dataclass_fields__"]
    try:
        return kind(**{name: given[name] for name in fields if given.get(name) is not None})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"] if part != "[key]")
        rule = re.sub(r"^(Input|List|String) should", "it must", first["msg"].removeprefix("Value error, "))
        rule = re.sub("tuple|frozenset", "list", rule).replace(" after validation", "")
        value = "missing" if first["type"] == "missing" else repr(first["input"])[:200]
        refuse = wrong_type if first["type"].endswith("_type") else invalid_value
        raise refuse(f"{name} is {value}: {rule}.") from None


def version_of(given: Any) -> str | None:
    """Return the weight version that a field names; raises BadRequest for another type."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
        raise wrong_type(f"the weight version must be a string, got {given!r}.")
    return None if given is None else str(given)
