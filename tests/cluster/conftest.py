"""Engines, stubs and the YAML of the tiny model."""

from tests.e2e.conftest import run_yaml, undo_determinism
from tests.fixtures.engines import _short_rests, stack, start_engine, start_stub

__all__ = ["_short_rests", "run_yaml", "stack", "start_engine", "start_stub", "undo_determinism"]
