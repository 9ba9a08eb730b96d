"""A healthy run has no alarm, each ill has its own, and a finding names a key that exists."""

from __future__ import annotations
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.api.failure import FailureKind
from areal_lite.cli.main import main
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import RunConfig
from areal_lite.runs.entry_points import run_training
from areal_lite.tools.diagnose.episodes import episode_facts, read_run, with_group_facts
from areal_lite.tools.diagnose.findings import all_curves, checks, diagnose, rise_of_reward
from areal_lite.tools.inspect.dumps import Dumps
from areal_lite.tools.run.config import explain
from tests.tools.inspect.dump_lines import failed, line, turn, write

PROMPT = "<|im_start|>user\nWhich is the largest of the four numbers?<|im_end|>\n<|im_start|>assistant\n"
NOTHING = ({}, frozenset(), frozenset())


def alarms(root: Path) -> dict[str, float]:
    with Dumps.open(root) as dumps:
        (run,) = dumps.runs
        return {each["name"]: each["figure"] for each in diagnose(*read_run(dumps, run)) if each["severity"] != "ok"}


def made_up(
    root: Path,
    *,
    reward: Callable[[random.Random, int, int], float] = lambda draw, version, length: float(
        draw.random() < 0.15 * version
    ),
    length: Callable[[random.Random, int], int] = lambda draw, version: draw.randrange(5, 15),
    entropy: Callable[[int], float] = lambda version: 1.5 - 0.1 * version,
    prompt: dict[str, Any] | None = None,
    end: str = "<|im_end|>",
) -> Path:
    """Write a run of six versions with four groups of four, which learns."""
    draw = random.Random(1)
    (root / "model").mkdir(parents=True)
    (root / "model" / "chat_template.jinja").write_text("<|im_start|>{{ role }}\n{{ content }}<|im_end|>")
    for task in range(24):
        version, lines = task // 4, []
        for member in range(4):
            words = " ".join(str(draw.randrange(1000)) for _ in range(length(draw, version)))
            asked = turn("prompt", **{"text": PROMPT, **(prompt or {})})
            answer = turn("assistant", words + end, len(words.split()))
            lines.append(line(task, member, reward=reward(draw, version, len(words.split())), turns=[asked, answer]))
        write(root / f"rollout/{version}/{task}.jsonl", *lines)
    write(root / "metrics.jsonl", *({"step": v + 1, "train/entropy": entropy(v)} for v in range(6)))
    return root


def coin(draw: random.Random, version: int, length: int) -> float:
    return float(draw.random() < 0.4)


def foreign(root: Path) -> None:
    for name, letters in (("own", "ab"), ("other", "ba")):
        vocab = {letter: id for id, letter in enumerate(letters)}
        write(
            root / name / "tokenizer.json",
            {"model": {"vocab": vocab}, "added_tokens": [{"id": 2, "content": "<|im_start|>"}]},
        )
    config = {"model_path": str(root / "own"), "rollout": {"tokenizer_path": str(root / "other")}}
    (root / "config.yaml").write_text(yaml.safe_dump(config))


ILLS: dict[str, dict[str, Any]] = {
    "constant_reward": {"reward": lambda *_: 0.5},
    "zero_reward": {"reward": lambda *_: 0.0},
    "always_right": {"reward": lambda *_: 1.0},
    "length_hacking": {
        "length": lambda draw, version: draw.randrange(3, 6) * (1 + version),
        "reward": lambda draw, version, length: length / 40,
    },
    "runs_past_end": {"reward": coin, "end": "<|im_end|>\nuser\nAnd now?"},
    "learning_rate_too_high": {"entropy": lambda version: 2.4 / (1 + 3 * version)},
    "entropy_collapsed": {"reward": coin, "entropy": lambda version: 0.02},
    "wrong_template": {"reward": coin, "prompt": {"text": "### Instruction: which is the largest?"}},
    "foreign_tokens": {},
    "unsampled_tokens": {"prompt": {"loss_mask": [1, 1]}},
}
"""What makes a healthy run ill, by the finding that must name it."""


