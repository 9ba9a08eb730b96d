"""``areal-lite verify``: every planted defect is found, and sound runs of each kind have no finding."""

from __future__ import annotations
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pyarrow
import pytest
import torch
import yaml
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from areal_lite.cli.main import main
from areal_lite.config.loader import class_of, load_config
from areal_lite.files.atomic_folder import _digest
from areal_lite.rollout.dumps.dump_lines import CHAIN
from areal_lite.rollout.dumps.dump_writer import Chain
from areal_lite.runs.entry_points import run_rollout, run_training
from areal_lite.runs.folder.run_directory import BATCHES
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.inspect.episode_row import SCOPES
from areal_lite.tools.verify import verify
from areal_lite.tools.verify.verify import SHOWN, check_run
from areal_lite.tools.verify.verify_episodes import GROUP_CHECKS, LINE_CHECKS
from areal_lite.tools.verify.verify_steps import METRICS_CHECKS
from areal_lite.tools.verify.verify_tokens import TOKEN_CHECKS
from areal_lite.tools.verify.verify_weights import WEIGHT_CHECKS

Line = dict[str, Any]


def group_files(run: Path, version: int = 1, scope: str = "rollout") -> list[Path]:
    """Return the dumps of a version whose rewards differ, by task id."""
    files = sorted((run / scope / str(version)).glob("*.jsonl"), key=lambda path: int(path.stem))
    return [file for file in files if scope != "rollout" or len({line["reward"] for line in lines_of(file)}) > 1]


def lines_of(file: Path) -> list[Line]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def write(file: Path, lines: list[Line]) -> None:
    """Write lines as a program that makes wrong ones would: a dump with its note in a chain."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if file.parent.parent.name in SCOPES:
        chained(file.parent)


def chained(folder: Path) -> None:
    """Note the dumps of a folder as they are."""
    for chain in folder.glob(f"{CHAIN}*"):
        chain.unlink()
    notes = Chain()
    for dump in sorted(folder.glob("*.jsonl")):
        notes.add(str(dump), dump.read_bytes())


def edit(file: Path, change: Callable[[list[Line]], object]) -> None:
    lines = lines_of(file)
    change(lines)
    write(file, lines)


def edit_step(run: Path, step: int, **values: Any) -> None:
    """Change the record of a training step."""

    def change(records: list[Line]) -> None:
        (record,) = (record for record in records if record["step"] == step and "train/loss" in record)
        record.update({name.replace("__", "/"): value for name, value in values.items()})

    edit(run / "metrics.jsonl", change)


def sealed(folder: Path, **values: Any) -> None:
    """Make the manifest of a folder fit its files, as a program that writes wrong weights would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | values
    manifest["files"] = {name: _digest(folder / name) for name in manifest["files"]}
    path.write_text(json.dumps(manifest))


def answer(line: Line) -> Line:
    """Return the last turn."""
    turn: Line = line["turns"][-1]
    assert turn["role"] == "assistant"
    return turn


# -- what goes wrong


def mask_begins_one_late(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[0])["loss_mask"].__setitem__(0, 0))


def mask_begins_one_early(run: Path) -> None:
    def shift(lines: list[Line]) -> None:
        prompt, last = lines[0]["turns"][-2:]
        both = (prompt["loss_mask"] + last["loss_mask"])[1:] + [0]
        prompt["loss_mask"], last["loss_mask"] = both[: len(prompt["ids"])], both[len(prompt["ids"]) :]

    edit(group_files(run)[0], shift)


def an_answer_is_not_trained(run: Path) -> None:
    def unmask(lines: list[Line]) -> None:
        answer(lines[0])["loss_mask"] = [0] * len(answer(lines[0])["ids"])
        lines[0]["head_version"] = lines[0]["tail_version"] = None

    edit(group_files(run)[0], unmask)


def an_answer_trains_twice(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: lines.append(lines[-1] | {"sample_idx": 4}))


