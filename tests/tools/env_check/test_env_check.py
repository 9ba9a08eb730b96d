"""areal-lite env-check: each planted defect is found by its own check, and nothing else is."""

from __future__ import annotations
import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
import pytest
import yaml
from areal_lite.cli.commands import command_parser
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig
from areal_lite.environments.random_player import tool_call
from areal_lite.errors import ConfigError
from areal_lite.tools.env_check import command, conduct, credit
from areal_lite.tools.env_check.play import Subject
from tests.tools.env_check import planted

PLANTED = {
    "UnseededStart": "starts",
    "UnseededStep": "seeds",
    "NoisyVerifier": "verifier",
    "Level": "state",
    "Fatigue": "state",
    "OneGame": "interleaving",
    "TextReward": "rewards",
    "NotFinite": "rewards",
    "SeatReward": "rewards",
    "OutOfRange": "range",
    "WrongSolution": "oracle",
    "HalfSolution": "oracle",
    "EmptyIsRight": "empty",
    "AnythingIsRight": "empty",
    "AnswerInText": "visible",
    "CopyIsRight": "visible",
    "AnswerInSchema": "visible",
    "RewardFile": "reward file",
    "RewardFileByShell": "reward file",
    "FailedIsPassed": "verify",
    "NeverDone": "ends",
    "GoesOn": "after the end",
    "LeavesTasks": "leaks",
    "LeavesThreads": "leaks",
    "LeavesFiles": "leaks",
    "MissingTool": "schema",
    "NeedsMore": "schema",
    "RequiresMissing": "schema",
    "FailsOnCalls": "schema",
    "AnswersNoCall": "schema",
    "LimitIsDone": "truncation",
    "FactsOfLimit": "truncation",
    "Raises": "raises",
    "RaisesLater": "raises",
}


def checked(name: str, checks: list[command.Check] = command.CHECKS) -> command.Report:
    rows = [{"number": number} for number in range(4)]
    return asyncio.run(command.check(Subject({"env": f"{planted.__name__}.{name}"}, rows), checks))


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "_MAX_STEPS", 40)


@pytest.fixture(autouse=True, scope="module")
def what_was_left() -> Iterator[None]:
    yield
    planted.LeavesThreads.stop.set()
    planted.LeavesFiles.opened[0].close()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found_by_its_own_check(name: str) -> None:
    report = checked(name)
    assert {defect["check"] for defect in report.defects} == {PLANTED[name]}
    assert not report.not_run


@pytest.mark.parametrize(("name", "says"), [("Sleeps", "sleep() in called()"), ("Computes", "long computing")])
def test_code_that_blocks_is_found(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conduct, "_COMPUTED_S", 0.005)
    (defect,) = checked(name, [conduct.begins, conduct.blocking]).defects
    assert defect["check"] == "blocking" and says in defect["problem"]


@pytest.mark.parametrize("name", ["Sound", "Program", "QuietProgram", "Choices", "AlwaysYes", "AnyTool", "TwoSeats"])
def test_a_sound_environment_has_no_defect(name: str) -> None:
    report = checked(name)
    assert (report.defects, report.not_run) == ([], {})


def test_an_environment_that_refuses_random_answers_is_not_said_to_go_on_for_ever() -> None:
    report = checked("Refuses", [conduct.begins, conduct.ends, conduct.schema])
    assert report.defects == []
    assert report.skipped == {"ends": "40 of 40 random answers meant nothing, and no episode ended"}


@pytest.mark.parametrize("is_here", [False, True])
def test_files_that_stay_are_put_back_and_those_of_the_working_directory_left_alone(
    is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planted.SharedRewardFile, "place", (tmp_path,), raising=False)
    (tmp_path / "reward.txt").write_text("0")
    if is_here:
        monkeypatch.chdir(tmp_path)
    report = checked("SharedRewardFile", [conduct.begins, credit.reward_files])
    assert [defect["check"] for defect in report.defects] == [] if is_here else ["reward file"]
    assert (tmp_path / "reward.txt").read_text() == "0"
    assert [path.name for path in tmp_path.iterdir() if is_here] == ["reward.txt"] * is_here


