"""A sweep makes each run once, compares variants by seed, and continues after a stop."""

from __future__ import annotations
import json
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.cli.main import main
from areal_lite.errors import ConfigError, TrainingError
from areal_lite.tools.inspect.plot import means_figure
from areal_lite.tools.sweep.seed_statistics import mean_interval
from areal_lite.tools.sweep.sweep import Variant, _split, results_of, run_sweep, variants_of

CONFIG = {
    "experiment_name": "exp",
    "model_path": "m",
    "workflow": "my.Agent",
    "train_dataset": {"path": "rows.jsonl"},
    "seed": 5,
    "trainer": {"total_steps": 20, "learning_rate": 1.0e-3},
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        changed = CONFIG | {"trainer": {"total_steps": 20, "learning_rate": rate}}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(changed))


class Trainer:
    """Stands in for training: reward 0.1 per seed and 100 per unit of the learning rate, in steps."""

    def __init__(self, *, fails_at: int | None = None, held_out: bool = True) -> None:
        self.made: list[str] = []
        self.titles: list[str] = []
        self._fails_at, self._held_out = fails_at, held_out

    def __call__(self, config: Any, title: str) -> None:
        if len(self.made) == self._fails_at:
            raise TrainingError("diverged")
        self.made.append(config.trial_name)
        self.titles.append(title)
        reward = 0.1 * config.seed + 100 * config.trainer.learning_rate
        records: list[dict[str, Any]] = [{"step": n, "train/reward_mean": reward * n / 20} for n in range(1, 21)]
        if self._held_out:
            records += [{"step": 0, "eval/reward": 0.0}, {"step": 20, "eval/reward": reward}]
        config.run_dir.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record) + "\n" for record in sorted(records, key=lambda one: one["step"]))
        (config.run_dir / "metrics.jsonl").write_text(text)


def trials(variants: list[Variant]) -> list[list[str]]:
    return [[config.trial_name for config in variant.configs] for variant in variants]


def test_each_seed_has_its_own_folder_and_seed() -> None:
    (variant,) = variants_of(["a.yaml"], ["trial_name=mine", "trainer.total_steps=3"], seeds=3)
    assert trials([variant]) == [["mine-seed5", "mine-seed6", "mine-seed7"]]
    assert [config.seed for config in variant.configs] == [5, 6, 7]
    assert all(config.trainer.total_steps == 3 for config in variant.configs)  # type: ignore[attr-defined]


def test_values_and_configs_make_variants() -> None:
    variants = variants_of(["a.yaml"], ["trainer.learning_rate=1e-4,2e-4", "rollout.group_size=2,4"], seeds=1)
    assert [variant.name for variant in variants] == [
        f"learning_rate={rate} group_size={size}" for rate in ("1e-4", "2e-4") for size in (2, 4)
    ]
    assert trials(variants)[0] == ["trial-learning_rate_1e-4-group_size_2-seed5"]
    assert [v.name for v in variants_of(["a.yaml", "b.yaml"], [], seeds=1)] == ["a", "b"]


def test_commas_in_brackets_and_quotes_do_not_separate_values() -> None:
    (one,) = variants_of(["a.yaml"], ["trainer.adam_betas=[0.8,0.9]"], seeds=1)
    assert one.configs[0].trainer.adam_betas == (0.8, 0.9)  # type: ignore[attr-defined]
    two = variants_of(["a.yaml"], ["trainer.adam_betas=[0.8,0.9],[0.7,0.9]"], seeds=1)
    assert [variant.configs[0].trainer.adam_betas[0] for variant in two] == [0.8, 0.7]  # type: ignore[attr-defined]
    (quoted,) = variants_of(["a.yaml"], ["workflow='x,y.Z'"], seeds=1)
    assert quoted.configs[0].workflow == "x,y.Z"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["Don't think", "[[1,2],[3,4]]", "a,,b"])
def test_a_value_that_cannot_be_divided_is_one(text: str) -> None:
    assert _split(text) == [text]


def test_two_runs_never_share_a_folder() -> None:
    Path("other").mkdir()
    Path("other/a.yaml").write_text(Path("a.yaml").read_text())
    with pytest.raises(ConfigError, match="two runs of the sweep would write to runs/exp/trial-a-seed5"):
        variants_of(["a.yaml", "other/a.yaml"], [], seeds=2)


def test_a_sweep_continues_with_the_runs_that_are_not_finished() -> None:
    variants = variants_of(["a.yaml", "b.yaml"], [], seeds=2)
    with pytest.raises(TrainingError) as caught:
        run_sweep(variants, Trainer(fails_at=3))
    assert caught.value.__notes__ == ["3 of 4 runs of the sweep are finished; the same command continues it"]
    rest = Trainer()
    run_sweep(variants, rest)
    assert rest.made == ["trial-b-seed6"]
    assert rest.titles == ["run 4 of 4: runs/exp/trial-b-seed6"]
    more = Trainer()
    run_sweep(variants_of(["a.yaml", "b.yaml"], [], seeds=3), more)
    assert more.made == ["trial-a-seed7", "trial-b-seed7"]