def a_group_is_copied(run: Path) -> None:
    lines = lines_of(group_files(run)[0])
    for line in lines:
        line["task_id"], line["group_id"] = 24, "24"
    write(run / "rollout/1/24.jsonl", lines)


def a_task_is_there_twice(run: Path) -> None:
    shutil.copy(file := group_files(run)[0], run / "rollout/2" / file.name)


def a_group_is_missing(run: Path) -> None:
    group_files(run)[0].unlink()


def a_held_out_group_is_missing(run: Path) -> None:
    group_files(run, 2, "eval-rollout")[0].unlink()


def a_member_is_missing(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: lines.pop())


def rewards_are_of_another_row(run: Path) -> None:
    """Swap the rewards of two groups of one step, so that every sum over the step stays."""
    one, other = group_files(run)[:2]
    rewards = [[line["reward"] for line in lines_of(file)] for file in (one, other)]
    assert sorted(rewards[0]) != sorted(rewards[1])
    for file, others in zip((one, other), rewards[::-1], strict=True):
        edit(file, lambda lines, others=others: [  # type: ignore[misc]
            line.update(reward=reward) for line, reward in zip(lines, others, strict=True)
        ])  # fmt: skip


def a_failure_is_a_reward_of_0(run: Path) -> None:
    failed = {"status": "failed", "error": "x", "error_kind": "agent", "reward": 0.0}
    edit(group_files(run)[0], lambda lines: lines[0].update(failed))


def rewards_are_missing(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: lines[0].update(reward=None))


def a_logprob_is_missing(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[0])["logprobs"].__setitem__(3, None))


def a_logprob_is_positive(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[0])["logprobs"].__setitem__(3, 0.5))


def logprobs_are_of_another_temperature(run: Path) -> None:
    def halve(lines: list[Line]) -> None:
        for line in lines:
            answer(line)["logprobs"] = [each / 2 for each in answer(line)["logprobs"]]

    edit(group_files(run)[0], halve)


def a_logprob_is_lost(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[0])["logprobs"].pop())


def tokens_have_another_version(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[0]).update(versions=[0] * len(answer(lines[0])["ids"])))


def a_group_is_labelled_with_another_version(run: Path) -> None:
    """Give a group another version all over, as an engine with a wrong version would."""

    def relabel(lines: list[Line]) -> None:
        for line in lines:
            line.update(start_version=2, head_version=2, tail_version=2)
            answer(line)["versions"] = [2] * len(answer(line)["ids"])

    edit(file := group_files(run)[0], relabel)
    file.rename(run / "rollout/2" / file.name)


def tokens_are_older_than_the_bound(run: Path) -> None:
    def age(lines: list[Line]) -> None:
        lines[0].update(head_version=0)
        answer(lines[0])["versions"][0] = 0

    edit(group_files(run)[0], age)


def a_group_is_in_another_folder(run: Path) -> None:
    file = group_files(run)[0]
    file.rename(run / "rollout/2" / file.name)


def a_field_is_missing(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: [lines[0].pop("prompt_len"), answer(lines[1]).pop("ids")])


def reward_parts_sum_to_another_reward(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("    weights: null", "    weights: {letters: 2.0}"))

    def name_parts(lines: list[Line]) -> None:
        for line in lines:
            line["counts"]["reward/letters"] = line["reward"] / 2 + 0.25 * (line is lines[1])

    edit(group_files(run)[0], name_parts)


def edit_facts(run: Path, change: Callable[[Line], object]) -> None:
    """Change the columns of step 2, which has rewards that differ."""
    table = parquet.read_table(path := run / "training/2.parquet")
    columns = table.to_pydict()
    change(columns)
    parquet.write_table(pyarrow.table(columns, table.schema), path)


def advantages_are_of_another_row(run: Path) -> None:
    """Swap two rows of different advantages, so that every figure of the step stays."""

    def swap(columns: Line) -> None:
        advantages = columns["advantages"]
        other = next(place for place, each in enumerate(advantages) if each[0] != advantages[0][0])
        advantages[0], advantages[other] = advantages[other], advantages[0]

    edit_facts(run, swap)


