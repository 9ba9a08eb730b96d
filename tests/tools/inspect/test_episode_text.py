"""Dumps are readable, and model output reaches the terminal only as text."""

import io
import json
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from areal_lite.cli.commands import parse
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.episode_text import printable
from areal_lite.tools.inspect.terminal import inspect


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


LINE = {
    "schema": 1,
    "task_id": 7,
    "group_id": "g",
    "sample_idx": 1,
    "status": "accepted",
    "error": None,
    "seqlen": 4,
    "prompt_len": 2,
    "head_version": 3,
    "tail_version": 4,
    "reward": 0.5,
    "prompt": "2+2?",
    "completion": "4",
    "turns": [
        {"role": "prompt", "ids": [1, 2], "text": "2+2?", "loss_mask": [0, 0]},
        {
            "role": "assistant",
            "ids": [3, 4],
            "text": "4",
            "loss_mask": [1, 1],
            "stop_reason": "stop",
            "latency_s": 0.25,
        },
    ],
    "timings": {},
}


def shown(path, *, limit=10, color=False):
    console = Console(file=io.StringIO(), highlight=False, force_terminal=color, width=80)
    count = inspect(parse(["inspect", str(path), "--by", "turns", "--limit", str(limit)]), console=console)
    return count, console.file.getvalue()


def write(path, *lines, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_facts_beside_the_reward_are_shown(tmp_path):
    told = LINE | {"reward_extra": {"acc": 1.0, "pred": "4\x1b[2J"}}
    assert "\nacc 1.0, pred 4\\x1b[2J\nprompt (2 tokens" in shown(write(tmp_path / "7.jsonl", told))[1]


def test_an_episode_is_shown_turn_by_turn(tmp_path):
    assert shown(write(tmp_path / "7.jsonl", LINE)) == (
        1,
        f"{tmp_path.name}/7.jsonl 7.jsonl:1\n── task 7 episode 1  accepted  reward 0.5  4 tokens  versions 3..4\n"
        "prompt (2 tokens, 0 trained)\n2+2?\n"
        "assistant (2 tokens, 2 trained, stop, 0.25 s)\n4\n\n",
    )


def test_sampled_text_is_coloured(tmp_path):
    _, text = shown(write(tmp_path / "7.jsonl", LINE), color=True)
    assert "\x1b[36m4\x1b[0m" in text


def test_a_failed_episode_shows_its_error_and_missing_text_is_marked(tmp_path):
    turn = {"role": "prompt", "ids": [1], "text": None, "loss_mask": [0]}
    line = {**LINE, "status": "failed", "error": "TimeoutError: reward", "turns": [turn]}
    _, text = shown(write(tmp_path / "7.jsonl", line))
    assert "failed" in text
    assert "TimeoutError: reward\n" in text
    assert "no text: the run had no tokenizer" in text


def test_a_run_folder_is_read_in_version_order_without_other_files(tmp_path):
    for version, task in ((10, 1), (9, 12), (9, 3)):
        write(tmp_path / "rollout" / str(version) / f"{task}.jsonl", {**LINE, "task_id": task})
    write(tmp_path / "metrics.jsonl", {"step": 1})
    count, text = shown(tmp_path)
    assert count == 3
    assert text.index("task 3 ") < text.index("task 12 ") < text.index("task 1 ")
    assert shown(tmp_path, limit=2)[0] == 2


def test_a_torn_last_line_is_skipped(tmp_path):
    path = write(tmp_path / "7.jsonl", LINE, tail=json.dumps(LINE)[:50])
    assert shown(path)[0] == 1


@pytest.mark.parametrize(("line", "kind"), [("{\n", "not JSON"), ("[]\n", "wrong shape")])
def test_a_damaged_line_before_the_last_is_noted_and_the_others_are_shown(tmp_path, capsys, line, kind):
    path = write(tmp_path / "7.jsonl", LINE)
    path.write_text(path.read_text() + line + json.dumps(LINE))
    assert shown(path)[0] == 2
    assert f"1 lines or files could not be read (1 {kind})" in capsys.readouterr().err


def test_a_run_without_dumps_says_how_to_get_them(tmp_path):
    with pytest.raises(ConfigError, match="with rollout.dump_to_file a run writes them"):
        shown(tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        shown(tmp_path / "no.jsonl")


@given(st.text(st.characters(categories=["Cc", "Cf", "Cs", "L", "Zl", "Zp"])))
def test_only_text_and_newlines_reach_the_terminal(text):
    kept = set(printable(text)) - {"\n", "\t"}
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in kept)
    assert not kept & set("\u2028\u2029\u202e\u2066\u200f")


def test_escape_sequences_and_markup_are_shown_literally(tmp_path):
    evil = "[red]x[/red] \x1b]0;owned\x07 \x1b[2J"
    line = {**LINE, "turns": [{**LINE["turns"][1], "text": evil, "stop_reason": "\x1b[2J"}], "error": evil}
    _, text = shown(write(tmp_path / "7.jsonl", line))
    assert "\x1b" not in text
    assert r"[red]x[/red] \x1b]0;owned\x07 \x1b[2J" in text


SCHEMA_2 = {
    **LINE,
    "schema": 2,
    "status": "failed",
    "error": "Traceback ...",
    "error_kind": "reward",
    "error_type": "ZeroDivisionError",
    "turns": [
        {**turn, "start": 2 * place, "turn_idx": place, "parent_idx": place - 1 if place else None}
        for place, turn in enumerate(LINE["turns"])
    ],
}


def test_schema_2_shows_the_kind_and_type_of_a_failure(tmp_path):
    _, text = shown(write(tmp_path / "7.jsonl", LINE, SCHEMA_2))
    first, second = text.split("── ")[1:]
    assert "reward: ZeroDivisionError\nTraceback ...\n" in second
    assert first.splitlines()[1:-1] == second.splitlines()[3:]  # the place of the second follows the first


@pytest.mark.parametrize(
    "turns",
    [3, [3], None, [{"loss_mask": ["a"]}], [{"loss_mask": 3}], [{"ids": 3}], [{"latency_s": "soon"}]],
)
def test_a_line_of_the_wrong_shape_is_noted_and_the_others_are_shown(tmp_path, capsys, turns):
    assert shown(write(tmp_path / "7.jsonl", LINE, {**LINE, "turns": turns}))[0] == 1
    assert "1 lines or files could not be read (1 wrong shape)" in capsys.readouterr().err


def test_programs_of_the_agent_are_shown_with_how_they_ended(tmp_path):
    process = {"command": ["make", "test"], "returncode": 2, "timed_out": False, "seconds": 1.5}
    killed = {"command": ["sleep", "9"], "returncode": -9, "timed_out": True, "seconds": 3.0}
    outputs = {"stdout": "one\x1b[2J\n", "stderr": ""}
    line = {**LINE, "processes": [{**process, **outputs}, {**killed, **outputs, "stdout": ""}]}
    assert shown(write(tmp_path / "7.jsonl", line))[1].endswith(
        "process (exit status 2, 1.50 s): make test\nstdout:\none\\x1b[2J\n\nprocess (killed, 3.00 s): sleep 9\n\n"
    )
