"""Whether a server serves the model of a run, by what it reports."""

from __future__ import annotations
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
import pytest
from areal_lite.errors import ConfigError
from areal_lite.servers.client.model_identity import ModelIdentity
from areal_lite.servers.dialects.dialect import ServerInfo


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
        ModelIdentity(trained).check("http://server", ServerInfo(model=served))


OURS = {"vocab_size": 64, "hidden_size": 8, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "told", "differences"),
    [
        (OURS, {"vocab_size": 99}, "a model that it does not name, the run trains ours: vocab_size 99 instead of 64"),
        (OURS, {"vocab_size": 64}, None),
        ({}, {"vocab_size": 99}, None),
        (OURS, {}, None),
        (OURS, {"context_length": 8192}, "a context of 8192 tokens instead of 4096"),
        (OURS, {"context_length": 4096}, None),
        ({}, {"context_length": 8192}, None),
        (OURS | {"rope_scaling": {"factor": 2}}, {"context_length": 8192}, None),
        (OURS, {"model": "theirs"}, "serves theirs, .*: hidden_size 16 instead of 8. Serve"),
        (
            OURS,
            {"model": "theirs", "vocab_size": 99},
            "ours: vocab_size 99 instead of 64, hidden_size 16 instead of 8.",
        ),
        ({"vocab_size": 64}, {"model": "theirs"}, None),
        (OURS | {"num_hidden_layers": 2}, {"model": "theirs"}, "ours: hidden_size 16 instead of 8. Serve"),
        ({}, {"model": "theirs"}, None),
    ],
)
def test_facts_that_both_sides_have_are_compared(
    config: dict[str, Any],
    told: dict[str, Any],
    differences: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text(json.dumps({"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2}))
    with pytest.raises(ConfigError, match=differences) if differences else nullcontext():
        ModelIdentity("ours", config).check("http://server", ServerInfo(**told))
    ModelIdentity().check("http://server", ServerInfo(**told))
