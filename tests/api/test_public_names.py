"""Public names of areal_lite.api and areal_lite.data resolve, and an import loads nothing heavy without need."""

import subprocess
import sys

import pytest

from areal_lite import api, data


@pytest.mark.parametrize(("package", "name"), [(package, name) for package in (api, data) for name in package.__all__])
def test_a_public_name_resolves_to_the_object_of_that_name(package, name):
    assert getattr(getattr(package, name), "__name__", name) == name


@pytest.mark.parametrize("package", [api, data])
def test_every_lazy_name_is_public(package):
    assert set(package._MODULES) == set(package.__all__) == set(dir(package))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'RolloutSource'"):
        _ = data.RolloutSource


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("areal_lite.api", "pydantic numpy torch transformers openai"),
        ("areal_lite.data", "torch transformers numpy datasets"),
        ("areal_lite.rollout.dumps.dump_writer", "pydantic aiohttp torch transformers"),  # each run waits for its start
    ],
)
def test_an_import_loads_nothing_heavy(module, heavy):
    code = f"import sys, {module}; print(*set({heavy.split()}) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
