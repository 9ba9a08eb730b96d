"""docs/data.md: its worked example runs and prints what the page shows, and its tables are complete."""

import re
from dataclasses import fields
from pathlib import Path

import yaml

from areal_lite.api.config import CheckpointConfig, DatasetConfig
from areal_lite.api.config_loader import load_config

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
STEP = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_example_runs_and_prints_what_the_page_shows(tiny_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # the cache of rows
    namespace = {}
    steps = STEP.findall(PAGE)
    assert len(steps) == PAGE.count("```python\n") == PAGE.count("```text\n")
    for code, shown in steps:
        exec(compile(code, "docs/data.md", "exec"), namespace)
        assert capsys.readouterr().out == shown


def test_every_key_of_a_dataset_section_is_explained():
    text = section("Where rows come from")
    assert not {field.name for field in fields(DatasetConfig)} - set(re.findall(r"`(\w+)", text))
