"""The one pydantic setting all config records share."""

from __future__ import annotations

from pydantic import ConfigDict

STRICT = ConfigDict(
    extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, use_attribute_docstrings=True
)
