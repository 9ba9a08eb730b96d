"""README.md and docs/ are true: their code runs, and the files, tests and names they list exist."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from areal_lite.config.keys import describe_fields
from areal_lite.config.loader import KINDS, class_of, load_config
from areal_lite.config.run_config import RunConfig

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_the_readme_fits_two_screens_and_its_commands_come_first():
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 140
    first = "\n".join(lines[:25])
    assert "make demo" in first and "make test" in first


def test_the_agent_and_the_yaml_of_the_readme_train(tiny_model, tmp_path):
    (agent,) = blocks(README, "python")
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "my_agent.yaml").write_text(blocks(README, "yaml")[0])
    small = ["rollout.group_size=2", "rollout.consumer_batch_size=2", "trainer.total_steps=1"]
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        "my_agent.yaml",
        f"model_path={tiny_model}",
        *small,
    ]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr

    run_dir = tmp_path / "runs/my_agent/trial"
    before, record, after = map(json.loads, (run_dir / "metrics.jsonl").read_bytes().splitlines())
    assert (before["eval/episodes"], after["eval/episodes"]) == (64, 64)
    documented = set(re.findall(r"`([\w/]+)`", (REPOSITORY / "docs/metrics.md").read_text()))
    documented |= {name.replace("/seconds_", "/ms_per_token_") for name in documented}
    documented |= {f"train/{of}/{name}" for of in ("engine_mismatch", "staleness_drift") for name in documented}
    assert not {name.replace("servers/0/", "servers/N/") for name in record} - documented
    lines = [json.loads(line) for path in run_dir.rglob("rollout/*/*.jsonl") for line in path.read_bytes().splitlines()]
    fields = re.findall(r"`([\w.]+)`", (REPOSITORY / "docs/trajectories.md").read_text())
    for line in lines:
        turns = {f"turns.{name}" for turn in line["turns"] for name in turn}
        timings = {f"timings.{name}" for name in line["timings"]}
        assert not (set(line) | turns | timings) - set(fields)


def test_the_three_lines_for_sglang_load(tmp_path):
    base, change = map(yaml.safe_load, blocks(README, "yaml"))
    assert set(change) | set(change["rollout"]) == {"experiment_name", "rollout", "backend", "addresses"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(base | change | {"rollout": base["rollout"] | change["rollout"]}))
    assert load_config(path).rollout.backend == "sglang"


def test_the_sglang_config_differs_from_on_policy_in_three_values():
    on_policy, sglang = (
        yaml.safe_load((REPOSITORY / f"configs/{n}.yaml").read_text()) for n in ("on_policy", "sglang")
    )
    assert _differing_keys(on_policy, sglang) == {"experiment_name", "rollout.backend", "rollout.addresses"}


def _differing_keys(one, other, prefix=""):
    keys = one.keys() | other.keys()
    differing = set()
    for key in keys:
        a, b = one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            differing |= _differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            differing.add(prefix + key)
    return differing


def test_held_out_and_training_rows_of_reasoning_gym_differ():
    # Row i of a task uses seed + i.
    config = load_config(REPOSITORY / "configs/reasoning_gym.yaml")
    assert config.train_dataset.path == config.eval_dataset.path
    train, held_out = config.train_dataset.kwargs, config.eval_dataset.kwargs
    assert held_out["seed"] >= train["seed"] + train["size"]


@pytest.mark.parametrize("text", blocks("\n".join(p.read_text() for p in DOCUMENTS), "python"))
def test_python_in_documentation_compiles(text):
    assert compile(text, "document", "exec").co_code


def test_the_tree_lists_exactly_the_existing_rooms():
    text = (REPOSITORY / "docs/architecture.md").read_text()
    rooms = re.findall(r"^(areal_lite/[\w/]+)/ +\S", text, re.MULTILINE)
    assert len(rooms) == len(set(rooms))
    folders = {path.parent.relative_to(REPOSITORY) for path in (REPOSITORY / "areal_lite").rglob("__init__.py")}
    assert set(rooms) == {str(folder) for folder in folders} - {"areal_lite"}


@pytest.mark.parametrize(("page", "least"), [("docs/invariants.md", 60), ("docs/security.md", 16)])
def test_every_promise_names_its_tests(page, least):
    rows = re.findall(r"^\| (.+) \| (.+) \|$", (REPOSITORY / page).read_text(), re.MULTILINE)[1:]
    assert len(rows) > least
    for promise, tests in rows:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", tests), promise


def test_each_trial_of_the_security_page_has_its_row():
    trials = re.findall(r"^\| T(\d+) ", (REPOSITORY / "docs/security.md").read_text(), re.MULTILINE)
    assert trials == [str(number) for number in range(1, 18)]


@functools.cache
def names_of_tests():
    return {
        name
        for path in (REPOSITORY / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_tests_and_functions_in_documentation_exist(path):
    text = path.read_text()
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (path.parent / link).exists(), link
    for name in re.findall(r"`((?:areal_lite|configs|examples|workflows|benchmarks|tests)/[\w/.]+\.\w+)", text):
        assert (REPOSITORY / name).exists(), name
    for file, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text):
        source = file if (REPOSITORY / file).exists() else f"areal_lite/{file}"
        assert re.search(rf"(def|class) {name}\b", (REPOSITORY / source).read_text()), f"{file}::{name}"
    for name in re.findall(r"`(?:::)?(test_(?:\w+_){3}\w+)`", text):
        assert name in names_of_tests(), name


def test_every_item_of_the_five_systems_has_a_place_a_test_and_existing_keys():
    tables, not_in_a_run = (REPOSITORY / "docs/seeds.md").read_text().split("\n## Not in a run\n")
    items = [line.strip("|").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    items = [item for item in items if item[0].strip() != "item"]
    assert len(items) > 200
    for _, place, tests, *difference in items:
        assert place and re.fullmatch(r"(`tests/[\w/]+\.py::test_\w+`(, )?)+", tests), place
        assert not (place.startswith("*") and difference[0].strip()), "not in a run: the last section says why"
    assert any(place.startswith("*not in a run*") for _, place, *_ in items) and not_in_a_run.count("\n| ") > 2
    keys = {entry.key for root in (RunConfig, *map(class_of, KINDS)) for entry in describe_fields(root)}
    sections = "train_dataset|eval_dataset|rollout|trainer|evaluation|checkpoint|server"
    named = {key for _, place, *_ in items for key in re.findall(rf"`((?:{sections})\.[\w.]+)", place)}
    assert not named - keys


def test_every_core_dependency_is_justified():
    import tomllib

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    text = (REPOSITORY / "docs/architecture.md").read_text()
    justified = re.findall(r"^\| ([\w-]+) \|", text.split("## Dependencies")[1].split("\n## ")[0], re.MULTILINE)
    assert set(justified) - {"package"} == names
