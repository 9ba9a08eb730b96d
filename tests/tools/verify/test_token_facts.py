"""Training facts of every kind of step: rows that join to dumped lines, and numbers that ``verify`` computes again."""

from __future__ import annotations
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np
import pyarrow
import pytest
import yaml
from pyarrow import parquet
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.errors import StorageError
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text
from areal_lite.runs.rl_run import make_trainer
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.verify.verify import check_run
from areal_lite.tools.verify.verify_tokens import TOKEN_CHECKS
from areal_lite.tools.view.page_data import Answers
from areal_lite.trainer.rl.token_facts import TokenFacts, facts_writer, write_facts
from tests.trainer.episode_data import Call, Episode, group_of, line
from tests.trainer.training_data import sequence

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "reference": {"kl": {"coef": 0.1}, "entropy_coef": 0.01, "minibatches_per_step": 2},
    "kl in the reward": {"kl": {"coef": 0.1, "place": "reward", "target": 0.01, "horizon": 10}},
    "critic": {"advantage": "gae", "critic": {"learning_rate": 1e-3}, "minibatches_per_step": 2},
    "probabilities": {"advantage": "optimal_token_baseline"},
    "greedy baseline": {"advantage": "remax"},
    "turns": {"advantage": "turn_grpo"},
    "behaviour": {"proximal": "behaviour", "minibatches_per_step": 2},
    "episode weights": {"correction": {"level": "sequence", "normalize": True}},
    "masked weights": {"correction": {"outside": "mask", "min_weight": 0.5, "max_weight": 2.0}},
    "rejected episodes": {"correction": {"reject": "seq_mean_k3", "reject_bounds": "0.2"}},
    "gspo": {"loss": "gspo", "minibatches_per_step": 2},
    "chosen tokens": {"loss": "m2po"},
    "overlong": {"overlong_buffer": 4},
    "truncated": {"rollout": {"gconfig": {"max_new_tokens": 8, "top_p": 0.9}}, "minibatches_per_step": 2},
    "bfloat16": {"dtype": "bfloat16", "kl": {"coef": 0.1, "place": "reward"}},
}


def groups_of(step: int) -> list[Group]:
    """Return a group with an episode that forks, one that failed and stale tokens, and a plain group."""
    fork = [*line(3), Call(1, [30], [31, 32, 33]), Call(0, [34], [35])]
    episodes = [Episode(fork, 1.0), Episode(line(1), 0.0), Episode(line(2), 0.5 + 0.1 * step)]
    first = group_of(f"{step}0", [5, 6], episodes, baseline=0.3)
    second = group_of(f"{step}1", [7], [Episode(line(2, joins=True), 0.2), Episode(line(3), -0.5)], baseline=0.1)
    first.trajectories[1] = Trajectory(member_idx=1, status=EpisodeStatus.FAILED, made_turns=[])
    first.sequences[1].loss_mask[-1] = False  # too old
    for group in (first, second):
        group.note_versions()
    return [first, second]


def groups_without_a_logprob(step: int) -> list[Group]:
    """Return groups with a trained token whose log-prob the engine did not record."""
    groups = groups_of(step)
    sequence = groups[1].sequences[0]
    assert sequence.logprobs is not None
    sequence.logprobs[np.flatnonzero(sequence.loss_mask)[0]] = np.nan
    return groups


def trained(folder: Path, model: Path, groups_of: Callable[[int], list[Group]] = groups_of, **changes: Any) -> Path:
    """Train two steps, and write what a run would."""
    rollout = {"dump_to_file": True, "gconfig": {"max_new_tokens": 8}, **changes.get("rollout", {})}
    values: dict[str, Any] = {
        **{"experiment_name": "e", "trial_name": "t", "fileroot": str(folder), "model_path": str(model)},
        **{"workflow": "tests.e2e.agents.LetterAgent", "train_dataset": {"path": "x"}, "rollout": rollout},
        "trainer": {"total_steps": 9, "learning_rate": 1e-2, "dtype": "float32", "device": "cpu"}
        | {name: value for name, value in changes.items() if name != "rollout"},
    }
    root = folder / "e" / "t"
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(yaml.safe_dump(values))
    with facts_writer(root / "training") as writer:
        trainer = make_trainer(load_config(root / "config.yaml"), lambda update: None, writer)
        for version in (5, 6):
            groups = groups_of(version)
            metrics = trainer.train_step(groups, version=version)
            with (root / "metrics.jsonl").open("a") as file:
                named = {f"train/{name}": value for name, value in metrics.items()}
                file.write(json.dumps({"step": version + 1, "time": float(version), **named}) + "\n")
            for group in groups:
                path = root / "rollout/1" / f"{group.task_id}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(dump_text(dump_lines(group)))
    return root


def findings(root: Path) -> list[tuple[str, str]]:
    report = check_run(root)
    assert not [text for text in report.unproved if "advantages" in text or "reward" in text], report.unproved
    return [finding for finding in report.findings if finding[0] in TOKEN_CHECKS]


@pytest.mark.parametrize("name", SETTINGS)
def test_advantages_and_weights_of_any_step_are_proved_per_token(name: str, tmp_path: Path, tiny_model: Path) -> None:
    root = trained(tmp_path, tiny_model, **SETTINGS[name])
    assert findings(root) == []
    names = set(parquet.read_schema(root / "training/7.parquet").names)
    assert ("log_kept" in names) == (name == "truncated")
    assert ("reference_logprobs" in names) == ("kl" in SETTINGS[name])
    assert ({"values", "returns"} <= names) == ("critic" in SETTINGS[name])
    path = root / "training/7.parquet"
    table = parquet.read_table(path)
    for column, check in (("advantages", "advantages"), ("importance_weights", "importance weights")):
        columns = table.to_pydict()
        row = next(row for row, values in enumerate(columns[column]) if values and values[0] is not None)
        columns[column][row][0] += 0.25
        parquet.write_table(pyarrow.table(columns, table.schema), path)
        assert check in {name for name, _ in findings(root)}


