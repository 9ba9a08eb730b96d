"""The names of the top level are listed, typed and loaded with their first use."""

from __future__ import annotations
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
import pytest
import areal_lite

ROOT = Path(__file__).parents[2]
SOUND = """\
import areal_lite
from areal_lite import Trainer, api, load_run, train, workflow_context
from areal_lite.config.run_config import RunConfig

config: RunConfig = Trainer("run.yaml", "seed=1").config
load_run("runs/demo", "reward<1").episodes
areal_lite.load_run("runs/demo", frames="polars").tokens
context = workflow_context.get()
group: api.Group = areal_lite.api.Group(task_id=1, group_id="1", status=api.EpisodeStatus.ACCEPTED, data={})
"""
WRONG = """\
import areal_lite
areal_lite.Trianer
areal_lite.Trainer(7)
areal_lite.Trainer("run.yaml").trian()
areal_lite.load_run("runs/demo").episode
areal_lite.load_run("runs/demo", frames="dask")
areal_lite.workflow_context.gett()
areal_lite.api.Gruop
"""
SETTINGS = """\
[mypy]
follow_imports = silent
ignore_missing_imports = true
# What does not decide the types of these names takes a minute to check.
[mypy-torch.*,transformers.*,numpy.*,pydantic.*,openai.*,rich.*,aiohttp.*,httpx2.*,areal_lite.runs.*,areal_lite.trainer.*]
follow_imports = skip
[mypy-areal_lite.data.*,areal_lite.models.*,areal_lite.servers.*,areal_lite.rollout.episodes.*]
follow_imports = skip
"""


def test_the_names_of_the_top_level_are_listed_and_a_wrong_one_is_an_error() -> None:
    assert dir(areal_lite) == sorted(areal_lite.__all__)
    assert {"Trainer", "train", "load_run", "api", "workflow_context"} <= set(dir(areal_lite))
    assert all(getattr(areal_lite, name) is not None for name in dir(areal_lite))
    assert areal_lite.load_run.__module__ == "areal_lite.tools.export.frames"
    assert areal_lite.workflow_context.__name__ == "areal_lite.rollout.workflow_context"
    with pytest.raises(AttributeError, match="module 'areal_lite' has no attribute 'Trianer'"):
        areal_lite.Trianer  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "checker",
    [
        ["mypy", "--config-file", "mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache" / "public_names")],
        pytest.param(["basedpyright", "--level", "error", "--pythonpath", sys.executable], marks=pytest.mark.slow),
    ],
    ids=["mypy", "pyright"],
)
def test_a_users_file_is_type_checked(tmp_path: Path, checker: list[str]) -> None:
    if find_spec(checker[0]) is None:
        pytest.skip(f"needs {checker[0]}")  # pyright as wheels, which download nothing further
    for name, text in {"sound.py": SOUND, "wrong.py": WRONG, "mypy.ini": SETTINGS}.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", *checker, "sound.py", "wrong.py"],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = re.findall(r"(\w+)\.py:(\d+)(?::\d+)?:? (?:- )?error", done.stdout)
    lines = {("wrong", str(number)) for number in range(2, 2 + WRONG.count("\nareal_lite"))}
    assert set(found) == lines, done.stdout + done.stderr