def test_a_finished_run_of_another_config_is_not_taken_for_this_one() -> None:
    run_sweep(variants_of(["a.yaml"], [], seeds=1), Trainer())
    other = variants_of(["a.yaml"], ["trainer.total_steps=30"], seeds=1)
    with pytest.raises(ConfigError, match=r"another config \(total_steps: 20; total_steps: 30\): choose"):
        run_sweep(other, Trainer())
    swapped = [["server.dtype=bfloat16", "trainer.dtype=float32"], ["server.dtype=float32", "trainer.dtype=bfloat16"]]
    first, second = (variants_of(["b.yaml"], ["trial_name=other", *changes], seeds=1) for changes in swapped)
    run_sweep(first, Trainer())
    with pytest.raises(ConfigError, match=r"another config \(the same values at other keys\): choose"):
        run_sweep(second, Trainer())


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [("eval/reward", "better"), ("timing/step_s", "worse"), ("train/seconds_backward", "worse"), ("sft/loss", "worse")]
    + [("train/ms_per_token_forward", "worse"), ("train/tokens_per_second", "better")],
)
def test_more_is_better_except_of_losses_and_seconds(metric: str, verdict: str) -> None:
    variants = variants_of(["a.yaml", "b.yaml"], [], seeds=3)
    for more, variant in enumerate(variants):
        for number, folder in enumerate(variant.run_dirs):
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, metric: number + 10.0 * more}) + "\n")
    assert results_of(variants, metric=metric)[1][1].verdict == verdict


def test_the_second_variant_is_compared_with_the_first_by_seed() -> None:
    variants = variants_of(["a.yaml", "b.yaml"], [], seeds=3)
    run_sweep(variants, Trainer())
    metric, (first, second) = results_of(variants)
    assert metric == "eval/reward"
    assert first.scores == pytest.approx([0.6, 0.7, 0.8])  # 0.1 per seed from 5 on, and 100 x 1e-3
    assert second.scores == pytest.approx([0.7, 0.8, 0.9])
    assert (first.verdict, second.verdict) == (None, "better")
    assert second.difference is not None
    assert second.difference.mean == pytest.approx(0.1)
    # Without pairs, the seeds differ more than the variants.
    assert first.interval.high > second.interval.mean


def test_without_held_out_rows_the_last_tenth_of_the_steps_counts() -> None:
    variants = variants_of(["a.yaml"], [], seeds=1)
    run_sweep(variants, Trainer(held_out=False))
    metric, (result,) = results_of(variants)
    assert (metric, result.scores) == ("train/reward_mean", [pytest.approx(0.6 * 39 / 40)])  # steps 19 and 20 of 20
    with pytest.raises(ConfigError, match=r"metrics.jsonl has no eval/accuracy: set --metric"):
        results_of(variants, metric="eval/accuracy")


def test_the_picture_has_the_mean_and_the_interval_of_each_step() -> None:
    variants = variants_of(["a.yaml", "b.yaml"], [], seeds=3)
    run_sweep(variants, Trainer())
    figure = means_figure({variant.name: variant.run_dirs for variant in variants})
    (reward,) = figure.axes
    lines = {line.get_label(): line.get_xydata() for line in reward.lines}
    assert set(lines) == {f"{name}: {scope}" for name in "ab" for scope in ("train", "eval")}
    assert lines["a: eval"].tolist() == [[0, 0], [20, pytest.approx(0.7)]]
    band = reward.collections[1].get_datalim(reward.transData)  # of a's held-out rewards
    assert band.ymax == pytest.approx(mean_interval([0.6, 0.7, 0.8]).high)


def test_the_command_trains_compares_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer()
    monkeypatch.setattr("areal_lite.tools.sweep.sweep._make_run", trainer)
    assert main(["sweep", "a.yaml", "--seeds", "2", "b.yaml", "trainer.total_steps=20"]) == 0
    out = capsys.readouterr().out
    assert trainer.made == ["trial-a-seed5", "trial-b-seed5", "trial-a-seed6", "trial-b-seed6"]
    assert "b against a: better; difference 0.1 [0.1, 0.1] over 2 pairs of seeds\n" in out
    assert Path("runs/exp/sweep.png").read_bytes().startswith(b"\x89PNG")
    assert out.endswith("curves: runs/exp/sweep.png\nnext: areal-lite view runs/exp\n")


@pytest.mark.parametrize("wrong", [[], ["--seeds", "0"], ["--seeds", "2", "--level", "2"]])
def test_wrong_options_end_with_64(wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["sweep", "a.yaml", *wrong])
    assert caught.value.code == 64


def test_a_sweep_without_a_config_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "trainer.total_steps=2", "--seeds", "2"]) == 64
    assert "error: a sweep needs a config" in capsys.readouterr().err


def test_on_nodes_the_unfinished_runs_are_made_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def side_by_side(configs: Any, commands: Any, on_done: Any) -> None:
        asked.extend(commands)
        for config in configs:
            config.run_dir.mkdir(parents=True)
            on_done(config)

    monkeypatch.setattr("areal_lite.tools.run.on_nodes.run_side_by_side", side_by_side)
    variants = variants_of(["a.yaml"], ["launch=ray", "rollout.group_size=2,4"], seeds=1)
    for _ in range(2):  # the second time, all are finished
        run_sweep(variants, lambda *_: 1 / 0)
    names = [f"trial_name=trial-group_size_{size}-seed5" for size in (2, 4)]
    options = [f"rollout.group_size={size}" for size in (2, 4)]
    assert asked == [
        ["train", "a.yaml", "launch=ray", option, "seed=5", name] for option, name in zip(options, names, strict=True)
    ]