def the_trained_mask_is_off_by_one(run: Path) -> None:
    edit_facts(run, lambda columns: columns["token_idx"].__setitem__(3, [i + 1 for i in columns["token_idx"][3]]))


def rolled(values: list[float]) -> list[float]:
    return values[1:] + values[:1]


def logprobs_of_the_engine_are_shifted(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: answer(lines[1]).update(logprobs=rolled(answer(lines[1])["logprobs"])))


def proximal_logprobs_are_shifted(run: Path) -> None:
    edit_facts(run, lambda columns: columns.update(proximal_logprobs=list(map(rolled, columns["proximal_logprobs"]))))


def logprobs_of_the_update_are_shifted(run: Path) -> None:
    edit_facts(run, lambda columns: columns.update(policy_logprobs=list(map(rolled, columns["policy_logprobs"]))))


def trainer_and_engine_disagree_on_a_token(run: Path) -> None:
    """Write log-probs far from the engine's, with the weight that they give."""

    def move(columns: Line) -> None:
        for name in ("proximal_logprobs", "policy_logprobs"):
            columns[name][0][0] -= 3.0
        columns["importance_weights"][0][0] *= math.exp(-3.0)

    edit_facts(run, move)


def importance_weights_are_not_capped(run: Path) -> None:
    edit_facts(run, lambda columns: columns["importance_weights"][0].__setitem__(0, 9.0))


def training_facts_are_torn(run: Path) -> None:
    os.truncate(file := run / "training/2.parquet", file.stat().st_size - 10)


def training_facts_are_missing(run: Path) -> None:
    (run / "training/2.parquet").unlink()


def a_batch_trains_twice(run: Path) -> None:
    shutil.copy(run / "training/1.parquet", run / "training/2.parquet")


def a_held_out_reward_is_wrong(run: Path) -> None:
    edit(group_files(run, 2, "eval-rollout")[0], lambda lines: lines[0].update(reward=lines[0]["reward"] + 1))


def a_dump_is_changed_later(run: Path) -> None:
    file = group_files(run)[0]
    file.write_text(file.read_text().replace("\n", " \n"))


def a_text_is_of_other_ids(run: Path) -> None:
    edit(group_files(run)[0], lambda lines: lines[1].update(completion=lines[1]["completion"] + "!"))


def a_line_is_torn(run: Path) -> None:
    file = group_files(run)[0]
    file.write_bytes(file.read_bytes()[:-100])


def a_step_is_missing(run: Path) -> None:
    edit(run / "metrics.jsonl", lambda records: records.remove(next(r for r in records if "train/loss" in r)))


def a_step_says_another_reward(run: Path) -> None:
    edit_step(run, 2, train__reward_mean=0.9)


def advantages_are_not_of_these_rewards(run: Path) -> None:
    (record,) = (r for r in lines_of(run / "metrics.jsonl") if r["step"] == 2 and "train/loss" in r)
    edit_step(run, 2, train__advantage_std=record["train/advantage_std"] * 1.1)


def a_batch_is_smaller_than_the_config(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("consumer_batch_size: 4", "consumer_batch_size: 5"))


def a_step_is_stale(run: Path) -> None:
    edit_step(run, 2, train__staleness_max=1.0)


def a_server_has_other_weights(run: Path) -> None:
    edit_step(run, 2, **{"train__engine_mismatch__log_prob_diff_mean": 0.7})


def an_update_is_skipped(run: Path) -> None:
    """Save the weights before the update again, as those of the new step."""
    for file in ("policy/model/model.safetensors", "policy/optimizer.safetensors"):
        shutil.copy(run / "checkpoints/step_00000002" / file, run / "checkpoints/step_00000003" / file)
    sealed(run / "checkpoints/step_00000003")