def test_drawn_calls_fit_their_schema() -> None:
    properties = {
        "few": {"type": "integer", "minimum": 3, "maximum": 4},
        "real": {"type": "number"},
        "wide": {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        "below": {"type": "integer", "maximum": -1},
        "flag": {"type": "boolean"},
        "nothing": {"type": "null"},
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "many": {"type": "array", "items": {"type": "integer", "minimum": 5, "maximum": 5}, "minItems": 2},
        "inner": {"type": "object", "properties": {"word": {"type": "string"}}},
    }
    calls = [tool_call(planted.schema("t", properties, []), random.Random(seed)) for seed in range(30)]
    drawn = {name: {json.dumps(call.arguments[name]) for call in calls} for name in properties}
    assert (drawn["few"], drawn["flag"], drawn["nothing"]) == ({"3", "4"}, {"true", "false"}, {"null"})
    assert (drawn["colour"], drawn["many"]) == ({'"red"', '"blue"'}, {"[5, 5]"})
    assert drawn["below"] == {"-1"} and len(drawn["wide"]) == 30
    assert drawn["real"] <= set("0123456789") and len(drawn["real"]) > 5
    assert drawn["inner"] == {f'{{"word": "{word}"}}' for word in "ab1"}


@pytest.mark.parametrize(
    ("name", "why"), [("NoReset", "OSError: no licence"), ("CannotBeMade", "ImportError: no engine")]
)
def test_an_environment_that_does_not_begin_is_not_checked_further(name: str, why: str) -> None:
    report = checked(name)
    assert report.not_run == {"begins": why}
    assert (report.defects, report.skipped) == ([], {})


def test_a_check_that_cannot_run_says_why_and_the_others_run() -> None:
    report = checked("FailsInClose")
    assert set(report.not_run) >= {"ends", "schema"}
    assert all(reason == "OSError: no disk" for reason in report.not_run.values())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    values = {
        "experiment_name": "e",
        "model_path": "m",
        "env": f"{planted.__name__}.Sound",
        "workflow_kwargs": {"seed": 4},
        "train_dataset": {"kwargs": {"seed": 5}},
        "trainer": {"total_steps": 1, "learning_rate": 1e-5},
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.parametrize(("name", "code"), [("Sound", 0), ("Raises", 1), ("NoReset", 2)])
def test_the_command_says_each_defect_with_its_fix_and_ends_with_its_code(
    name: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env-check", f"{planted.__name__}.{name}", "--rows", "2"]) == code
    *found, last = capsys.readouterr().out.splitlines()
    if code == 0:
        assert found == ["skipped: failed_programs: it starts no program to judge an answer"]
    if code == 1:
        assert found[0].startswith("raises: step raises ValueError(")
        assert found[1] == "  fix: raise WrongAction for what a model may write: it reads the text"
    if code == 2:
        assert found == ["not run: begins: OSError: no licence"]
    assert last == ["sound", "1 defect", "not all checked"][code] + f": {planted.__name__}.{name}"


def test_json_has_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env-check", f"{planted.__name__}.Raises", "--json"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["env"] == f"{planted.__name__}.Raises"
    assert [(sorted(defect), defect["check"]) for defect in made["defects"]] == [
        (["check", "fix", "problem"], "raises")
    ]
    assert (list(made["skipped"]), made["not_run"]) == (["failed_programs"], {})


def test_a_config_gives_the_environment_its_arguments_and_rows(config: Path) -> None:
    options, rows = command._played(str(config), load_config(config, root=RunConfig), 3)
    assert options == {"env": f"{planted.__name__}.Sound", "seed": 4}
    assert [row["number"] for row in rows] == [5, 6, 7]
    (config.parent / "rows.jsonl").write_text('{"number": 8}\n{"number": 9}\n{"number": 10}\n')
    in_file = load_config(config, [f"train_dataset={{path: {config.parent}/rows.jsonl}}"], root=RunConfig)
    assert command._played(str(config), in_file, 2)[1] == [{"number": 8}, {"number": 9}]
    assert [row["number"] for row in command._played(f"{planted.__name__}.Sound", None, 2)[1]] == [0, 1]


def test_what_cannot_be_checked_is_refused_with_the_fix(config: Path) -> None:
    for arguments, says in (
        (["mcp:server"], "plays rows of yours: give a CONFIG.yaml"),
        ([f"{planted.__name__}.Sond"], rf"env is '{planted.__name__}.Sond': .* did you mean 'Sound'"),
        (["reasning-gym:chain_sum"], "did you mean 'reasoning-gym'"),
        ([f"{planted.__name__}.Sound", "--signal"], "--signal needs a model: give a CONFIG.yaml"),
    ):
        with pytest.raises(ConfigError, match=says):
            options = command_parser(["env-check"]).parse_args(["env-check", *arguments])
            command.run(options)
    config.write_text(config.read_text() + "workflow: tests.e2e.agents.LetterAgent\n")
    with pytest.raises(ConfigError, match="env-check plays what the key env names"):
        command.run(command_parser(["env-check"]).parse_args(["env-check", str(config)]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found"), [("Letters", []), ("NoLetters", ["signal"])])
def test_a_model_without_rewards_that_differ_in_any_group_has_no_signal(
    name: str, found: list[str], tiny_server: str, tiny_model: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load(config.read_text()) | {"model_path": str(tiny_model), "env": f"{planted.__name__}.{name}"}
    values["rollout"] = {"backend": "embedded", "addresses": [tiny_server], "group_size": 4, "consumer_batch_size": 1}
    values["rollout"]["gconfig"] = {"max_new_tokens": 4}
    config.write_text(yaml.safe_dump(values))
    assert main(["env-check", str(config), "--rows", "1", "--signal", "--json"]) == len(found)
    defects = json.loads(capsys.readouterr().out)["defects"]
    assert [defect["check"] for defect in defects] == found
    if found:
        assert defects[0]["problem"] == "no group of 20 has rewards that differ: they are 0.25"
    assert not list(Path(config.parent).glob("runs*"))
