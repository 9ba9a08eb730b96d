"""Large imports are left out of garbage collections."""

from __future__ import annotations
import gc
import sys
import pytest
from areal_lite.processes.quick_import import quick_import


def test_nothing_is_collected_inside_and_what_is_made_there_is_never_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), quick_import():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_a_process_that_has_imported_them_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", gc)
    before = gc.get_freeze_count()
    with quick_import():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= before
