"""A run's folder is data: no command that reads one imports, follows, writes, or waits for what somebody put there."""

from __future__ import annotations
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import yaml
import areal_lite
from areal_lite.cli.main import main
from areal_lite.tools.inspect import dump_index
from areal_lite.tools.inspect.dumps import Dumps
from tests.fork_server import IN_A_FORK
from tests.tools.inspect.dump_lines import line, turn, write

ESC = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"
SECONDS = 60
"""Far more than any of these commands takes, and far less than for ever."""
EVIL = "import pathlib\npathlib.Path(__file__).with_name('owned').touch()\n\ndef f(*_, **__):\n    return 0.0\n"
TRAINER = {"total_steps": 1, "learning_rate": 1e-5}
CONFIG: dict[str, Any] = {
    "experiment_name": "e",
    "trial_name": "t",
    "model_path": "evil.model",
    "workflow": "evil.Workflow",
    "should_accept_fn": "evil.f",
    "train_dataset": {"path": "evil.rows", "custom_cls": {"path": "evil", "name": "Rows"}},
    "eval_dataset": {"path": "evil.rows"},
    "rollout": {"group_size": 2, "consumer_batch_size": 1, "dump_to_file": True},
    "trainer": {**TRAINER, "advantage": "evil.f", "loss": "evil.f"},
}
METRICS = {"step": 1, "time": 99.0, "train/loss": 0.5, "train/reward_mean": 0.5, "train/groups": 1, "train/episodes": 2}
READERS = {
    "inspect": (),
    "inspect --by turns": ("--by", "turns"),
    "inspect --diagnose": ("--diagnose",),
    "inspect --tokens": ("--tokens", "rollout/0/7.jsonl:1"),
    "verify": (),
    "plot": (),
    "export": ("--sft", "out.jsonl"),
    "view": ("--export", "out.html"),
    "rescore": ("--reward", "tests.tools.verify.test_rescore.same"),
    "replay": (),
    "continue": ("--task", "7", "--turn", "0", "--address", "127.0.0.1:9"),
}
"""Commands that read a folder, with the arguments that they need."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def group(task: int | str) -> list[dict[str, Any]]:
    """Return the lines of a sound group."""
    answer = turn("assistant", "It is 4", turn_idx=1, parent_idx=0, start=2, versions=[0, 0])
    version_0 = {"start_version": 0, "head_version": 0, "tail_version": 0, "turns": [turn("prompt", "2+2?"), answer]}
    timings = {"queued_s": 0.0, "run_s": 1.5, "finished_at": 98.0}
    lines = [line(task, place, timings=timings, **version_0) for place in range(2)]
    lines[0]["row"] = {"question": "2+2?"}
    return lines


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up run whose config names evil.py of the working directory wherever a config can name code."""
    root = tmp_path / "e" / "t"
    write(root / "rollout/0/7.jsonl", *group(7))
    write(root / "metrics.jsonl", METRICS)
    write(root / "batches.jsonl", {"step": 1, "task_ids": [7]})
    (root / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"fileroot": str(tmp_path)}))
    place = tmp_path / "cwd"
    place.mkdir()
    (place / "evil.py").write_text(EVIL)
    monkeypatch.chdir(place)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    return root


def command(name: str, run: Path) -> list[str]:
    return [name.split()[0], str(run), *READERS[name]]


def in_time(runs: list[Path]) -> dict[str, list[str]]:
    """Run every command on each folder, in a process that is killed if one waits for ever; return their words."""
    code = IN_A_FORK + (
        "import json, sys\nfrom areal_lite.cli.main import main\nsys.stderr = sys.stdout\n"
        "for arguments in json.loads(sys.argv[1]):\n    print('exit code', main(arguments), end='\\0', flush=True)"
    )
    commands = json.dumps([command(name, run) for name in READERS for run in runs])
    done = subprocess.run(
        [sys.executable, "-c", code, commands], stdout=subprocess.PIPE, text=True, timeout=3 * SECONDS
    )
    said = done.stdout.split("\0")[:-1]
    assert len(said) == len(READERS) * len(runs), said[-1:]
    return {name: said[place * len(runs) : (place + 1) * len(runs)] for place, name in enumerate(READERS)}


# -- code


