"""docs/data.md: its worked example runs and prints what the page shows, and its tables are complete."""

import re
from dataclasses import fields
from pathlib import Path
import yaml
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.loader import load_config

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/data.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_example_prints_the_output_on_the_page(tiny_model, tmp_path, monkeypatch, capsys):
    (tmp_path / "model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # which holds the cache of rows
    namespace = {}
    for code in blocks("python"):
        exec(compile(code, "docs/data.md", "exec"), namespace)
        assert capsys.readouterr().out == "".join(re.findall(r"^# > (.*\n)", code, re.MULTILINE))
    batch = namespace["batch"]
    assert {*batch.batch, *batch.non_tensor_batch} <= set(re.findall(r"`(\w+)`", section("Data packers")))


def test_the_page_is_short():
    assert len(PAGE.splitlines()) < 250


def test_the_yaml_is_part_of_a_run(tmp_path):
    own = yaml.safe_load((REPOSITORY / "configs/on_policy.yaml").read_text())
    (shown,) = map(yaml.safe_load, blocks("yaml"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(own | shown))
    assert load_config(path).checkpoint.every_steps == shown["checkpoint"]["every_steps"]


def test_every_key_of_a_dataset_is_explained():
    named = re.findall(r"`(\w+)`", section("Where rows come from"))
    assert not {field.name for field in fields(DatasetConfig)} - set(named)
