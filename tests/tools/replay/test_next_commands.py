"""The command that each command says to go on with ends with 0 in the folder of a real run."""

from __future__ import annotations
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
import yaml
from areal_lite.cli.main import main
from areal_lite.tools.doctor import doctor
from areal_lite.tools.plan import plan
from areal_lite.tools.run import rollout, train
from areal_lite.tools.sweep import sweep

REPOSITORY = Path(__file__).parents[3]
WORK = (
    *((train, "train"), (rollout, "_rollout"), (rollout, "_evaluate")),
    *((doctor, "doctor"), (plan, "plan")),
)
"""What the commands do before they print: it is left out, so that only the printed command runs."""
SUPERVISED: dict[str, dict[str, Any]] = {
    "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "dpo": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "reward_model": {"prompt": "a", "chosen": "b", "rejected": "c"},
}


@pytest.fixture
def place(
    run_yaml: Path, plain_run: Path, tiny_model: Path, judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a working directory with a config of each kind, a run of each, and the models that they saved."""
    config = yaml.safe_load(run_yaml.read_text()) | {"fileroot": str(tmp_path / "runs")}
    config["eval_dataset"] = {"path": "tests.tools.replay.agents.rows", "kwargs": {"size": 1}}
    config["rollout"]["eval_gconfig"] = {"max_new_tokens": 5}
    (tmp_path / "CONFIG.yaml").write_text(yaml.safe_dump(config))
    shutil.copytree(plain_run, tmp_path / "runs/e/plain")
    shutil.copytree(plain_run, tmp_path / "runs/e/plain-seed1")
    for kind, row in SUPERVISED.items():
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps(row) + "\n")
        values = {"kind": kind, "experiment_name": kind, "model_path": str(tiny_model)}
        values |= {"train_dataset": {"path": f"{kind}.jsonl", "max_length": 64}}
        values |= {"trainer": {"batch_size": 1, "total_steps": 1, "learning_rate": 1e-4}}
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(values))
        saved = tmp_path / f"runs/{kind}/trial/model"
        saved.parent.mkdir(parents=True)
        saved.symlink_to(judge if kind == "reward_model" else tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    return tmp_path


BRANCH = ["continue", "runs/e/plain", "fileroot=runs", "--task", "0", "--turn", "0", "--address", "SERVER"]
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "train": (["train", "CONFIG.yaml"], ["--export", "page.html"]),
    "rollout": (["rollout", "CONFIG.yaml"], []),
    "rollout without dumps": (["rollout", "CONFIG.yaml", "rollout.dump_to_file=false"], ["--dry-run"]),
    "eval": (["eval", "CONFIG.yaml"], []),
    "sft": (["sft", "sft.yaml"], ["--dry-run"]),
    "dpo": (["dpo", "dpo.yaml"], []),
    "reward-model": (["reward-model", "reward_model.yaml"], ["--dry-run"]),
    "doctor": (["doctor", "CONFIG.yaml"], []),
    "plan": (["plan", "CONFIG.yaml"], ["--dry-run"]),
    "plan of sft": (["plan", "sft.yaml"], ["--dry-run"]),
    "sweep": (["sweep", "CONFIG.yaml", "--seeds", "1"], ["--export", "page.html"]),
    "replay": (["replay", "runs/e/plain", "fileroot=runs", "trainer.total_steps=1"], []),
    "continue": ([*BRANCH, "--trust-config"], ["--export", "page.html"]),
}
"""Each command that says what comes next, and what its next command gets so that it neither trains nor serves."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_command_that_is_printed_runs(
    name: str, place: Path, tiny_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, added = COMMANDS[name]
    with monkeypatch.context() as patch:
        for module, function in WORK:
            patch.setattr(module, function, lambda *_, **__: 0)
        patch.setattr(plan, "plan", lambda *_, **__: SimpleNamespace(unknown=["nothing"]))
        patch.setattr(plan, "plan_table", str)
        patch.setattr(sweep, "run_sweep", lambda *_: None)
        assert main([word.replace("SERVER", tiny_server) for word in asked]) == 0
    said = re.findall(r"next: areal-lite (.+)", capsys.readouterr().out)
    assert len(said) == 1
    if "--dry-run" in added:
        shutil.rmtree("runs/e")  # of another run, beside which none may begin
    if name == "doctor":
        monkeypatch.setattr(plan, "plan", lambda *_, **__: SimpleNamespace(unknown=["nothing"]))
        monkeypatch.setattr(plan, "plan_table", str)
    assert main([*shlex.split(said[0]), *added]) == 0, capsys.readouterr()


def test_every_command_that_says_what_comes_next_is_tried() -> None:
    files = [*(REPOSITORY / "areal_lite").rglob("*.py"), *(REPOSITORY / "examples").glob("*.py")]
    texts = {file.relative_to(REPOSITORY).as_posix(): file.read_text() for file in files}
    printers = {name for name, text in texts.items() for _ in range(len(re.findall("next: [^ ]*areal-lite", text)))}
    assert printers == {
        "areal_lite/tools/doctor/doctor.py",
        "areal_lite/tools/plan/command.py",
        "areal_lite/tools/replay/continue_command.py",
        "areal_lite/tools/replay/replay_command.py",
        "areal_lite/tools/run/rollout.py",
        "areal_lite/tools/run/train.py",
        "areal_lite/tools/sweep/sweep.py",
        "examples/demo.py",  # what train prints
    }
