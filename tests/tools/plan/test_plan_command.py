"""areal-lite plan probes the real run, and leaves nothing behind."""

from __future__ import annotations
import json
import subprocess
import sys
from pathlib import Path
import pytest
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.rollout.episodes.lookahead import Lookahead
from areal_lite.tools.plan import plan as planning
from areal_lite.tools.plan.probe import Measurements, Trainable, measure


def test_a_plan_of_the_first_steps_agrees_with_the_run(
    run_yaml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_STEADY_S", 0.0)
    monkeypatch.setattr(planning, "MAX_HELD_OUT", 2)  # of 4 rows
    changes = [
        "trainer.total_steps=8",
        "trainer.learning_rate=1e-6",
        "rollout.weight_update=disk",
        "evaluation.every_steps=3",
        "dump_training=true",
    ]
    changes += ["rollout.gconfig.ignore_eos=true", "rollout.eval_gconfig.ignore_eos=true", "checkpoint.every_steps=2"]
    before = set(run_yaml.parent.rglob("*"))
    assert main(["plan", str(run_yaml), "--json", *changes]) == 0
    assert set(run_yaml.parent.rglob("*")) == before
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert (plan["steps"], plan["probed_steps"]) == (8, 3)
    assert shown.err.count("step ") >= 5  # three steps and two evaluations

    config, measured = load_config(run_yaml, changes), Measurements()
    measure(config, measured)
    assert (len(measured.step_s), len(measured.evaluation_s), measured.checkpoints) == (8, 4, 4)
    assert plan["tokens"]["trained"] == pytest.approx(8 * 4 * 4 * 8, rel=0.05)  # steps, groups, members, tokens
    assert plan["tokens"]["sampled"] == pytest.approx(plan["tokens"]["trained"] + 4 * 4 * 8, rel=0.01)
    assert plan["tokens"]["sampled"] == pytest.approx(measured.tokens, rel=0.02)
    written = sum(file.stat().st_size for file in config.run_dir.rglob("*") if file.is_file())
    assert plan["disk_bytes"]["total"] == pytest.approx(written, rel=0.05)
    assert plan["memory_bytes"]["servers"] > 1e8
    seconds = plan["seconds"]
    left = 5 * seconds["step"] + 2 * seconds["evaluation"] + 3 * seconds["checkpoint"]
    assert plan["probe_s"] + left < seconds["total"] < plan["probe_s"] + left + 2 * seconds["evaluation"]


def test_a_plan_of_an_asynchronous_run_asks_for_the_lead_of_all_steps_that_are_left(
    run_yaml: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_STEADY_S", 0.0)
    asked, forecast, predict = list[tuple[int, float]](), Lookahead.forecast, planning.predict

    def noted(ahead: Lookahead, batches: int) -> float:
        asked.append((batches, forecast(ahead, batches)))
        return 100 * asked[-1][1]  # what is measured in three steps is small beside it

    def late(config: Trainable, measured: Measurements, **given: float) -> planning.Plan:
        measured.staleness = [1.0] * len(measured.staleness)  # by chance no token of three steps may be late
        return predict(config, measured, **given)

    monkeypatch.setattr(Lookahead, "forecast", noted)
    monkeypatch.setattr(planning, "predict", late)
    changes = ["trainer.total_steps=60", "rollout.max_head_offpolicyness=2", "eval_dataset=null"]
    assert main(["plan", str(run_yaml), "--json", *changes]) == 0
    plan = json.loads(capsys.readouterr().out)
    [(batches, lead)] = asked
    assert batches == 60 - plan["probed_steps"]
    assert 1 <= lead <= 2 * 4  # groups
    assert 10 * lead < plan["staleness"]["mean"] <= 100 * lead  # so much of it as the lead of three steps shows


def test_a_plan_of_sft_counts_its_steps(sft_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(sft_yaml)]) == 0
    out = capsys.readouterr().out
    assert "200 steps, from 41 steps" in out
    assert "next: areal-lite sft" in out
    assert not (sft_yaml.parent / "runs").exists()


@pytest.mark.slow
def test_ranks_probe_together_and_the_first_one_shows_the_plan(run_yaml: Path) -> None:
    before = set(run_yaml.parent.rglob("*"))
    words = ["plan", str(run_yaml), "--json", "trainer.total_steps=400", "trainer.learning_rate=1e-6"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "areal_lite"]
        + [*words, "trainer.sp_size=2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(run_yaml.parent.rglob("*")) == before
    plan = json.loads(done.stdout)  # of one rank
    assert (plan["steps"], plan["probed_steps"] < 100) == (400, True)  # both ended where the first had enough
    assert plan["memory_bytes"]["largest rank"] > 1e8
    assert not any("ranks" in text for text in plan["unknown"])


def test_a_config_that_cannot_run_is_an_error_as_in_the_run(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_yaml), "model_path=/nothing"]) == 64
    assert "model_path '/nothing'" in capsys.readouterr().err
