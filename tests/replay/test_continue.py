"""A dumped episode run again from a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_lite.errors import ConfigError
from areal_lite.inspect.continue_episode import Options, continue_episode
from tests.replay.agents import TwoCallsAgent


def lines(run: Path, task: int | str) -> list[dict[str, Any]]:
    (path,) = run.glob(f"rollout/*/{task}.jsonl")
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def ids(turns: list[dict[str, Any]]) -> list[list[int]]:
    return [turn["ids"] for turn in turns]


def task(run: Path, *, forks: bool) -> str:
    """Return the task of a row on which the agent forks, or does not."""
    found = [path.stem for path in sorted(run.glob("rollout/*/*.jsonl"))]
    return next(name for name in found if lines(run, name)[0]["row"]["forks"] is forks)


def test_turns_before_k_are_kept_and_the_branch_is_an_episode_that_names_its_parent(plain_run: Path) -> None:
    name = task(plain_run, forks=False)
    original = next(line for line in lines(plain_run, name) if line["member_idx"] == 1)
    console = Console(record=True, width=160)
    options = Options(path=plain_run, task=name, member=1, turn=3, n=2, overrides=["rollout.gconfig.max_new_tokens=9"])
    run_dir = continue_episode(options, console=console)
    assert run_dir == plain_run.with_name("plain-continued")
    branches = lines(run_dir, 0)
    assert [branch["member_idx"] for branch in branches] == [0, 1]
    for branch in branches:
        assert ids(branch["turns"][:3]) == ids(original["turns"][:3])
        assert branch["turns"][1]["logprobs"] == original["turns"][1]["logprobs"]
        assert branch["status"] == "accepted"
        assert branch["extra"]["continues"] == {
            **{"run": str(plain_run), "task_id": int(name), "member_idx": 1, "turn_idx": 3},
        }
    assert len({tuple(branch["turns"][3]["ids"]) for branch in branches}) == 2
    text = console.export_text()
    assert "the first 3 turns are the same" in text
    assert f"task_id {name}, member_idx 1, turn_idx 3" in " ".join(text.split())
