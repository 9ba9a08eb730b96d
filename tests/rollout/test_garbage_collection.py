"""The garbage collector's pace while engines run."""

from __future__ import annotations
import gc
from collections.abc import Callable
from typing import Any
import pytest
from areal_lite.rollout import garbage_collection
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine


def test_the_first_engine_relaxes_the_pace_and_the_last_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "_engines", 0)
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        garbage_collection.relax()
        assert gc.get_threshold() == (50_000, 10, 10)
        gc.set_threshold(70_000, 10, 10)  # the user's own choice meanwhile
        garbage_collection.relax()
        assert gc.get_threshold() == (70_000, 10, 10)
        garbage_collection.restore()
        assert gc.get_threshold() == (70_000, 10, 10)
        garbage_collection.restore()
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_the_pace_is_relaxed_while_an_engine_runs(
    start_stub: Callable[..., Any], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    before = gc.get_threshold()
    engine = start_engine(start_stub())
    during = gc.get_threshold()[0]
    engine.destroy()
    assert during >= 50_000 and gc.get_threshold() == before
