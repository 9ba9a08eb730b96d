"""``areal-lite inspect`` answers in the terminal and as JSON lines, and its errors say the fix."""

from __future__ import annotations
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.cli.main import main
from areal_lite.tools.inspect.filters import KEYS
from tests.tools.inspect.dump_lines import failed, line, schema_1, turn, write

EVIL = "[red]x[/red] \x1b]0;owned\x07 \x1b[2J \x9b2J \u202e"
DOCS = Path(__file__).parents[3] / "docs/trajectories.md"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "exp" / "t"
    write(root / "rollout/3/7.jsonl", line(7, 0), line(7, 1, reward=1.0, turns=[turn("assistant", "It is 5", 3)]))
    write(root / "rollout/3/8.jsonl", failed(8, 0), schema_1(8, 1, reward=0.0))
    write(root / "rollout/4/12.jsonl", line(12, 0, reward=None))
    return root


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> tuple[str, str]:
    assert main(["inspect", *map(str, arguments)]) == code
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def objects(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in answer(capsys, *arguments, "--json")[0].splitlines()]


def test_json_is_one_dumped_line_per_line_with_its_place(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = objects(capsys, run)
    assert [each["id"] for each in found] == [
        *("rollout/3/7.jsonl:1", "rollout/3/7.jsonl:2", "rollout/3/8.jsonl:1", "rollout/3/8.jsonl:2"),
        "rollout/4/12.jsonl:1",
    ]
    place = {"run": "exp/t", "scope": "rollout", "version": 3, "id": "rollout/3/7.jsonl:1"}
    assert found[0] == line(7, 0) | place
    assert len(objects(capsys, run, "--limit", "2")) == 2


def test_terms_sort_limit_and_offset_select(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def tasks(*arguments: str) -> list[tuple[int, int]]:
        return [(each["task_id"], each["sample_idx"]) for each in objects(capsys, run, *arguments)]

    assert tasks("status=accepted", "reward<1") == tasks("status=accepted reward<1") == [(7, 0), (8, 1)]
    assert tasks("status=accepted", "--limit", "9", "reward<1") == [(7, 0), (8, 1)]
    assert tasks("--sort", "-reward", "--limit", "2") == [(7, 1), (7, 0)]
    assert tasks("--sort=reward", "--offset", "1", "--limit", "1") == [(7, 0)]
    assert tasks("error~Timeout", "or", "version>=4") == [(8, 0), (12, 0)]
    assert tasks("--sample", "2", "--seed", "5") == tasks("--seed", "5", "--sample", "2")
    assert tasks('text~"is 5"') == [(7, 1)]


def test_each_level_has_its_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, tmp_path / "exp" / "u")
    runs, _ = answer(capsys, tmp_path)
    assert re.search(r"^exp/t +3..4 +3 +5 +0.500 +4 accepted, 1 failed", runs, re.MULTILINE)
    assert re.search(r"^exp/u ", runs, re.MULTILINE)
    for part, listed in ((("--limit", "1"), "exp/t"), (("--offset", "1"), "exp/u")):
        assert [each["run"] for each in objects(capsys, tmp_path, "--by", "runs", *part)] == [listed]
    versions, _ = answer(capsys, run)
    assert re.search(r"^rollout +3 +2 +4 +0.500 +4.000 +3 accepted, 1 failed", versions, re.MULTILINE)
    assert "1 x agent: TimeoutError, such as rollout/3/8.jsonl:1\nTraceback" in versions
    groups, _ = answer(capsys, run, "--by", "groups")
    assert re.search(r"^rollout +3 +7 +7 +2 +0.750 +0.500 +1.000 +2 accepted", groups, re.MULTILINE)
    episodes, _ = answer(capsys, run, "status=failed")
    assert re.search(r"^rollout/3/8.jsonl:1 +failed +- +4 .*TimeoutError: too slow", episodes, re.MULTILINE)
    turns, _ = answer(capsys, run / "rollout/3/7.jsonl")
    assert "assistant (2 tokens, 2 trained, stop)\nIt is 4\n" in turns
    for level in ("runs", "versions", "groups"):
        assert all(each["run"] == "exp/t" for each in objects(capsys, run, "--by", level))


def test_a_page_says_how_many_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "2 of 5; --limit" in answer(capsys, run, "--limit", "2")[0]
    assert " of " not in answer(capsys, run, "status=failed")[0]
    assert "nothing matches" in answer(capsys, run, "reward>7")[1]


def test_numbers_of_any_size_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = line(90, reward=-1e300, timings={"finished_at": 1e300, "run_s": -1e300}, seqlen=2**62, sample_idx=2**62)
    write(run / "rollout/9/90.jsonl", odd, odd)
    most = str(10**30)
    for options in (("--sort", "finished"), ("--by", "groups"), ("--by", "runs"), ("--offset", "-3"), ("--json",)):
        for limit in (("--limit", most), ("--limit", most, "--offset", most), ()):
            answer(capsys, run, *options, *limit)


def test_a_difference_names_the_first_token_and_character(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "rollout/3/9.jsonl", line(9), line(9, 1, turns=[turn("prompt", "2+2?"), turn("assistant", "It's 4")]))
    shown, _ = answer(capsys, run, "--diff", "rollout/3/9.jsonl:1", "rollout/3/9.jsonl:2")
    assert "the token ids are equal" in shown
    assert "character 6 is the first that differs:\n  rollout/3/9.jsonl:1: '2+2?It' ' is 4'" in shown
    shown, _ = answer(capsys, run, "--diff", "rollout/3/7.jsonl:1", "rollout/3/7.jsonl:2")
    assert "token 2 is the first that differs:\n  rollout/3/7.jsonl:1: id 0, turn 1, assistant, log-prob -0.5" in shown
    assert re.search(r"^reward +0.500 +1.000", shown, re.MULTILINE)
    (found,) = objects(capsys, run, "--diff", "rollout/3/7.jsonl:1", "rollout/3/7.jsonl:2")
    assert (found["token"]["index"], found["text"], found["rewards"]) == (2, 0, [0.5, 1.0])


def test_tokens_are_listed_with_what_training_uses(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, note = answer(capsys, run, "--tokens", "rollout/3/7.jsonl:1")
    assert re.search(r"^ +2 +1 +assistant +0 +- +1 +-0.5000 +3", table, re.MULTILINE)
    assert "the run's tokenizer is not on this machine" in note
    found = objects(capsys, run, "--tokens", "rollout/3/7.jsonl:1")
    assert found[0] == {
        **{"index": 0, "turn": 0, "role": "prompt", "id": 0, "text": None, "mask": 0, "logprob": None, "version": None},
        "image": None,
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rewrd<1",), "did you mean 'reward'?"),
        (("reward<1 )",), "a ')' has no '('"),
        (("--sort", "status"), "cannot sort by 'status'"),
        (("--tokens", "7"), "ids are FILE:LINE"),
        (("--diff", "rollout/3/7.jsonl:1", "rollout/3/7.jsonl:9"), "has no episode"),
        (("--by", "shoes"), "invalid choice: 'shoes'"),
        (("--by", "groups", "--sort", "reward", "--sample", "3"), "--by groups has no sample and no sort: remove it"),
        (("--by", "problems", "reward<1", "--offset", "2"), "--by problems has no filter and no offset"),
        (("--by", "versions", "--limit", "2"), "--by versions has no limit: remove it, or use another --by"),
        (("--by", "runs", "--sample", "2"), "--by runs has no sample"),
        (("--nope",), "unrecognized arguments: --nope"),
    ],
)
def test_wrong_arguments_end_with_64_and_the_fix(
    run: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        _, text = answer(capsys, run, *arguments, code=64)
    except SystemExit as exit:
        assert exit.code == 64
        text = capsys.readouterr().err
    assert said in text and text.startswith("error: ")


def test_a_path_without_dumps_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no dumped episodes here" in answer(capsys, tmp_path, code=64)[1]
    assert "No such file" in answer(capsys, tmp_path / "nothing", code=64)[1]


def test_no_control_character_reaches_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**line(66, error=EVIL), "turns": [turn("assistant", EVIL, stop_reason=EVIL, agent=EVIL)]}
    write(
        run / "rollout/3/66.jsonl",
        wrong | {"status": EVIL, "error_type": EVIL},
        {"turns": EVIL},
        wrong | {"reward": EVIL},
    )
    for options in ((), ("--by", "groups"), ("status~red",), ("--by", "turns", "--limit", "99"), ("--by", "problems")):
        for extra in ((), ("--json",)):
            shown = "".join(answer(capsys, run, *options, *extra))
            assert not set(shown) & set("\x1b\x07\x9b\u202e"), options
    for options in (("--tokens", "rollout/3/66.jsonl:1"), ("--diff", "rollout/3/66.jsonl:1", "rollout/3/7.jsonl:1")):
        assert not set("".join(answer(capsys, run, *options))) & set("\x1b\x07\x9b\u202e")
    assert objects(capsys, run, "task=66")[0]["error"] == EVIL


def test_problems_are_listed_and_counted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run / "rollout/3/66.jsonl", line(66), {"turns": 3}, tail='{"torn')
    shown, note = answer(capsys, run, "--by", "problems")
    assert re.search(r"rollout/3/66.jsonl +2 +\d+ +wrong shape +turns: 3: it must be a valid list", shown)
    assert "exp/t: 2 lines or files could not be read (1 unfinished line, 1 wrong shape)" in note
    assert len(objects(capsys, run, "--by", "problems")) == 2


def test_a_reader_that_leaves_ends_the_command_quietly(run: Path) -> None:
    write(run / "rollout/5/99.jsonl", *(line(99, place) for place in range(3000)))
    command = f"{sys.executable} -m areal_lite inspect {run} --json | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 1)


@pytest.mark.skipif(shutil.which("less") is None, reason="needs a pager")
def test_a_terminal_gets_colours_through_its_pager(run: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PAGER": "sed s/^/paged:/"}
    command = [sys.executable, "-m", "areal_lite", "inspect", str(run), "status=failed"]
    done = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
    assert done.wait(30) == 0
    assert b"paged:" in shown and b"\x1b[31m" in shown


def test_the_documented_filter_keys_are_those_of_the_language() -> None:
    (table,) = re.findall(r"^\| key \|.*?\n\|[-|]+\n(.*?)\n\n", DOCS.read_text(), re.MULTILINE | re.DOTALL)
    rows = [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in table.splitlines()]
    expected = []
    for key in KEYS.values():
        names = f"`{key.name}`" + (f", `{key.alias}`" if key.alias else "")
        expected.append((names, str(key.kind), key.meaning))
    assert rows == expected
