"""The garbage collector's pace while engines run."""

from __future__ import annotations

import gc

import pytest

from areal_lite.infra import collector_pace


def test_the_first_engine_relaxes_the_pace_and_the_last_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_pace, "_engines", 0)
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        collector_pace.relax()
        assert gc.get_threshold() == (50_000, 10, 10)
        gc.set_threshold(70_000, 10, 10)  # the user's own choice meanwhile
        collector_pace.relax()
        assert gc.get_threshold() == (70_000, 10, 10)
        collector_pace.restore()
        assert gc.get_threshold() == (70_000, 10, 10)
        collector_pace.restore()
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)
