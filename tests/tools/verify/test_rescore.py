"""``areal-lite rescore``: another reward function over dumped episodes, with their dumped rows."""

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


def asked(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Return 1 if the prompt has the row's question."""
    return float(row["question"] in prompt)


def parts(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int]) -> dict[str, float]:
    """Return two parts of a reward."""
    return {"length": float(len(completions)), "score": -1.0}


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


def test_each_episode_gets_the_row_of_its_dump(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rescore", str(run), "--reward", f"{HERE}.counted", "--json"]) == 0
    found = objects(capsys)
    assert len(found) == 60 and {each["error"] for each in found} == {None}
    news = {int(each["new"]) for each in found}
    assert news <= set(range(len(rows()))) and len(news) > 8
    assert main(["rescore", str(run), "--reward", f"{HERE}.counted", "--json", "member=3"]) == 0
    by_id = {each["id"]: each["new"] for each in found}
    assert all(each["new"] == by_id[each["id"]] for each in objects(capsys))  # its first line is filtered out


def test_a_dump_without_a_row_is_an_error_with_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for row in ({}, {"row": None}):
        write(tmp_path / "e/t/rollout/1/7.jsonl", line(7) | row, line(7, 1))
        assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.counted"]) == 64
        error = capsys.readouterr().err
        assert "e/t rollout/1/7.jsonl has no dataset row, which" in error and "takes exactly prompt," in error
        assert main(["rescore", str(tmp_path / "e/t"), "--reward", f"{HERE}.same"]) == 0


def test_a_reward_of_parts_is_the_part_that_the_runs_config_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "config.yaml"
    for key, is_length in (("key: null", False), ("key: length", True)):
        path.write_text(path.read_text().replace("    key: null", f"    {key}"))
        assert main(["rescore", str(run), "--reward", f"{HERE}.parts", "--json", "task=0"]) == 0
        assert {each["new"] == -1.0 for each in objects(capsys)} == {not is_length}
    assert main(["rescore", str(run), "--reward", f"{HERE}.same", "task=0"]) == 70
    assert "rollout.rewards.key is 'length', so return a dict with it" in capsys.readouterr().err


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
