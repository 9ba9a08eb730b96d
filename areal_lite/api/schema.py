"""The one pydantic setting all config records share."""

from __future__ import annotations

from pydantic import ConfigDict

STRICT = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False, use_attribute_docstrings=True)