def an_update_never_reached_the_optimizer(run: Path) -> None:
    for name in ("policy/model/model.safetensors", "policy/optimizer.safetensors"):
        shutil.copy(run / "checkpoints/step_00000002" / name, run / "checkpoints/step_00000003" / name)
    sealed(run / "checkpoints/step_00000003")


def a_skip_is_not_recorded(run: Path) -> None:
    edit_step(run, 2, train__skipped_updates=1.0)


def a_checkpoint_is_torn(run: Path) -> None:
    file = run / "checkpoints/step_00000003/policy/optimizer.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def a_checkpoint_is_of_another_step(run: Path) -> None:
    (run / "checkpoints/step_00000002").rename(run / "checkpoints/step_00000001")


def published_weights_have_another_label(run: Path) -> None:
    sealed(run / "weights/v00000003", version=1)


def published_weights_are_not_the_trained_ones(run: Path) -> None:
    file = run / "weights/v00000003/model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] += 1e-3
    save_file(weights, file, metadata={"format": "pt"})
    sealed(run / "weights/v00000003")


def the_saved_model_is_of_an_earlier_step(run: Path) -> None:
    shutil.copy(run / "checkpoints/step_00000002/policy/model/model.safetensors", run / "model/model.safetensors")
    sealed(run / "model")


def a_checkpoint_has_another_config(run: Path) -> None:
    path = run / "checkpoints/step_00000003/config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.005", "learning_rate: 0.5"))
    sealed(path.parent)


DEFECTS: dict[Callable[[Path], None], str] = {
    mask_begins_one_late: "mask",
    mask_begins_one_early: "mask",
    an_answer_is_not_trained: "step",
    an_answer_trains_twice: "shared turns",
    a_group_is_copied: "ended once",
    a_task_is_there_twice: "ended once",
    a_group_is_missing: "ended once",
    a_held_out_group_is_missing: "evaluations",
    a_member_is_missing: "members",
    rewards_are_of_another_row: "training facts",
    advantages_are_of_another_row: "advantages",
    the_trained_mask_is_off_by_one: "training facts",
    logprobs_of_the_engine_are_shifted: "training facts",
    proximal_logprobs_are_shifted: "importance weights",
    logprobs_of_the_update_are_shifted: "trainer log-probs",
    trainer_and_engine_disagree_on_a_token: "trainer log-probs",
    importance_weights_are_not_capped: "importance weights",
    training_facts_are_torn: "training facts",
    training_facts_are_missing: "training facts",
    a_batch_trains_twice: "training facts",
    a_failure_is_a_reward_of_0: "outcome",
    rewards_are_missing: "outcome",
    a_logprob_is_missing: "step",
    a_logprob_is_positive: "log-probs",
    logprobs_are_of_another_temperature: "step",
    a_logprob_is_lost: "columns",
    tokens_have_another_version: "versions",
    a_group_is_labelled_with_another_version: "step",
    tokens_are_older_than_the_bound: "staleness",
    a_group_is_in_another_folder: "folder",
    a_field_is_missing: "columns",
    reward_parts_sum_to_another_reward: "reward parts",
    a_held_out_reward_is_wrong: "evaluations",
    a_dump_is_changed_later: "chain",
    a_text_is_of_other_ids: "texts",
    a_line_is_torn: "dumps",
    a_step_is_missing: "steps",
    a_step_says_another_reward: "dumps and metrics",
    advantages_are_not_of_these_rewards: "step",
    a_batch_is_smaller_than_the_config: "steps",
    a_step_is_stale: "staleness",
    a_server_has_other_weights: "engine mismatch",
    an_update_is_skipped: "weights",
    an_update_never_reached_the_optimizer: "checkpoints",
    a_skip_is_not_recorded: "skipped updates",
    a_checkpoint_is_torn: "manifests",
    a_checkpoint_is_of_another_step: "checkpoints",
    published_weights_have_another_label: "manifests",
    published_weights_are_not_the_trained_ones: "copies",
    the_saved_model_is_of_an_earlier_step: "copies",
    a_checkpoint_has_another_config: "config",
}
"""Each planted defect, and the check that must find it."""


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_planted_defect_is_found(defect: Callable[[Path], None], run: Path) -> None:
    Dumps.open(run).close()  # what it changes must be found in spite of the index
    defect(run)
    found = check_run(run).findings
    assert DEFECTS[defect] in {name for name, _ in found}, found