@pytest.mark.parametrize("name", READERS)
def test_no_command_imports_what_a_folder_names(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    try:
        main(command(name, run))
    finally:
        sys.path[:] = path
    if name == "export":
        assert len(areal_lite.load_run(run).tokens) == 8
    assert not Path("owned").exists() and "evil" not in sys.modules
    if name in ("replay", "continue"):
        error = capsys.readouterr().err
        assert ("--trust-config" if name == "continue" else "evil.model") in error, error


def test_a_replay_starts_only_with_the_flag_if_the_config_names_code(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    try:
        assert main(["replay", str(run), f"model_path={tiny_model}", f"fileroot={run.parents[1]}"]) == 64
    finally:
        sys.path[:] = path
    assert "trainer.advantage is 'evil.f'" in (error := capsys.readouterr().err) and "--trust-config" in error
    assert not Path("owned").exists() and not (run.parent / "t-replay").exists()


def test_batches_that_are_a_link_out_of_the_folder_are_an_error(
    run: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "batches.jsonl").unlink()
    link_out(run / "batches.jsonl")
    assert main(["replay", str(run), f"model_path={tiny_model}", f"fileroot={run.parents[1]}"]) == 64
    assert "which is not followed" in capsys.readouterr().err


def test_verify_says_what_it_did_not_import_and_the_flag_imports_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list(sys.path)
    try:
        main(["verify", str(run)])
        said = [text for text in capsys.readouterr().out.splitlines() if "--trust-config" in text]
        assert len(said) == 1 and said[0].startswith("not proved: ") and "'evil.f'" in said[0], said
        assert not Path("owned").exists()
        main(["verify", str(run), "--trust-config"])
        assert Path("owned").exists()
        assert "--trust-config" not in capsys.readouterr().out
    finally:
        sys.path[:] = path


def test_a_reward_function_gets_the_dumped_row_and_no_rows_that_a_folder_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--reward", "tests.tools.verify.test_rescore.asked"]
    assert main(["rescore", str(run), *asked]) == 0
    assert "mean 0.500 -> 1.000" in capsys.readouterr().out
    main(["verify", str(run), *asked])
    assert "rewards: rollout/0/7.jsonl:2: the reward is 0.5, and" in capsys.readouterr().out
    assert not Path("owned").exists() and "evil" not in sys.modules


def test_a_recorded_config_does_not_read_the_environment(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLANTED", "planted-value")
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"model_path": "${oc.env:PLANTED}"}))
    assert main(["verify", str(run)]) == 2
    assert main(["replay", str(run)]) == 64
    out, err = capsys.readouterr()
    assert "planted-value" not in out + err and "${oc.env:PLANTED}" in err


# -- files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_out(path: Path) -> None:
    path.symlink_to(outside(path))


def outside(path: Path) -> Path:
    """Write a file beside all folders of the test that must not be read."""
    secret = Path.cwd().parent / f"secret{path.suffix}"
    secret.write_text(json.dumps(line(666, turns=[turn("assistant", "PLANTED")]) | METRICS) + "\n")
    return secret


def sparse(path: Path) -> None:
    """A regular file of 8 TB that takes no place on the disk."""
    with path.open("wb") as file:
        file.truncate(8 << 40)


FILES = (
    *("config.yaml", "metrics.jsonl", "batches.jsonl", "skipped_updates.jsonl", "rollout/0/7.jsonl", "index.sqlite"),
    *(
        "training/1.parquet",
        "model/tokenizer_config.json",
        "model/manifest.json",
        "checkpoints/step_00000001/config.yaml",
    ),
    *(
        "checkpoints/step_00000001/manifest.json",
        "weights/v00000001/manifest.json",
        "checkpoints/step_00000001/trainer.json",
    ),
)
"""Every kind of file that a command reads."""


@pytest.mark.timeout(4 * SECONDS)
def test_nothing_waits_for_or_follows_what_is_not_a_file_of_the_folder(run: Path) -> None:
    runs = []
    for plant in (fifo, endless, link_out, sparse):
        runs.append(run.parent / plant.__name__)
        shutil.copytree(run, runs[-1])
        for name in FILES:
            place = runs[-1] / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            plant(place)
        if plant is not sparse:  # a whole line before what must not be read
            write(runs[-1] / "rollout/0/8.jsonl", line(8))
    said = in_time(runs)
    assert not any("PLANTED" in text or "Traceback" in text for texts in said.values() for text in texts), said
    assert all("not read: config.yaml" in text and text[-1] in "12" for text in said["verify"]), said["verify"]
    secrets = [path.read_text() for path in Path.cwd().parent.glob("secret*")]
    assert all(json.loads(text)["task_id"] == 666 for text in secrets)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "rollout/0/7.jsonl"])
