from tests.fixtures.engines import _short_rests, stack, start_engine, start_stub

__all__ = ["_short_rests", "stack", "start_engine", "start_stub"]
