"""Whether a server serves the model of a run, by what it reports."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from areal_lite.errors import ConfigError
from areal_lite.infra.backends.dialect import ServerInfo
from areal_lite.infra.model_identity import ModelIdentity


@pytest.mark.parametrize(
    ("served", "trained", "differ"),
    [
        ("some/model", "other/model", True),
        ("some/model", "some/model", False),
        ("default", "other/model", False),
        ("some/model", "model", False),
        ("./some/model", "other/model", False),
        ("some/model/more", "other/model", False),
        ("some/folder", "other/model", False),
        ("some/model", "some/folder", False),
    ],
)
def test_names_differ_only_if_both_are_models_of_owners_on_the_hub(
    served: str, trained: str, differ: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="another name") if differ else nullcontext():
        ModelIdentity.of(trained).check("http://server", ServerInfo(model=served))
