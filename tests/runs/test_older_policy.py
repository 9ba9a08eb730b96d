"""Which weights an older version of the policy has, during a run and after a resume."""

from __future__ import annotations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from areal_lite.runs.older_policy import OlderPolicy
from areal_lite.servers.weights.published_weights import WeightFolder
from areal_lite.servers.weights.weight_folder import version_name


def test_one_that_never_changes_has_the_first_weights_also_on_a_server_of_another_run(tmp_path: Path) -> None:
    loaded: list[int] = []
    engine: Any = SimpleNamespace(update_weights=lambda weights: loaded.append(weights.version))
    older = OlderPolicy(None, lambda step: WeightFolder(str(step), step), tmp_path, engine)
    for step in range(3):
        older.follow(step)
    older.resume(2)  # nothing is kept, as if its own server had been started with them
    assert loaded == [0]
    (tmp_path / version_name(0)).mkdir()
    older.resume(2)
    assert loaded == [0, 0]


@pytest.mark.parametrize("every", [1, 2, 3, 4])
@pytest.mark.parametrize("kept", [True, False])
def test_a_resumed_run_has_the_older_weights_of_an_uninterrupted_one(every: int, kept: bool, tmp_path: Path) -> None:
    """Those of the step itself if they are gone."""

    def run(number: int) -> OlderPolicy:
        def load(weights: Any) -> None:
            loaded[number] = weights.version

        engine: Any = SimpleNamespace(update_weights=load)
        return OlderPolicy(every, lambda step: WeightFolder(str(step), step), tmp_path, engine)

    loaded = {0: 0}
    for step in range(1, 14):
        run(0).follow(step)
        if kept:
            (tmp_path / version_name(step)).mkdir()
        loaded[1] = step if step % every == 0 else 0  # what its server starts with, or follow() loads
        run(1).resume(step)
        assert loaded[1] == (loaded[0] if kept or loaded[0] == 0 else step), step