@pytest.mark.parametrize("ill", ILLS)
def test_an_ill_is_named(ill: str, tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", **ILLS[ill])
    if ill == "foreign_tokens":
        foreign(run)
    assert ill in alarms(run)


def test_a_healthy_run_has_no_alarm(tmp_path: Path) -> None:
    assert alarms(made_up(tmp_path / "run")) == {}


def test_every_check_names_keys_that_exist_and_is_described() -> None:
    text = (Path(__file__).parents[3] / "docs/diagnose.md").read_text()
    for check in checks():
        assert all(explain(key, [RunConfig]) for key in check["keys"]) and check["keys"], check["name"]
        assert f"| `{check['name']}` |" in text
        assert (check["severity"] in ("problem", "warning")) and check["take"] in ("last", "first", "most")
        assert check["when"] in ("always", "stalled", "growing")


# -- facts


def test_an_episode_has_its_own_reward_and_not_the_mean_of_its_lines() -> None:
    lines = [line(turns=[turn("assistant", "4")], reward=reward) | {"version": 3, "id": "a"} for reward in (1.0, 0.0)]
    assert episode_facts(lines, NOTHING)["reward"] == 0.5
    assert episode_facts([one | {"episode_reward": 1.0} for one in lines], NOTHING)["reward"] == 1.0


def facts_of(answer: str = "4", prompt: str = PROMPT, **values: Any) -> dict[str, float]:
    turns = [turn("prompt", prompt), turn("assistant", answer, **values)]
    return episode_facts([line(turns=turns) | {"version": 3, "id": "a"}], NOTHING)


def test_facts_of_an_answer() -> None:
    plain = facts_of()
    assert {name for name in ("empty", "quoted", "repeated", "past_end", "garbled", "cut") if plain[name]} == set()
    assert facts_of("<|im_end|>")["empty"]
    assert facts_of("Which is the largest of the four numbers?")["quoted"]
    assert not facts_of("the four numbers")["quoted"]
    assert facts_of(ids=[1, 2, 3, 4] * 6)["repeated"] and not facts_of(ids=list(range(24)))["repeated"]
    assert not facts_of(ids=[1, 2, 3, 4] * 4)["repeated"]
    assert facts_of("4<|im_end|>\nmore")["past_end"] and not facts_of("4<|im_end|>\n")["past_end"]
    assert facts_of("\ufffd\ufffd4")["garbled"]
    assert facts_of(stop_reason="length")["cut"]


def test_a_marker_that_is_no_token_and_a_prompt_without_one_are_of_a_wrong_template() -> None:
    def template(prompt: str, tokens: dict[str, int], markers: set[str]) -> float:
        turns = [turn("prompt", prompt), turn("assistant", "4")]
        return episode_facts([line(turns=turns) | {"version": 3}], (tokens, frozenset(), frozenset(markers)))[
            "template"
        ]

    assert not template("[INST] hi [/INST]", {"[INST]": 3, "[/INST]": 4}, {"[INST]"})
    assert template("[INST] hi [/INST]", {"[INST]": 3}, {"[INST]"})
    assert template("hi", {"[INST]": 3}, {"[INST]"})
    assert not template("hi", {}, set())


def test_tokens_of_a_turn_without_a_call_were_not_sampled_where_others_have_one() -> None:
    turns = [turn("prompt"), turn("assistant", tokens=3, started=None), turn("assistant", tokens=1, started=9.0)]
    assert episode_facts([line(turns=turns) | {"version": 3}], NOTHING)["unsampled"] == 0.75
    assert episode_facts([line(turns=turns[:2]) | {"version": 3}], NOTHING)["unsampled"] == 0


def test_an_episode_of_several_lines_counts_once_and_failures_by_kind(tmp_path: Path) -> None:
    lines = [line(7, 0, reward=1.0), line(7, 1, member_idx=0, reward=0.0), line(7, 2, member_idx=1, reward=0.0)]
    write(tmp_path / "r/rollout/3/7.jsonl", *lines)
    write(tmp_path / "r/rollout/3/8.jsonl", failed(8), line(8, 1, status="cancelled"))
    write(tmp_path / "r/eval-rollout/3/9.jsonl", line(9))
    with Dumps.open(tmp_path / "r") as dumps:
        episodes, metrics = read_run(dumps, *dumps.runs)
    assert [each.get("reward") for each in episodes] == [0.5, 0.0, None]
    assert [each["tokens"] for each in episodes] == [4, 2, 2]
    assert [each.get("flat") for each in episodes] == [False, False, None]
    assert metrics == {} and all_curves(episodes, {})["failed_agent"] == [(3, pytest.approx(1 / 3))]


def test_every_kind_of_failure_has_a_finding() -> None:
    named = {check["source"] for check in checks()}
    assert {f"failed_{kind}" for kind in FailureKind if kind != "cancelled"} <= named


def test_near_duplicates_are_answers_with_nine_of_ten_words_in_common() -> None:
    words = [str(number) for number in range(10)]
    answers = [" ".join(words), " ".join(reversed(words[:9])), "one two", None, ""]
    found = with_group_facts([{} for _ in answers], answers)
    assert [each.get("duplicate") for each in found] == [True, True, False, None, None]


# -- curves


def test_a_rise_is_measured_in_standard_errors_of_group_means() -> None:
    rewards = {0: (0.0, 0.2), 1: (5.0, 5.0), 2: (0.5, 0.7)}
    episodes = [
        {"version": version, "group": 2 * version + place, "reward": mean + noise}
        for version, means in rewards.items()
        for place, mean in enumerate(means)
        for noise in (-0.1, 0.1)
    ]
    assert rise_of_reward(episodes) == pytest.approx(0.5 / (2 * 0.01 / 2) ** 0.5)
    assert rise_of_reward([]) == 0.0


def test_curves_that_are_made_of_others() -> None:
    metrics = {
        "train/entropy": [(1, 2.0), (2, 0.5), (4, 1.0)],
        "rollout/discarded_tokens": [(1, 0.0), (2, 30.0)],
        "rollout/generated_tokens": [(1, 0.0), (2, 120.0)],
    }
    group = [{"version": 5, "reward": reward, "tokens": tokens} for reward, tokens in ((0.0, 1), (1.0, 3), (0.5, 2))]
    curves = all_curves(with_group_facts(group, [None] * 3), metrics)
    assert curves["entropy_jump"] == [(2, 1.5), (4, 0.5)]
    assert curves["discarded"] == [(2, 0.25)]
    assert curves["length_correlation"] == [(5, pytest.approx(1.0))]
    assert curves["zero"] == [(5, pytest.approx(1 / 3))] and curves["best"] == [(5, pytest.approx(1 / 3))]


# -- the command


def test_the_command_prints_alarms_with_their_fix_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up(tmp_path / "e/t", reward=lambda *_: 0.5)
    assert main(["inspect", str(run), "--diagnose"]) == 0
    shown = capsys.readouterr().out
    assert "problem constant_reward: 1, above 0.99" in shown and "To do: call the reward function" in shown
    assert "rollout.rewards.key" in shown and "no alarm: " in shown
    assert main(["inspect", str(run), "--diagnose", "--json", "version<2"]) == 0
    found = {each["name"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["constant_reward"]["severity"] == "problem" and found["constant_reward"]["run"] == "e/t"
    assert found["constant_reward"]["curve"] == [[0, 1.0], [1, 1.0]]
    assert found["truncated"]["severity"] == "ok"


# -- real runs


def without_ill(folder: Path, model: Path) -> list[str]:
    return []


def other_template(folder: Path, model: Path) -> list[str]:
    shutil.copytree(model, folder / "model")
    template = "{% for message in messages %}[INST] {{ message['content'] }} [/INST]{% endfor %}"
    (folder / "model/chat_template.jinja").write_text(template)
    return [f"model_path={folder / 'model'}"]


def other_tokenizer(folder: Path, model: Path) -> list[str]:
    shutil.copytree(model, folder / "tokenizer")
    saved = json.loads((model / "tokenizer.json").read_text())
    vocab = saved["model"]["vocab"]
    saved["model"]["vocab"] = {token: id if id < 3 else 3 + (id + 50) % 256 for token, id in vocab.items()}
    (folder / "tokenizer/tokenizer.json").write_text(json.dumps(saved))
    return [f"rollout.tokenizer_path={folder / 'tokenizer'}"]


REAL: dict[str, tuple[str, list[str], Callable[[Path, Path], list[str]]]] = {
    "": ("Healthy", [], without_ill),
    "constant_reward": ("Constant", [], without_ill),
    "zero_reward": ("Zero", [], without_ill),
    "always_right": ("AlwaysRight", [], without_ill),
    "length_hacking": ("PaysForLength", ["trainer.learning_rate=2.0e-2", "trainer.total_steps=8"], without_ill),
    "runs_past_end": (
        "Healthy",  # the model ends its turns with token 0, and the server stops at token 2
        ["rollout.gconfig.stop_token_ids=null", "rollout.gconfig.logit_bias={0: 4.0}"],
        without_ill,
    ),
    "learning_rate_too_high": ("Healthy", ["trainer.learning_rate=0.5"], without_ill),
    "entropy_collapsed": ("Healthy", ["rollout.gconfig.temperature=0.001"], without_ill),
    "wrong_template": ("Healthy", [], other_template),
    "foreign_tokens": ("Healthy", [], other_tokenizer),
    "unsampled_tokens": ("MaskOff", [], without_ill),
}
"""Agent, overrides and changed files of real runs, by the finding that must name the ill."""


@pytest.mark.slow
@pytest.mark.parametrize("ill", REAL)
def test_an_ill_of_a_real_run_is_named(ill: str, tmp_path: Path, tiny_model: Path, tiny_server: str) -> None:
    agent, overrides, change = REAL[ill]
    small = {"dtype": "float32", "num_threads": 1, "device": "cpu"}
    sampling = {"max_new_tokens": 16, "stop_token_ids": list(range(3, 33))}
    rollout = {"addresses": [tiny_server], "group_size": 8, "consumer_batch_size": 4, "dump_to_file": True}
    config = {
        **{"experiment_name": "ill", "trial_name": "t", "fileroot": str(tmp_path / "runs"), "save_model": False},
        **{"model_path": str(tiny_model), "workflow": f"tests.tools.diagnose.ills.{agent}", "server": small},
        **{"train_dataset": {"path": "tests.e2e.agents.rows"}, "rollout": {**rollout, "gconfig": sampling}},
        "trainer": {"total_steps": 6, "learning_rate": 5.0e-3, **small},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    run = run_training(load_config(tmp_path / "run.yaml", [*overrides, *change(tmp_path, tiny_model)])).run_dir
    assert ill in alarms(run) if ill else alarms(run) == {}