def test_every_check_has_a_defect() -> None:
    checks = {*LINE_CHECKS, *GROUP_CHECKS, *METRICS_CHECKS, *WEIGHT_CHECKS, *TOKEN_CHECKS, "dumps"}
    assert checks - set(DEFECTS.values()) == {"batches", "images"}  # of asynchronous runs, below; test_image_files


def test_a_sound_run_has_no_finding(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "sound: 31 checks over 24 groups, 60 lines and 3 steps\n"
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


def test_findings_are_lines_and_the_exit_code_is_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in [*group_files(run), *group_files(run, 2)]:
        edit(file, lambda lines: [line.update(tail_version=9) for line in lines])
    assert main(["verify", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("versions: rollout/1/")
    assert "head and tail version are (1, 9), but its trained tokens have (1, 1)" in lines[0]
    assert sum(line.startswith("versions: rollout/") for line in lines) == SHOWN
    assert any(line.startswith("versions: and ") for line in lines)
    assert lines[-1].split(" in ")[0].endswith(" findings")
    assert main(["verify", str(run.parent)]) == 64
    assert "is not the folder of a run" in capsys.readouterr().err


def test_rewards_are_scored_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "training")
    again = ["--reward", "tests.tools.verify.test_rescore.same"]
    assert main(["verify", str(run), *again]) == 0
    assert "not proved: what each token trained with: set dump_training" in capsys.readouterr().out
    rewards_are_of_another_row(run)
    assert main(["verify", str(run)]) == 0  # all answers are equally long, so sums and advantages are the same
    assert "not proved: each episode's own reward (score it again with" in capsys.readouterr().out
    assert main(["verify", str(run), *again]) == 1
    assert "rewards: rollout/1/" in capsys.readouterr().out


def test_what_cannot_be_proved_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "weights")
    shutil.rmtree(run / "checkpoints")
    assert main(["verify", str(run)]) == 0
    assert "not proved: that updates changed the weights: fewer than two" in capsys.readouterr().out
    (run / "config.yaml").unlink()
    shutil.rmtree(run / "rollout")
    shutil.rmtree(run / "eval-rollout")
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert "not proved: config.yaml cannot be read" in out
    assert "not proved: anything about episodes: there are no dumps" in out


# -- what somebody changes by hand


def a_token_has_another_id(line: Line) -> None:
    answer(line)["ids"][2] += 1


def a_completion_has_another_text(line: Line) -> None:
    line["completion"] = "42"


def a_failure_is_called_rejected(line: Line) -> None:
    line["status"] = "rejected"


def a_row_is_another(line: Line) -> None:
    line["row"]["question"] = "say 99"


@pytest.mark.parametrize(
    ("change", "without_chain"),
    [
        (a_token_has_another_id, {"texts"}),
        (a_completion_has_another_text, {"texts"}),
        (a_failure_is_called_rejected, {"outcome"}),
        (a_row_is_another, set()),
    ],
)
def test_a_line_that_was_changed_by_hand_is_noticed_where_no_number_tells(
    change: Callable[[Line], None], without_chain: set[str], run: Path
) -> None:
    def fail(lines: list[Line]) -> None:
        lines[0].update(status="failed", error="x", error_kind="agent", reward=None)
        answer(lines[0])["loss_mask"] = [0] * len(answer(lines[0])["ids"])
        lines[0].update(head_version=None, tail_version=None)

    file = group_files(run)[0]
    if change is a_failure_is_called_rejected:
        edit(file, fail)
    before = {name for name, _ in findings(run)}
    assert "chain" not in before
    lines = lines_of(file)
    change(lines[0])
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = findings(run)
    assert {name for name, _ in found} == before | without_chain | {"chain"}
    assert ("chain", f"{file.relative_to(run)} was changed after it was written") in found
    chained(file.parent)
    assert {name for name, _ in findings(run)} == before | without_chain


def first_chain(run: Path) -> Path:
    (chain,) = (run / "rollout/1").glob(f"{CHAIN}*")
    return chain


def without_lines(file: Path, *places: int) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for place, line in enumerate(lines) if place not in places))


