"""The keys of other systems: the rows of the table name functions and keys that exist, and each field does its part."""

from __future__ import annotations
from collections.abc import Mapping
import pytest
from areal_lite.tools.doctor.origin_keys import CONDITIONS, CONVERSIONS, ORIGINS, UNUSED, At


@pytest.mark.parametrize("origin", ORIGINS)
def test_what_the_rows_name_exists(origin: str) -> None:
    rows = [at for _, at in ORIGINS[origin]]
    keys = {at.key for at in rows}
    assert {at.when.partition("=")[0] for at in rows if at.when} <= keys | CONDITIONS.keys()
    assert {key for at in rows for key in ([at.take] if isinstance(at.take, str) else at.take) if key} <= keys
    assert {at.convert for at in rows if at.convert and not isinstance(at.convert, Mapping)} <= CONVERSIONS.keys()


def test_a_row_converts_by_its_fields() -> None:
    values = {"on": True, "mode": "a", "x": 1, "y": 2}.get
    assert At("k").converted(3, values) == 3
    assert At("k", when="on").converted(3, values) == 3 and At("k", when="off").converted(3, values) is UNUSED
    assert At("k", when="mode=a").converted(3, values) == 3 and At("k", when="mode=b").converted(3, values) is UNUSED
    assert At("k", write=None).converted(3, values) is None
    assert At("k", take="x").converted(3, values) == 1 and At("k", take=["x", "y"]).converted(3, values) == [1, 2]
    named = At("k", convert={"a": "b"})
    assert [named.converted(value, values) for value in ("a", "c", None, "")] == ["b", "c", UNUSED, UNUSED]
    assert At("k", convert={None: "none"}).converted(None, values) == "none"
    assert At("k", convert="limit").converted(-1, values) is None