def test_a_logprob_that_was_not_recorded_is_null_and_no_problem(tmp_path: Path, tiny_model: Path) -> None:
    root = trained(tmp_path, tiny_model, groups_without_a_logprob)
    assert "null" in (root / "rollout/1/51.jsonl").read_text().partition('"logprobs":')[2].partition("]")[0]
    assert not {"dumps", "columns", "log-probs", *TOKEN_CHECKS} & {name for name, _ in check_run(root).findings}
    path = root / "rollout/1/51.jsonl"
    path.write_text(path.read_text().replace('"versions":[', '"versions":[null,'))
    with Dumps.open(root) as dumps:
        assert dumps.problems()[0]["message"].endswith(".versions.0: None: it must be a valid integer")


def test_view_and_inspect_show_the_facts_of_trained_tokens(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = trained(tmp_path, tiny_model, minibatches_per_step=2)
    rows = {
        (row["task_id"], row["sample_idx"]): row for row in parquet.read_table(root / "training/7.parquet").to_pylist()
    }
    forked = [key for key in rows if key[0] == "60"]
    assert forked == [("60", line) for line in (0, 1, 2, 3, 4, 6, 7)]  # line 5 is the episode that failed
    with Dumps.open(root) as dumps:
        answers = Answers(dumps)
        episode = answers.episode("e/t", "rollout/1/60.jsonl:2")
        group = answers.group("e/t", "60")
    assert episode["facts"]["trained_step"] == 7
    row, sequence = rows["60", 1], episode["sequences"][1]
    shown = [{**episode["turns"][each["turn"]]["columns"], **each["columns"]} for each in sequence["path"]]
    assert [value for each in shown for value in each.get("advantage", ()) if value is not None] == row["advantages"]
    last = shown[-1]
    assert last["mask"] == [1, 0] and last["weight"] == [row["importance_weights"][0], None]
    assert last["difference"] == [row["proximal_logprobs"][0] - last["logprob"][0], None]
    kinds = {each["label"]: each["kind"] for each in episode["quantities"]}
    assert kinds.items() >= {"Clipped": "signed", "Importance weight": "heat", "Trainer minus engine": "signed"}.items()
    assert group["members"][1]["advantages"] == [row["advantages"][0]] * 2
    assert group["members"][5]["advantages"] is None
    assert main(["inspect", str(root), "--tokens", "rollout/1/60.jsonl:2", "--json"]) == 0
    tokens = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [each["advantages"] for each in tokens if each["mask"]] == row["advantages"]
    assert "advantages" not in tokens[0]
    assert main(["inspect", str(root), "--tokens", "rollout/1/60.jsonl:2"]) == 0
    assert "importance weights" in capsys.readouterr().out
    shutil.rmtree(root / "training")
    assert main(["inspect", str(root), "--tokens", "rollout/1/60.jsonl:2"]) == 0
    assert "importance weights" not in capsys.readouterr().out


def facts_of_step(step: int) -> TokenFacts:
    sequences = [sequence([1, 2, 3], [2], group="g"), sequence([1, 2], [])]
    columns = {"policy_logprobs": np.array([np.nan], np.float32), "clipped": np.array([-1], np.float32)}
    return TokenFacts(step, sequences, None, columns)


def test_what_was_not_computed_is_null_and_a_batch_without_episodes_has_no_lines(tmp_path: Path) -> None:
    for _ in range(2):
        write_facts(tmp_path / "1.parquet", facts_of_step(1))
    rows = parquet.read_table(tmp_path / "1.parquet").to_pylist()
    assert [(row["sample_idx"], row["token_idx"], row["policy_logprobs"], row["clipped"]) for row in rows] == [
        (None, [2], [None], [-1]),
        (None, [], [], []),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["1.parquet"]


def test_a_disk_that_takes_nothing_ends_the_run_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "training").write_text("no folder")
    says = r"training/1\.parquet cannot be written: .*free disk space"
    with pytest.raises(StorageError, match=says), facts_writer(tmp_path / "training") as writer:
        writer(facts_of_step(1))
    with pytest.raises(ValueError, match="of the run"), facts_writer(tmp_path / "training") as writer:
        writer(facts_of_step(1))
        raise ValueError("of the run")


def test_lower_and_upper_clips_have_their_sign(tmp_path: Path, tiny_model: Path) -> None:
    tight = {"loss_kwargs": {"clip_eps": 0.0}, "minibatches_per_step": 2, "learning_rate": 1e-1}
    root = trained(tmp_path, tiny_model, **tight)
    table = parquet.read_table(root / "training/7.parquet").to_pydict()
    columns = {name: [v for row in table[name] for v in row] for name in table if isinstance(table[name][0], list)}
    seen = set()
    for clipped, advantage, policy, proximal in zip(
        *(columns[name] for name in ("clipped", "advantages", "policy_logprobs", "proximal_logprobs")), strict=True
    ):
        ratio = policy - proximal
        expected = 0 if ratio * advantage <= 0 else 1 if ratio > 0 else -1
        assert clipped == expected
        seen.add(clipped)
    assert seen == {-1, 0, 1}
