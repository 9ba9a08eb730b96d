"""Forty mistakes of newcomers: each ends the run before its first step, in one sentence that says what to change."""

from __future__ import annotations
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import yaml
from openai import AsyncOpenAI
from areal_lite.cli import main as cli
from tests.e2e.agents import LetterAgent


class AsksForAnswer(LetterAgent):
    """Reads a column that no row has."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return await super().run(data, **extra_kwargs) + float(data["answer"])


class ForgetsToReturn(LetterAgent):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        await super().run(data, **extra_kwargs)


class DividesByZero(LetterAgent):
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        await super().run(data, **extra_kwargs)
        return float("nan")


class NotAsync:
    def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class TakesNoKeywords:
    async def run(self, data: dict[str, Any]) -> float:
        return 1.0


class WithoutRun:
    """Has another name for it."""

    async def play(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


class NeedsAnArgument(LetterAgent):
    def __init__(self, level: int) -> None:
        self.level = level


class WritesALot:
    """Sends a prompt that is longer than the model's context."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        messages: Any = [{"role": "user", "content": "word " * 20_000}]
        await AsyncOpenAI(**extra_kwargs).chat.completions.create(model="default", messages=messages)
        return 1.0


class ShowsAPicture:
    """Sends an image to a model of text."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        messages: Any = [{"role": "user", "content": [image]}]
        await AsyncOpenAI(**extra_kwargs).chat.completions.create(model="default", messages=messages)
        return 1.0


def no_rows() -> list[dict[str, str]]:
    return []


def rows_of_text() -> Any:
    return "question"


Change = Callable[[dict[str, Any], Path], Any]
"""Changes the config, or files in the folder; may return other words of the command line."""


def put(key: str, value: Any) -> Change:
    """Return a change that sets a key by its dotted name; ``...`` takes it out."""

    def change(config: dict[str, Any], folder: Path) -> None:
        *sections, last = key.split(".")
        for section in sections:
            config = config.setdefault(section, {})
        config.pop(last, None) if value is ... else config.__setitem__(last, value)

    return change


def text(content: str) -> Change:
    """Return a change that trains another file with this content."""

    def change(config: dict[str, Any], folder: Path) -> list[str]:
        (folder / "other.yaml").write_text(content)
        return ["train", str(folder / "other.yaml")]

    return change


def words(*words: str) -> Change:
    """Return other words after ``areal-lite``."""
    return lambda config, folder: [word.replace("FILE", str(folder / "run.yaml")) for word in words]


def rows_file(content: str, name: str = "rows.jsonl") -> Change:
    def change(config: dict[str, Any], folder: Path) -> None:
        (folder / name).write_text(content)
        config["train_dataset"] = {"path": str(folder / name)}

    return change


def model_without(*patterns: str) -> Change:
    """Return a change to a copy of the model that lacks some files."""

    def change(config: dict[str, Any], folder: Path) -> None:
        left_out = shutil.ignore_patterns(*patterns)
        config["model_path"] = str(shutil.copytree(config["model_path"], folder / "model", ignore=left_out))

    return change


def agent(name: str) -> Change:
    return put("workflow", f"tests.e2e.test_mistakes.{name}")


def taken_port(config: dict[str, Any], folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        config["rollout"]["addresses"] = [f"127.0.0.1:{closed.getsockname()[1]}"]
    config["rollout"]["faults"] = {"outage_patience_s": 0.1}


def folder_is_a_file(config: dict[str, Any], folder: Path) -> None:
    (folder / "taken").write_text("")
    config["fileroot"] = str(folder / "taken")


WRITTEN: dict[str, tuple[Change, str]] = {
    "a command with a typo": (words("trian", "FILE"), "did you mean train"),
    "an option instead of a key": (words("train", "FILE", "--trainer.total_steps=1"), "trainer.total_steps=1"),
    "an override without a value": (words("train", "FILE", "trainer.total_steps"), "key=value"),
    "a file that does not exist": (words("train", "FILES"), "no such file; did you mean"),
    "an empty file": (text(""), "empty|mapping"),
    "a tab in YAML": (text("model_path: x\nrollout:\n\tgroup_size: 4\n"), "line 3.*spaces"),
    "a key twice": (text("model_path: x\nmodel_path: y\n"), "model_path"),
    "a key with a typo": (put("modle_path", "x"), "did you mean 'model_path'"),
    "a section's key with a typo": (put("rollout.groupsize", 4), "did you mean 'group_size'"),
    "a key in the wrong section": (put("trainer.group_size", 4), "rollout.group_size"),
    "a word as a number": (put("rollout.group_size", "eight"), "group_size.*eight"),
    "groups of none": (put("rollout.group_size", 0), "group_size.*1"),
    "a negative learning rate": (put("trainer.learning_rate", -1.0), "learning_rate.*0"),
    "no model": (put("model_path", ...), "model_path"),
    "no learning rate": (put("trainer.learning_rate", ...), "learning_rate"),
    "no length of the run": (put("trainer.total_steps", ...), "total_steps"),
    "an algorithm with a typo": (put("trainer.advantage", "gropo"), "grpo"),
    "a loss with a typo": (put("trainer.loss", "pppo"), "did you mean 'ppo'"),
    "a backend with a typo": (put("rollout.backend", "slang"), "sglang"),
    "a GPU that is not there": (put("trainer.device", "cuda"), "cuda"),
    "a model folder that is not there": (put("model_path", "runs/models/none"), "runs/models/none"),
    "a model without weights": (model_without("*.safetensors"), "safetensors|weights"),
    "a model without a tokenizer": (model_without("token*", "*.jinja", "vocab*"), "tokenizer"),
    "a module with a typo": (put("workflow", "tests.e2e.agent.LetterAgent"), "tests.e2e.agent"),
    "a class with a typo": (put("workflow", "tests.e2e.agents.LeterAgent"), "LetterAgent"),
    "an agent without run": (agent("WithoutRun"), r"async def run\("),
    "an agent that is not async": (agent("NotAsync"), "async def run"),
    "an agent without keywords": (agent("TakesNoKeywords"), r"\*\*extra_kwargs|keyword"),
    "an argument that is missing": (agent("NeedsAnArgument"), "level.*workflow_kwargs|workflow_kwargs.*level"),
    "an argument that is unknown": (put("workflow_kwargs", {"levl": 1}), "levl"),
    "rows that are not there": (put("train_dataset.path", "rows.jsonl"), "rows.jsonl"),
    "rows that are no JSON": (rows_file('{"question": "a"}\n{"question": \n'), "line 2|:2"),
    "rows of a kind that is unknown": (rows_file("a", "rows.docx"), "docx"),
    "no rows at all": (put("train_dataset.path", "tests.e2e.test_mistakes.no_rows"), "no rows|0 rows|empty"),
    "rows that are no list": (put("train_dataset.path", "tests.e2e.test_mistakes.rows_of_text"), "list"),
    "groups of one": (put("rollout.group_size", 1), "group_size"),
    "a run folder that is a file": (folder_is_a_file, "taken"),
}
"""What is told from the files alone, before anything is loaded: the mistake, and what the sentence has."""
STARTED: dict[str, tuple[Change, str]] = {
    "a server that is not there": (taken_port, "127.0.0.1"),
    "a column that is missing": (agent("AsksForAnswer"), "'answer'. If that is a column: the row has question"),
    "an agent that returns nothing": (agent("ForgetsToReturn"), r"return a number from run\(\)"),
    "a word as the reward": (put("workflow", "tests.e2e.agents.WordyAgent"), "good.*number|number.*good"),
    "a reward that is no number": (agent("DividesByZero"), "nan"),
    "an agent that asks no model": (put("workflow", "tests.e2e.agents.SilentAgent"), "model"),
    "an agent that raises": (put("workflow", "tests.e2e.agents.BrokenAgent"), "the agent is broken"),
    "a prompt that is too long": (agent("WritesALot"), "context|max_tokens|tokens"),
    "an image for a model of text": (agent("ShowsAPicture"), "image"),
    "a tokenizer without a chat template": (model_without("*.jinja"), "chat_template"),
}
"""What a first episode shows."""


@pytest.mark.parametrize("mistake", WRITTEN)
def test_a_mistake_in_the_files_is_one_sentence(
    mistake: str, run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(*WRITTEN[mistake], run_yaml, tmp_path, capsys)


@pytest.mark.parametrize("mistake", STARTED)
def test_a_mistake_of_the_agent_ends_the_run_before_its_first_step(
    mistake: str, served_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(*STARTED[mistake], served_yaml, tmp_path, capsys)


def check(change: Change, says: str, path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(path.read_text())
    words = change(config, folder) or ["train", str(path)]
    path.write_text(yaml.safe_dump(config))
    try:
        code = cli.main(words)
    except SystemExit as end:  # of wrong words
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code != 0
    told = [line for line in said.splitlines() if re.search(says, line)]
    assert told, said
    assert "Traceback" not in said
    assert len(told[-1]) < 600
    assert not [line for line in steps(folder) if "train/loss" in line]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for path in folder.glob("runs/*/*/metrics.jsonl") for line in path.read_text().splitlines()
    ]
