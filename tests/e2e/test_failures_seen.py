"""Every command says which episodes failed, by cause, and a run without a success exits with an error."""

from __future__ import annotations
import json
from pathlib import Path
from typing import Any, cast
import pytest
import yaml
from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group, Trajectory
from areal_lite.cli import main as cli
from areal_lite.rollout.episodes.ended_groups import MAX_CAUSES, FailureTally
from areal_lite.runs import entry_points
from areal_lite.runs.evaluation import no_success
from areal_lite.tools.run import rollout as rollout_command


class Fails:
    """An agent that fails on rows with ``bad``, before it calls the model."""

    async def run(self, data: dict[str, Any], **_: Any) -> float | None:
        if data["bad"]:
            raise KeyError(f"no column answer in row {data['row']}")
        return None


def run(command: str, tmp_path: Path, tiny_model: Path, *, bad: list[int], **changes: Any) -> int:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"row": row % 2, "bad": row in bad} for row in range(4)]))
    config = {
        "experiment_name": "e",
        "trial_name": "t",
        "fileroot": str(tmp_path),
        "model_path": str(tiny_model),
        "workflow": "tests.e2e.test_failures_seen.Fails",
        "train_dataset": {"path": str(rows)},
        "eval_dataset": {"path": str(rows)},
        "server": {"num_threads": 1, "device": "cpu", "dtype": "float32"},
        **changes,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return cli.main([command, str(path)])


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_a_run_whose_groups_all_failed_exits_with_70_and_names_the_causes(
    command: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert run(command, tmp_path, tiny_model, bad=[0, 1, 2, 3]) == 70
    shown, said = capsys.readouterr()
    assert shown.startswith("server ") and "embedded" in shown
    (record,) = map(json.loads, (tmp_path / f"e/t/{command}_metrics.jsonl").read_text().splitlines())
    assert (record["rollout/failed_episodes"], record["rollout/failed_episodes/agent"]) == (4, 4)
    assert record["episodes/failed"] == 4 and record["servers/0/up"] == 1 and record[f"{command}/seconds"] > 0
    assert "no episode on the 4 rows gave a reward: 2 x KeyError" in said
    assert "4 episodes failed:" in caplog.text
    assert "2  agent             KeyError: 'no column answer in row 0'" in caplog.text
    assert caplog.text.count("Traceback (most recent call last)") == 1


def test_a_run_with_some_failures_says_so_and_exits_with_0(
    tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("rollout", tmp_path, tiny_model, bad=[1]) == 0
    assert "1 episode failed:" in caplog.text


def group(status: EpisodeStatus, *kinds: FailureKind | None, failure: Failure | None = None) -> Group:
    failures = [None if kind is None else Failure(kind, "E", f"{kind} broke", "trace") for kind in kinds]
    trajectories = [
        Trajectory(
            member_idx=place,
            status=EpisodeStatus.ACCEPTED if failed is None else EpisodeStatus.FAILED,
            failure=failed,
        )
        for place, failed in enumerate(failures)
    ]
    return Group(task_id=0, group_id="0", status=status, data={}, trajectories=trajectories, failure=failure)


def test_failed_members_of_accepted_groups_count() -> None:
    tally = FailureTally()
    tally.add(group(EpisodeStatus.ACCEPTED, None, FailureKind.AGENT, FailureKind.ENGINE))
    tally.add(group(EpisodeStatus.FAILED, failure=Failure(FailureKind.DEADLINE, "", "too long")))
    tally.add(group(EpisodeStatus.CANCELLED, failure=Failure.cancelled("surplus")))
    assert tally.metrics() == {
        "failed_episodes": 3, "failed_episodes/agent": 1, "failed_episodes/engine": 1, "failed_episodes/deadline": 1,
    }  # fmt: skip
    assert (FailureTally().table(), FailureTally().top_cause()) == ("", "")


def test_without_a_reward_the_run_says_what_an_agent_returns_instead_of_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none, failed = (
        group(EpisodeStatus.REJECTED),
        group(EpisodeStatus.FAILED, failure=Failure(FailureKind.AGENT, "E", "x")),
    )
    none.rejection = "the workflow returned None"
    fix = "return a number from run(): None rejects the episode"
    assert str(no_success([none, failed])).endswith(f"1 x the workflow returned None; 1 x E: x: {fix}")
    assert "run()" not in str(no_success([failed]))
    monkeypatch.setattr(entry_points, "run_rollout", lambda config, on_step: [none])
    rollout_command._rollout(cast(Any, None), lambda step, metrics: None)
    assert capsys.readouterr().out == f"groups: 1 rejected; mean reward 0.000 over 0 episodes\n{fix}\n"


def test_the_top_cause_is_the_most_common_one_of_the_most_common_kind() -> None:
    tally = FailureTally()
    for kind, message in [("agent", "row 1"), ("agent", "row 2"), ("agent", "row 2"), *[("engine", "HTTP 503")] * 2]:
        tally.add(group(EpisodeStatus.FAILED, failure=Failure(FailureKind(kind), "E", f"{message} {'x' * 100}")))
    assert tally.top_cause() == "agent, E: row 2 " + "x" * 51


def test_distinct_causes_are_bounded() -> None:
    tally = FailureTally()
    for number in range(MAX_CAUSES + 50):
        failure = Failure(FailureKind.AGENT, "E", f"row {number}")
        tally.add(group(EpisodeStatus.FAILED, failure=failure))
    assert tally.metrics()["failed_episodes"] == MAX_CAUSES + 50
    assert "50  agent             other causes" in tally.table()
