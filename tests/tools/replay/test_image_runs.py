"""Replay, continue, rescore and inspect of a run whose agent shows pictures."""

from __future__ import annotations
import json
import shutil
from pathlib import Path
from typing import Any
import pytest
import yaml
from rich.console import Console
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.runs.entry_points import run_training
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.tools.replay.continue_episode import continue_episode
from areal_lite.tools.replay.replay import plan_replay, run_replay, same_weights
from tests.fixtures.tiny_vlm import IMAGE_ID, save_tiny_vlm
from tests.tools.replay.image_agent import LooksTwice
from tests.tools.replay.test_continue import chosen, ids, lines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def server(model: Path) -> Any:
    with EmbeddedServer(
        model_path=str(model), dtype="float32", num_threads=1, device="cpu", deterministic=True
    ) as server:
        yield server.address


@pytest.fixture(scope="module")
def run(model: Path, server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    device = {"dtype": "float32", "num_threads": 1, "device": "cpu"}
    config: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "pictures",
        "fileroot": str(folder / "runs"),
        "model_path": str(model),
        "workflow": "tests.tools.replay.image_agent.LooksTwice",
        "train_dataset": {"path": "tests.tools.replay.image_agent.rows"},
        "rollout": {
            "group_size": 2,
            "consumer_batch_size": 2,
            "dump_to_file": True,
            "addresses": [server],
            "gconfig": {"max_new_tokens": 5},
        },
        "server": device,
        "trainer": {"total_steps": 2, "learning_rate": 5.0e-3, "deterministic": True, **device},
        "checkpoint": {"every_minutes": None},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return run_training(load_config(path)).run_dir


def test_a_deterministic_run_with_pictures_has_no_mismatch(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert [r["train/engine_mismatch/log_prob_diff_max"] for r in records if "train/loss" in r] == [0.0] * 2


def test_a_replay_reads_the_pictures_of_the_run_and_ends_with_its_weights(run: Path) -> None:
    summary = run_replay(plan_replay(run))
    assert same_weights(run, summary.run_dir)
    assert not (summary.run_dir / "images").exists()


def test_kept_answers_to_pictures_are_not_sampled_again(run: Path, server: str, tmp_path: Path) -> None:
    (name,) = sorted(path.stem for path in run.glob("rollout/0/*.jsonl"))[:1]
    console = Console(record=True, width=240)
    options = chosen(path=run, task=name, turn=3, n=2, address=server, overrides=[f"fileroot={tmp_path}"])
    branches = lines(continue_episode(options, console=console), 0)
    original = lines(run, name)[0]
    assert len(branches) == 2
    for branch in branches:
        assert branch["status"] == "accepted"
        assert ids(branch["turns"][:3]) == ids(original["turns"][:3])
        assert branch["turns"][1]["logprobs"] == original["turns"][1]["logprobs"]
        assert [turn.get("images") for turn in branch["turns"]] == [t.get("images") for t in original["turns"]]
    assert "turns before these: 3, the same in all" in console.export_text()


def test_another_picture_is_a_difference(
    run: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = sorted(path.stem for path in run.glob("rollout/0/*.jsonl"))[:1]
    monkeypatch.setattr(LooksTwice, "tint", 7)
    options = chosen(path=run, task=name, turn=3, address=server, overrides=[f"fileroot={tmp_path}"])
    first = lines(run, name)[0]["turns"][0]["images"][0]["sha256"][:12]
    with pytest.raises(ConfigError, match=f"turn 0 is not repeated: .* the dump has 'image {first}', and the agent"):
        continue_episode(options)


def test_rescore_gives_the_prompt_with_its_pictures_and_the_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(run), "--reward", "tests.tools.replay.image_agent.placeholders", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 8
    for each in found:
        (line,) = (line for line in lines(run, each["task_id"]) if line["member_idx"] == each["member_idx"])
        (row,) = (line["row"] for line in lines(run, each["task_id"]) if "row" in line)
        read = [token for turn in line["turns"][:-1] for token in turn["ids"]].count(IMAGE_ID)
        assert read >= 2 * 6
        assert (each["error"], each["new"]) == (None, read + 1000.0 * row["reds"][0])


def test_a_run_with_pictures_verifies_and_its_turns_show_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(run), "--by", "turns", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("24 x 16 pixels, 6 tokens]<|vision_end|>") == 2
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "images")
    assert main(["verify", str(copy)]) != 0
