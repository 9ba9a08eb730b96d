"""What chaos.py makes of its records: seconds of capacity, effective training time, causes that the log names."""

from __future__ import annotations
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
import pytest
from benchmarks import chaos
from benchmarks.chaos import (
    Cause,
    capacity_s,
    effective_s,
    log_lines,
    read_dumps,
    read_misdeeds,
    stall_s,
    unnamed_causes,
)
from tests.fork_server import IN_A_FORK

URL = "http://127.0.0.1:4000"


def test_capacity_counts_a_server_by_its_share_and_nothing_while_the_trainer_is_away() -> None:
    window = (100.0, 200.0)
    assert capacity_s(window, [], [[], []]) == pytest.approx(100, abs=0.1)
    assert capacity_s(window, [], [[(120.0, 140.0)], []]) == pytest.approx(90, abs=0.1)
    assert capacity_s(window, [(130.0, 150.0)], [[(120.0, 140.0)], []]) == pytest.approx(75, abs=0.1)
    assert capacity_s(window, [(190.0, math.inf)], [[(0.0, math.inf)], []]) == pytest.approx(45, abs=0.1)


def test_only_kept_tokens_of_the_window_are_effective() -> None:
    kept = [{"time": at, "tokens": 300} for at in (99.0, 101.0, 150.0, 201.0)]
    assert effective_s(kept, (100.0, 200.0), 10.0) == 60
    assert effective_s([], (100.0, 200.0), 0.0) == 0


def test_a_cause_is_named_by_the_lines_of_its_own_server_in_its_time() -> None:
    log = [
        (10.0, f"server {URL} sent log-probs that are not numbers; such requests are sent again"),
        (50.0, f"server {URL} is down: failed: ServerDisconnectedError: Server disconnected"),
        (52.0, f"server {URL} is back: it answers again"),
        (60.0, "f blocks the event loop of all episodes at a.py:1: await an async call there"),
    ]
    named = [Cause("nan", URL), Cause("kill", URL, 49.0, 50.0), Cause("kill", URL, 51.0, 51.5), Cause("block")]
    assert unnamed_causes(named, log) == []
    unnamed = [
        Cause("nan", f"{URL}1"), Cause("overflow", URL), Cause("429", URL),
        Cause("kill", URL, 10.0, 11.0), Cause("stop", URL, 53.0, 70.0), Cause("kill", f"{URL}1", 49.0, 50.0),
    ]  # fmt: skip
    assert len(unnamed_causes(unnamed, log)) == len(unnamed)
    assert unnamed_causes(unnamed[1:2], log) == [f"overflow {URL}"]


def test_a_log_is_read_by_time_and_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("12 3.250 WARNING server a is down: x\nTraceback\n12 4.5 INFO b\n")
    assert log_lines(tmp_path / "log") == [(3.25, "server a is down: x"), (4.5, "b")]


def test_misdeeds_of_ids_that_a_resumed_trainer_uses_again_do_not_count(tmp_path: Path) -> None:
    lines = [[0, -1, "start"], [3, 1, "raise"], [7, 0, "exit"], [5, -1, "start"], [6, 2, "hang"]]
    (tmp_path / "misdeeds").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_misdeeds(tmp_path / "misdeeds") == {3: (1, "raise"), 6: (2, "hang")}


def test_a_dump_names_a_misdeed_by_the_error_of_its_own_episode(tmp_path: Path) -> None:
    def line(task_id: int, member: int, status: str, error: str | None, kind: str | None = "agent") -> str:
        turns = [{"role": "prompt", "ids": [1]}, {"role": "assistant", "ids": [2, 3]}]
        each = {"task_id": task_id, "member_idx": member, "status": status, "error": error, "error_kind": kind}
        return json.dumps({**each, "turns": turns}) + "\n"

    folder = tmp_path / "rollout/0"
    folder.mkdir(parents=True)
    (folder / "1.jsonl").write_text(line(1, 0, "accepted", None) + line(1, 1, "failed", "KeyError: 'broken agent'"))
    (folder / "2.jsonl").write_text(line(2, 0, "failed", "OSError: no") + line(2, 1, "failed", "no", "engine"))
    (folder / "3.jsonl").write_text(line(3, 0, "rejected", "the workflow returned None"))
    found = read_dumps(tmp_path, {1: (1, "raise"), 2: (0, "exit"), 3: (0, "reject")})
    assert (dict(found["named"]), dict(found["unnamed"]), found["wasted"]) == ({"raise": 1}, {"exit": 1}, 6)
    assert list(found["lost"]) == ["engine: no"]


def test_a_stall_after_a_lost_node_is_not_one_of_a_killed_trainer() -> None:
    steps = [{"time": at} for at in (0.0, 2.0, 5.0, 6.0, 14.0, 15.0)]
    assert stall_s(steps, 3.0, [(7.0, 10.0)]) == 3.0
    assert stall_s(steps, 3.0, []) == 8.0
    assert stall_s(steps, 5.5, [(7.0, 10.0)]) == 1.0


def test_a_run_in_which_nothing_ends_says_where_each_task_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PATIENCE_S", 0.05)
    run = object.__new__(chaos.Chaos)
    run._later, run._waiting = [], []
    run.trainer = SimpleNamespace(  # type: ignore[assignment]
        ended=7, ended_before=0, listen=time.sleep, ask_for_stacks=lambda: "3 x\n  Agent.run at agent.py:5"
    )
    with pytest.raises(SystemExit, match=r"(?s)nothing has ended for 0.05 s, at 7 of 9 groups.*3 x\n  Agent.run at"):
        run._until(9)


def test_a_trainer_tells_its_stacks_when_it_is_asked_and_ends_with_its_parent() -> None:
    program = (
        IN_A_FORK + "from benchmarks.chaos_trainer import Orders; import threading; Orders(); threading.Event().wait()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input='{"stacks": true}\n',
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 3
    assert isinstance(json.loads(done.stdout)["stacks"], str)
    assert "most recent call first" in done.stderr