NOT_NOTED = "that {} of 24 dumps are as they were written: they are in no chain"


@pytest.mark.parametrize(
    ("change", "found", "unproved"),
    [
        (lambda run: shutil.rmtree(run / "rollout/0"), None, None),  # old folders may be removed
        (lambda run: [chain.unlink() for chain in run.glob(f"*rollout/*/{CHAIN}*")], None, 24),  # an older version
        (lambda run: without_lines(first_chain(run), 3), None, 1),  # killed between a file and its note
        (lambda run: os.truncate(first_chain(run), first_chain(run).stat().st_size - 9), None, 1),
        (lambda run: Chain().add(*second_writer(run)), None, None),
        (lambda run: group_files(run)[0].unlink(), r"\.jsonl was removed after it was written", None),
        (lambda run: without_lines(first_chain(run), 1), r"/\.chain-.*:2: the notes before it were changed", 1),
        (lambda run: first_chain(run).write_text("[]\n"), "it cannot be checked: TypeError", None),
    ],
)
def test_a_chain_holds_over_kills_resumes_and_removed_folders(
    change: Callable[[Path], object], found: str | None, unproved: int | None, run: Path
) -> None:
    change(run)
    report = check_run(run)
    of_chain = [text for name, text in report.findings if name == "chain"]
    assert bool(of_chain) == (found is not None) and all(re.search(str(found), text) for text in of_chain), of_chain
    said = [text for text in report.unproved if "in no chain" in text]
    assert (len(said) == 1 and said[0].startswith(NOT_NOTED.format(unproved))) if unproved else not said


def second_writer(run: Path) -> tuple[str, bytes]:
    """Write a dump as a resumed run or another engine does, beside those of the first."""
    lines = lines_of(group_files(run)[0])
    text = "".join(json.dumps(line | {"task_id": 24, "group_id": "24"}) + "\n" for line in lines).encode()
    path = run / "rollout/1/24.jsonl"
    path.write_bytes(text)
    return str(path), text