@pytest.mark.parametrize("plant", [fifo, endless, link_out, sparse])
def test_what_cannot_be_read_is_an_exit_code_of_its_own(
    plant: Callable[[Path], None], name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name != "metrics.jsonl":
        (run / "metrics.jsonl").write_text("")
        (run / "batches.jsonl").unlink()
    (run / name).unlink()
    plant(run / name)
    assert main(["verify", str(run)]) == 2, capsys.readouterr().out
    out = capsys.readouterr().out
    assert f"not read: {name}" in out and "sound" not in out


def test_a_folder_that_is_a_link_is_not_read(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rollout").rename(tmp_path / "elsewhere")
    (run / "rollout").symlink_to(tmp_path / "elsewhere")
    (run.parent / "all").symlink_to("/")
    assert main(["inspect", str(run)]) in (0, 64)
    out, err = capsys.readouterr()
    assert "2+2?" not in out and "not followed" in err
    with Dumps.open(run.parent, may_be_empty=True) as dumps:
        assert list(dumps.runs) == [f"{tmp_path.name}/e/t".partition("/")[2]]


def test_a_link_inside_of_the_folder_is_read(run: Path) -> None:
    (run / "rollout/0/7.jsonl").rename(run / "kept.jsonl")
    (run / "rollout/0/7.jsonl").symlink_to(run / "kept.jsonl")
    with Dumps.open(run) as dumps:
        assert dumps.count() == 2 and not dumps.problems()


def test_a_plot_replaces_a_link_in_place_of_writing_through_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (run / "metrics.png").symlink_to(tmp_path / "precious")
    assert main(["plot", str(run)]) == 0
    assert (tmp_path / "precious").read_text() == "precious"
    assert (run / "metrics.png").read_bytes().startswith(b"\x89PNG")


def bomb() -> str:
    levels = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(["l0: &l0 [x, x]", *levels])


@pytest.mark.parametrize(
    "text", [bomb(), "[" * 200_000, "a: " + "1:" * 400_000 + "1", "a: " + "9" * 900_000, "\x00", "- 1", ""]
)
def test_a_config_that_cannot_be_read_does_not_make_a_run_sound(
    text: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text(text)
    began = time.monotonic()
    code = main(["verify", str(run)])
    assert time.monotonic() - began < SECONDS
    out = capsys.readouterr().out
    assert code in (1, 2) and "not read: config.yaml" in out and "sound" not in out
    assert main(["inspect", str(run), "--tokens", "rollout/0/7.jsonl:1"]) == 0


# -- the index


def database(path: Path) -> bytes:
    """Write a database with a table of the index's names and return its bytes."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE episodes(precious)")
        connection.execute("INSERT INTO episodes VALUES ('precious')")
    connection.close()
    return path.read_bytes()


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_an_index_of_the_folder_is_neither_read_nor_written(suffix: str, run: Path, tmp_path: Path) -> None:
    before = database(tmp_path / "other.sqlite")
    (run / f"index.sqlite{suffix}").symlink_to(tmp_path / "other.sqlite")
    with Dumps.open(run) as dumps:
        assert dumps.count() == 2
    assert (tmp_path / "other.sqlite").read_bytes() == before
    (run / f"index.sqlite{suffix}").unlink()
    before = database(run / f"index.sqlite{suffix}")
    with Dumps.open(run) as dumps:
        assert dumps.count() == 2
    assert (run / f"index.sqlite{suffix}").read_bytes() == before


def test_rows_of_an_index_that_came_with_the_folder_hide_nothing(run: Path, tmp_path: Path) -> None:
    """The index that a stranger made says that all is read, and that rows are in other files."""
    with Dumps.open(run) as dumps:
        made = Path(dumps.summary()[0]["index"])
    with sqlite3.connect(made) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("UPDATE files SET path = '../../../../../../../../etc/passwd'")
        connection.execute("UPDATE episodes SET reward = 1e9, offset = 0, length = 1000000000000")
        connection.execute("CREATE TRIGGER evil AFTER INSERT ON episodes BEGIN DELETE FROM episodes; END")
    connection.close()
    made.rename(run / "index.sqlite")
    with Dumps.open(run) as dumps:
        assert [(row["file"], row["reward"]) for row in dumps.rows()] == [("rollout/0/7.jsonl", 0.5)] * 2


def test_a_cache_that_another_user_may_write_holds_no_index(
    run: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "areal-lite").mkdir()
    (cache / "areal-lite").chmod(0o777)
    monkeypatch.setattr(dump_index.tempfile, "tempdir", str(tmp_path))
    with Dumps.open(run) as dumps:
        assert Path(dumps.summary()[0]["index"]).parent == tmp_path / f"areal-lite-{os.getuid()}"
        assert "may be written by other users" in dumps.summary()[0]["notes"][0]
        assert not list((cache / "areal-lite").iterdir())


def test_indexes_of_runs_that_nobody_looked_at_for_long_are_removed(run: Path, cache: Path) -> None:
    (cache / "areal-lite").mkdir(mode=0o700)
    for name in ("old.sqlite", "old.sqlite-wal", "new.sqlite", "other"):
        (cache / "areal-lite" / name).touch()
        if not name.startswith("new"):
            os.utime(cache / "areal-lite" / name, (1, 1))
    Dumps.open(run).close()
    names = {path.name for path in (cache / "areal-lite").iterdir()}
    assert {"new.sqlite", "other"} <= names and not names & {"old.sqlite", "old.sqlite-wal"}


# -- hostile values


def test_numbers_that_no_run_has_end_in_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "rollout/0/8.jsonl", *group(10**18))
    config = CONFIG | {"trainer": {**TRAINER}, "fileroot": "x"}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    (run / "batches.jsonl").unlink()
    write(run / "metrics.jsonl", METRICS, METRICS | {"step": 10**15, "train/groups": 10**15})
    assert main(["verify", str(run)]) == 1


@pytest.mark.parametrize(
    "values",
    [
        {"step": "one"}, {"step": 1.5}, {"time": None}, {"train/loss": {}}, {"train/groups": "x"}, {"train/groups": []},
        {"train/reward_mean": [1]}, {"train/episodes": 10**400}, {"timing/step_s": "x"}, {"eval/episodes": {}},
        {"train/staleness_max": "x"}, {"train/computed_tokens": "x"}, {"train/skipped_updates": "x"},
    ],
)  # fmt: skip
def test_records_of_any_shape_end_with_a_finding_and_no_traceback(
    values: dict[str, Any], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": {**TRAINER}}))
    write(run / "metrics.jsonl", METRICS | values)
    assert main(["verify", str(run)]) in (1, 2)
    for name in ("plot", "view", "inspect"):
        assert main(command(name, run)) in (0, 64), name
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"step":' * 100_000, '{"step":1,"time":' + "9" * 5000 + "}", "\xff"])
def test_text_that_is_no_record_ends_with_a_finding(text: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text(text + "\n")
    (run / "rollout/0/9.jsonl").write_text(text + "\n")
    assert main(["verify", str(run)]) == 1
    assert "Traceback" not in capsys.readouterr().err


# -- terminals


def test_no_control_sequence_of_a_folder_reaches_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = f"e{ESC}"
    wrong = CONFIG | {evil: evil, "rollout": {evil: 1}, "train_dataset": {"path": evil}, "trainer": {"advantage": evil}}
    write(run / f"rollout/0/{ESC}8.jsonl", line(evil, status="failed", error=evil, error_kind="agent", error_type=evil))
    write(run / "metrics.jsonl", METRICS | {evil: evil})
    write(run / "batches.jsonl", {"step": 1, "task_ids": [evil]})
    for config in (wrong, CONFIG | {"trainer": {**TRAINER, "advantage": f"evil.{ESC}"}, "model_path": evil}):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        for name in READERS:
            main(command(name, run))
            out, err = capsys.readouterr()
            assert not set(out + err) & set(ESC) - set("0;ownedJ2[]"), (name, out, err)
