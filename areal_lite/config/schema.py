"""Strictness and number types that all config records share."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True)
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