def test_texts_are_not_compared_with_those_of_another_tokenizer(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unproved = "that texts are those of their ids: the run's tokenizer is not on this machine"
    assert unproved not in check_run(run).unproved
    for tokenizer in (None, SimpleNamespace(decode=str)):
        monkeypatch.setattr(verify, "run_tokenizer", lambda root, tokenizer=tokenizer: tokenizer)
        report = check_run(run)
        assert not report.findings and unproved in report.unproved


# -- other sound runs


def trained(run_yaml: Path, folder: Path, *overrides: str) -> Path:
    some = [f"fileroot={folder}", "trainer.deterministic=false", "rollout.weight_update=auto", *overrides]
    return run_training(load_config(run_yaml, some)).run_dir


def findings(run: Path) -> list[tuple[str, str]]:
    return check_run(run).findings


@pytest.fixture(scope="module")
def asynchronous_run(run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a sound asynchronous run, which nobody may change."""
    settings = ["rollout.max_head_offpolicyness=2", "trainer.total_steps=6"]
    return trained(run_yaml, tmp_path_factory.mktemp("asynchronous"), *settings)


def two_steps_are_swapped(run: Path) -> None:
    def swap(records: list[Line]) -> None:
        records[2]["task_ids"], records[3]["task_ids"] = records[3]["task_ids"], records[2]["task_ids"]

    edit(run / BATCHES, swap)


def groups_of_two_steps_are_swapped(run: Path) -> None:
    """Give two groups each other's dumps."""
    tasks = [record["task_ids"][0] for record in lines_of(run / BATCHES)[2:4]]
    one, other = (next(run.glob(f"rollout/*/{task}.jsonl")) for task in tasks)
    dumped = [lines_of(file) for file in (one, other)]
    for file, lines, task in zip((other, one), dumped, tasks[::-1], strict=True):
        named = [line | {"task_id": task, "group_id": str(task)} for line in lines]
        file.unlink()
        chained(file.parent)
        write(run / "rollout" / str(max(line["tail_version"] for line in lines)) / file.name, named)


def a_group_trains_in_two_steps(run: Path) -> None:
    """Name a group again in place of one that the next step trained."""
    batches = [record["task_ids"] for record in lines_of(run / BATCHES)]
    edit(run / BATCHES, lambda records: records[3]["task_ids"].__setitem__(0, batches[2][0]))


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        (two_steps_are_swapped, "by its dumped episodes"),
        (groups_of_two_steps_are_swapped, "by its dumped episodes"),
        (a_group_trains_in_two_steps, "step 4 trained task .*, which step 3 trained"),
        (lambda run: (run / BATCHES).write_text('{"step":1'), "batches.jsonl has no step"),
        (lambda run: edit(run / BATCHES, lambda records: records.pop()), "step 6 is not in batches.jsonl"),
    ],
)
def test_the_batches_of_an_asynchronous_run_are_proved(
    defect: Callable[[Path], object], says: str, asynchronous_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(asynchronous_run, tmp_path / "t")
    shutil.rmtree(run / "training")
    assert not findings(run)
    assert not any("advantages" in text for text in check_run(run).unproved)
    defect(run)
    found = findings(run)
    assert {name for name, _ in found} == {"step"}, found
    assert any(re.search(says, text) for _, text in found), found
    (run / BATCHES).unlink()
    assert not findings(run)  # nothing else finds it
    assert any("there is no batches.jsonl" in text for text in check_run(run).unproved)


def test_an_asynchronous_run_has_no_finding_and_stale_groups_are_found(asynchronous_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(asynchronous_run, tmp_path / "t")
    assert not findings(run)
    assert not any("of each step" in text or "advantages" in text for text in check_run(run).unproved)
    advantages_are_of_another_row(run)
    assert {name for name, _ in findings(run)} == {"advantages"}
    shutil.copytree(asynchronous_run / "training", run / "training", dirs_exist_ok=True)
    file = group_files(run, 0)[0]
    before = file.read_text()
    edit(file, lambda lines: [line["timings"].update(finished_at=2e9) for line in lines])
    assert {name for name, _ in findings(run)} == {"batches"}
    file.write_text(before)
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("max_head_offpolicyness: 2", "max_head_offpolicyness: 0"))
    assert "staleness" in {name for name, _ in findings(run)}


@pytest.mark.parametrize(
    "change", ["trainer.advantage=turn_grpo", "trainer.advantage=remax", "trainer.minibatches_per_step=2", "lora"]
)
def test_runs_of_other_settings_have_no_finding(change: str, run_yaml: Path, tmp_path: Path) -> None:
    changes = ["trainer.lora={rank: 4}"] if change == "lora" else [change]
    if change == "trainer.advantage=turn_grpo":
        changes += ["trainer.critic=null", "rollout.over_sampling_groups=2"]
    run = trained(run_yaml, tmp_path, *changes, "trainer.total_steps=2")
    assert not findings(run)
    shutil.rmtree(run / "training")
    report = check_run(run)
    assert not report.findings and not [text for text in report.unproved if "advantages" in text]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["trainer.advantage=turn_returns", "trainer.advantage_kwargs={gamma: 0.5}"], lambda a, b: a + 0.5 * b),
        (["trainer.advantage=dr_grpo", "rollout.workers=2"], lambda a, b: a + b),
        (["trainer.advantage=dr_grpo", "rollout.turn_rewards=mean"], lambda a, b: (a + b) / 2),
        (["trainer.advantage=grpo", "rollout.turn_rewards=last"], lambda a, b: b),
    ],
    ids=["discounted", "sum", "mean", "last"],
)
def test_the_reward_of_rewarded_turns_is_in_dumps_metrics_and_verified(
    changes: list[str], expected: Callable[[float, float], float], run_yaml: Path, tmp_path: Path
) -> None:
    run = trained(run_yaml, tmp_path, "workflow=tests.e2e.agents.TwoTurns", *changes, "trainer.total_steps=2")
    assert not findings(run)
    rewards, evaluated = ([], [])
    for version, scope, found in ((0, "rollout", rewards), (0, "eval-rollout", evaluated)):
        for file in (run / scope / str(version)).glob("*.jsonl"):
            members: dict[int, list[Line]] = {}
            for one in lines_of(file):
                members.setdefault(one["member_idx"], []).append(one)
            for first, second in members.values():
                found.append(first.get("episode_reward", first["reward"]))
                assert found[-1] == second.get("episode_reward", second["reward"])
                assert found[-1] == pytest.approx(expected(first["reward"], second["reward"]))
    metrics = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert len({round(reward, 6) for reward in rewards}) > 1
    assert next(r["train/reward_mean"] for r in metrics if r["step"] == 1) == pytest.approx(sum(rewards) / 16)
    assert next(r["eval/reward"] for r in metrics if "eval/reward" in r) == pytest.approx(sum(evaluated) / 4)

    def forged(lines: list[Line]) -> None:
        for one in lines:
            one["episode_reward"] = one["reward"] + 1.0

    edit(group_files(run, 0)[0], forged)
    assert {name for name, _ in findings(run)} >= {"step"}


