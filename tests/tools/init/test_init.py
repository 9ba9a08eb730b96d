"""areal-lite init: each template makes a project whose test passes and which trains."""

from __future__ import annotations
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
import pytest
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.config.supervised_config import SFTConfig
from areal_lite.runs.entry_points import run_training
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.tools.init.new_project import init
from tests.fixtures.tiny_model import build_tiny_model

REPOSITORY = Path(__file__).parents[3]
TEMPLATES = sorted(path.name for path in (REPOSITORY / "areal_lite/tools/init/templates").iterdir() if path.is_dir())
ONE_STEP = [
    *("trainer.device=cpu", "trainer.dtype=float32", "trainer.num_threads=1", "trainer.total_steps=1"),
    *("save_model=false", "checkpoint.every_minutes=null"),
]
SMALL_ROLLOUT = [
    *("eval_dataset=null", "server.dtype=float32"),
    *("rollout.group_size=2", "rollout.consumer_batch_size=1", "rollout.gconfig.max_new_tokens=4"),
]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=2048)


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[str]:
    with EmbeddedServer(model_path=str(tiny_model), dtype="float32", num_threads=1, device="cpu") as server:
        yield server.address


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_there_is_a_template_of_each_kind() -> None:
    assert TEMPLATES == ["env", "multi-turn", "sft", "single", "tools"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_passes_its_test_and_trains(template: str, tiny_model: Path, server: str, folder: Path) -> None:
    name = f"project_{template.replace('-', '_')}"
    assert main(["init", name, "--template", template, "--model", str(tiny_model)]) == 0
    config = load_config(f"{name}/config.yaml", ONE_STEP, root=ExperimentConfig)
    assert config.model_path == str(tiny_model)

    command = [sys.executable, "-m", "unittest", f"{name}.test_agent"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\nOK" in done.stderr and "Ran 0" not in done.stderr

    if template == "env":
        assert main(["env-check", f"{name}/config.yaml", "--rows", "2"]) == 0
    if template == "sft":
        assert isinstance(config, SFTConfig)
        assert run_supervised(config).steps == 1
    else:
        overrides = [*ONE_STEP, *SMALL_ROLLOUT, f"rollout.addresses=[{server}]"]
        assert run_training(load_config(f"{name}/config.yaml", overrides)).steps == 1
    records = (folder / "runs" / name / "trial/metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_project_is_short_and_its_readme_has_its_commands(template: str) -> None:
    next_steps = init("short", template=template)
    files = {path.name: path.read_text() for path in Path("short").iterdir()}
    assert len(files.get("agent.py", "").splitlines()) <= 20
    assert len(files["config.yaml"].splitlines()) <= 15
    assert not any("my_agent" in text for text in files.values())
    for line in next_steps.splitlines()[1:]:
        assert " ".join(line.split()[2:]) in " ".join(files["README.md"].split())


def test_the_templates_and_tables_are_in_the_wheel() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = REPOSITORY / "areal_lite"
    packed = {path for pattern in settings["areal_lite"] for path in package.glob(pattern)}
    templates = package / "tools/init/templates"
    assert {path for path in templates.rglob("*") if path.is_file() and path.suffix != ".pyc"} <= packed
    assert {path for kind in ("bash", "toml", "yaml") for path in package.rglob(f"*.{kind}")} <= packed


def test_a_model_is_taken_from_the_flag_or_from_runs_models_or_left_open(folder: Path) -> None:
    init("left_open")
    assert load_config("left_open/config.yaml").model_path == "path/to/model"
    model = folder / "runs/models/b: 'x'"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    init("chosen")
    assert load_config("chosen/config.yaml").model_path == "runs/models/b: 'x'"
    init("named", model="organization/model")
    assert load_config("named/config.yaml").model_path == "organization/model"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("taken", "error: taken exists, and init overwrites nothing: choose another name, or remove it"),
        ("my-agent", "error: the name 'my-agent' cannot be imported"),
        ("../up", "use letters, digits and '_', such as 'my_agent'"),
        ("true", "is no text in YAML"),
        ("json", "error: 'json' is the name of an importable module, which would hide it: choose another name"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    name: str, says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "taken").mkdir()
    assert main(["init", name]) == 64
    assert says in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["taken"]


def test_a_model_that_is_not_there_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "project", "--model", "/nowhere"]) == 64
    assert "--model '/nowhere' does not exist" in capsys.readouterr().err
    assert not any(folder.iterdir())


def test_the_placeholder_for_a_model_is_explained() -> None:
    init("explained")
    config = load_config("explained/config.yaml")
    assert isinstance(config, RunConfig)
    with pytest.raises(ValueError, match="model_path 'path/to/model' does not exist: it must be a directory"):
        run_training(config)
