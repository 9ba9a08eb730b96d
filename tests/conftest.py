"""Settings of all tests."""

from hypothesis import settings

# A loaded machine is no bug; pytest-timeout bounds each test.
settings.register_profile("areal_lite", deadline=None)
settings.load_profile("areal_lite")