def test_a_killed_and_resumed_run_has_no_finding(run_yaml: Path, tmp_path: Path) -> None:
    """Killed while the checkpoint of step 2 is written: step 2 is lost and trained again."""
    some = [f"fileroot={tmp_path}", "trainer.deterministic=false"]
    command = [sys.executable, "-m", "areal_lite", "train", str(run_yaml), *some]
    crash = {"AREAL_LITE_CRASH_AT": "checkpoint:after_optimizer:2"}
    killed = subprocess.run(command, env=os.environ | crash, capture_output=True, text=True, timeout=100)
    assert killed.returncode == -9, killed.stderr
    assert not findings(tmp_path / "sound" / "t")
    run = run_training(load_config(run_yaml, some)).run_dir
    report = check_run(run)
    assert not report.findings
    assert any("belong to no recorded step" in text for text in report.unproved)
    group_files(run, 2)[0].unlink()
    assert "step" in {name for name, _ in findings(run)}


def test_runs_without_episodes_and_without_training_have_no_finding(
    run_yaml: Path, tmp_path: Path, tiny_model: Path
) -> None:
    config = load_config(run_yaml, [f"fileroot={tmp_path}"])
    try:
        run_rollout(config)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not findings(config.run_dir)
    values = yaml.safe_load(Path("configs/sft.yaml").read_text())
    values |= {"model_path": str(tiny_model), "fileroot": str(tmp_path), "checkpoint": {"every_steps": 2}}
    values["trainer"] |= {"device": "cpu", "num_threads": 1, "dtype": "float32", "total_steps": 4}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    run = run_supervised(load_config(tmp_path / "sft.yaml", root=class_of("sft"))).run_dir  # type: ignore[arg-type]
    assert not findings(run)
    shutil.copy(run / "checkpoints/step_00000002/trainer.json", run / "checkpoints/step_00000004/trainer.json")
    sealed(run / "checkpoints/step_00000004")
    assert {name for name, _ in findings(run)} == {"checkpoints"}
