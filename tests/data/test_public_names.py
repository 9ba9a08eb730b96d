"""The public names of areal_lite.data resolve, and importing the package loads nothing heavy."""

import subprocess
import sys

import pytest

from areal_lite import data


@pytest.mark.parametrize("name", data.__all__)
def test_a_public_name_resolves_to_the_object_of_that_name(name):
    assert getattr(data, name).__name__ == name


def test_every_lazy_name_is_public():
    assert set(data._MODULES) == set(data.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'RolloutSource'"):
        _ = data.RolloutSource


def test_importing_the_package_loads_no_torch():
    code = "import sys, areal_lite.data; print(*{'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
