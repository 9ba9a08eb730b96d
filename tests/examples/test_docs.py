"""README.md and docs/ are true: their code runs, and the files, tests and names they list exist."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import create_autospec
import pytest
import yaml
import areal_lite
from areal_lite.cli.commands import parse
from areal_lite.cli.main import main
from areal_lite.config.keys import describe_fields
from areal_lite.config.loader import KINDS, class_of, load_config
from areal_lite.config.run_config import RunConfig
from docs import site

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


@pytest.fixture(scope="module")
def first_run(tiny_model, tmp_path_factory):
    """Return the folder of a run with the agent and the YAML of the README, which tests may only read."""
    folder = tmp_path_factory.mktemp("first")
    (agent,) = blocks(README, "python")
    (folder / "my_agent.py").write_text(agent)
    (folder / "my_agent.yaml").write_text(blocks(README, "yaml")[0])
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return folder / "runs/my_agent/trial"


def test_the_agent_and_the_yaml_of_the_readme_train(first_run):
    before, record, after = map(json.loads, (first_run / "metrics.jsonl").read_bytes().splitlines())
    assert (before["eval/episodes"], after["eval/episodes"]) == (64, 64)
    documented = set(re.findall(r"`([\w/]+)`", (REPOSITORY / "docs/metrics.md").read_text()))
    documented |= {name.replace("/seconds_", "/ms_per_token_") for name in documented}
    documented |= {f"train/{of}/{name}" for of in ("engine_mismatch", "staleness_drift") for name in documented}
    assert not {name.replace("servers/0/", "servers/N/") for name in record} - documented
    dumps = first_run.rglob("rollout/*/*.jsonl")
    lines = [json.loads(line) for path in dumps for line in path.read_bytes().splitlines()]
    fields = re.findall(r"`([\w.]+)`", (REPOSITORY / "docs/trajectories.md").read_text())
    for line in lines:
        turns = {f"turns.{name}" for turn in line["turns"] for name in turn}
        timings = {f"timings.{name}" for name in line["timings"]}
        assert not (set(line) | turns | timings) - set(fields)


def commands():
    """Yield each command line of README and docs/ as words, without what is optional in it."""
    text = re.sub(r"\bruns/\w+/trial\b", "RUN", "\n".join(path.read_text() for path in DOCUMENTS))
    for line in dict.fromkeys(re.findall(r"^ *(?:\.venv/bin/)?areal-lite (.+)$", text, re.MULTILINE)):
        words = shlex.split(re.sub(r"\[.*\]|\|.*", "", line), comments=True)
        yield pytest.param(words, id=" ".join(words))


READS = {"completion", "export", "inspect", "plot", "rescore", "verify"}
"""Commands that start nothing: they run here. Of the others the arguments and the named config are checked; tests of
their own run them."""


@pytest.mark.parametrize("words", list(commands()))
def test_a_command_of_the_documentation_runs(words, first_run, tmp_path, monkeypatch, capsys):
    folder, dumps = first_run.parents[2], next(first_run.glob("rollout/0/*.jsonl"))
    episode = f"{dumps.relative_to(first_run)}:1"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "my_reward.py").write_text(
        "def fn(prompt, completion, prompt_ids, completion_ids): return len(completion_ids)"
    )
    stands_for = {"ID": episode, "RUN_A": "RUN", "RUN_B": "RUN", "pkg.module.fn": "my_reward.fn"}
    words = [re.sub(r"^RUN\b", str(first_run), stands_for.get(word, word)) for word in words]
    if "gsm8k" not in str(words) and (words[0] in READS or "--export" in words):  # no rows of gsm8k here
        code, (shown, says) = main(words), capsys.readouterr()
        assert code == 0 or "nothing to export" in says, shown + says
    elif "--help" in words:
        with pytest.raises(SystemExit, match="0"):
            main(words)
        assert capsys.readouterr().out
    else:
        given = parse(words)
        config = REPOSITORY / str(getattr(given, "config", None))
        kind = words[0].replace("-", "_")
        root = class_of(kind) if kind in KINDS else RunConfig
        assert config.parts[-2] != "configs" or load_config(config, given.overrides, root=root)


PARTS = [
    (path.name, block)
    for path in DOCUMENTS
    if path.name not in ("README.md", "training.md")  # whose tests load them beside what they name
    for block in blocks(path.read_text(), "yaml")
]


@pytest.mark.parametrize(("page", "block"), PARTS, ids=[page for page, _ in PARTS])
def test_a_yaml_of_the_documentation_is_part_of_a_run(page, block, tmp_path):
    whole = yaml.safe_load((REPOSITORY / "configs/on_policy.yaml").read_text())
    for name, section in yaml.safe_load(block).items():
        whole[name] = whole.get(name, {}) | section if isinstance(section, dict) else section
    if isinstance(whole["train_dataset"], list):  # of environments, which sets the workflow
        del whole["workflow"], whole["eval_dataset"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(whole))
    assert load_config(tmp_path / "run.yaml")


def test_the_python_of_areal_md_calls_train(first_run, monkeypatch):
    called = create_autospec(areal_lite.Trainer.train)
    monkeypatch.setattr(areal_lite.Trainer, "train", called)
    monkeypatch.chdir(first_run)
    (first_run / "run.yaml").symlink_to("config.yaml")
    (code,) = blocks((REPOSITORY / "docs/areal.md").read_text(), "python")
    exec(compile(code, "docs/areal.md", "exec"), {"MyWorkflow": object})
    assert called.call_args.kwargs["workflow_kwargs"]["max_turns"] == 4


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


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_tests_and_functions_in_documentation_exist(path):
    text = path.read_text()
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        page = path.parent / link if link else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), f"{link}#{anchor}"
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


def test_the_site_has_every_page_once_and_its_links_stay_in_it():
    settings = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())
    listed = [page for part in settings["nav"] for pages in part.values() for entry in pages for page in entry.values()]
    made = {f"{page}.md" for page in (*site.PAGES, "config_keys", "python")}
    written = {path.name for path in DOCUMENTS[1:]}
    assert sorted(listed) == sorted(written | made)
    here = written | made | {path.name for path in (REPOSITORY / "docs").iterdir()}
    pages = [*DOCUMENTS, *(REPOSITORY / f"{name}.md" for name in site.PAGES.values())]
    for path in pages:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", site.links_of_the_site(path.read_text()))
        assert not set(links) - here, path.name


def test_the_site_lists_every_key_and_only_names_that_exist():
    page = site.config_keys()
    for name, root in (("train", RunConfig), *((kind.replace("_", "-"), class_of(kind)) for kind in KINDS)):
        part = page.split(f"\n## areal-lite {name}\n")[1].split("\n## ")[0]
        keys = {entry.key for entry in describe_fields(root) if entry.type != "section"}
        assert keys == set(re.findall(r"^\| `([\w.]+)` \|", part, re.MULTILINE))
        assert len({row.replace("\\|", "").count("|") for row in part.splitlines() if row.startswith("|")}) == 1
    assert len(re.findall(r"^::: areal_lite\.(?:api|data|trainer)\.[\w.]+$", site.python_names(), re.MULTILINE)) > 30
    for name in site.MORE:
        module, _, attribute = name.rpartition(".")
        source = (REPOSITORY / "areal_lite" / f"{module.replace('.', '/')}.py").read_text()
        assert re.search(rf"^(class|def|async def) {attribute}\b", source, re.MULTILINE), name
