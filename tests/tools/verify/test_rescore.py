"""``areal-lite rescore``: another reward function over dumped episodes, with the rows that are certainly theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from areal_lite.cli.main import main
from tests.e2e.agents import rows
from tests.tools.inspect.dump_lines import line, turn, write


def same(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> float:
    """Return what LetterAgent does."""
    return sum(c.islower() for c in completions) / 8


def counted(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Return a number that only the right row and tokens give."""
    assert f"user\n{row['question']}<|im_end|>" in prompt and len(prompt_ids) > 20
    return int(row["question"].removeprefix("say ")) + len(completion_ids) / 100


def broken(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> float:
    """Raise for some."""
    if completions.startswith("No"):
        raise ValueError("no such answer")
    return float(completions == "4")


def broken_always(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> float:
    """Raise."""
    raise ValueError("never")


HERE = "tests.tools.verify.test_rescore"


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in capsys.readouterr().out.splitlines()]


def test_the_rewards_of_the_run_itself_come_out_again_and_nothing_changes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["rescore", str(run), "--reward", f"{HERE}.same", "status=accepted"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"; 0 of 60 rewards changed", out) and not err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path in before} == before
    assert main(["rescore", str(run), "--reward", f"{HERE}.same", "scope=rollout", "--json"]) == 0
    found = objects(capsys)
    assert len(found) == 48 and all(each["old"] == each["new"] for each in found)
    assert {"run", "id", "task_id", "group_id", "member_idx", "status", "old", "new", "error"} == found[0].keys()


def test_each_episode_gets_its_own_row(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(run), "--reward", f"{HERE}.counted", "--json", "--trust-config"]) == 0
    news = {int(each["new"]) for each in objects(capsys)}
    assert news <= set(range(len(rows()))) and len(news) > 8


def test_a_row_that_is_not_certain_is_refused_with_the_fix(
    run: Path, run_yaml: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(run_yaml.read_text().replace("path: tests.e2e.agents.rows", f"path: {HERE}.ambiguous"))
    for extra, says in ((["--dataset", str(other)], "several, with different values,"), (None, "cannot be read")):
        if extra is None:
            (run / "config.yaml").unlink()
        assert main(["rescore", str(run), "--reward", f"{HERE}.counted", *(extra or [])]) == 64
        error = capsys.readouterr().err
        assert says in error and "--dataset" in error


def ambiguous(size: int = 16) -> list[dict[str, Any]]:
    """Return each question twice, with two answers."""
    return [{**row, "answer": answer} for row in rows(size) for answer in (1, 2)]


def test_few_values_give_a_confusion_table_and_failures_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = (("4", 1.0), ("4", 0.0), ("5", 0.0), ("No", 0.0))
    lines = [line(7, i, reward=old, turns=[turn("prompt"), turn("assistant", t)]) for i, (t, old) in enumerate(texts)]
    write(tmp_path / "e/t/rollout/1/7.jsonl", *lines, line(7, 4, turns=[turn("prompt")], reward=None))
    assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.broken"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"old \\ new +0 +1\n +0 +1 +1\n +1 +0 +1\n", out)
    assert "mean 0.333 -> 0.667; 1 of 3 rewards changed" in out
    assert "1 lines have no answer" in out and "1 rewards failed: 1 x ValueError: no such answer" in out
    assert "the run's tokenizer is not here" in err
    assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.broken_always"]) == 70
    assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.nothing"]) == 64


def test_many_values_give_a_correlation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["a" * n for n in range(24)]
    lines = [line(7, n, reward=n / 4, turns=[turn("prompt"), turn("assistant", t)]) for n, t in enumerate(texts)]
    write(tmp_path / "e/t/rollout/1/7.jsonl", *lines)
    assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.same"]) == 0
    assert "correlation 1.000\nmean 2.875 -> 1.438; 23 of 24" in capsys.readouterr().out
