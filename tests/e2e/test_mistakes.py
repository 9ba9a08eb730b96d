"""Mistakes of newcomers: each ends the run before its first step, in one sentence that says what to change."""

from __future__ import annotations
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
import torch
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


def no_server(config: dict[str, Any], folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        config["rollout"]["addresses"] = [f"127.0.0.1:{closed.getsockname()[1]}"]
    config["rollout"]["faults"] = {"outage_patience_s": 0.1}


def folder_is_a_file(config: dict[str, Any], folder: Path) -> None:
    (folder / "taken").write_text("")
    config["fileroot"] = str(folder / "taken")


WRITTEN: dict[str, tuple[Change, str]] = {
    "a command with a typo": (words("trian", "FILE"), "did you mean 'train'"),
    "an option instead of a key": (
        words("train", "FILE", "--trainer.total_steps=1"),
        "did you mean 'trainer.total_steps=1'",
    ),
    "an override without a value": (words("train", "FILE", "trainer.total_steps"), "write section.key=value"),
    "a file that does not exist": (words("train", "FILES"), "no such file; did you mean"),
    "an empty file": (text(""), "write a mapping with at least"),
    "a tab in YAML": (text("model_path: x\nrollout:\n\tgroup_size: 4\n"), "line 3.*spaces"),
    "a key twice": (text("model_path: x\nmodel_path: y\n"), "line 2.*keep one"),
    "a key with a typo": (put("modle_path", "x"), "did you mean 'model_path'"),
    "a section's key with a typo": (put("rollout.groupsize", 4), "did you mean 'group_size'"),
    "a key in the wrong section": (put("trainer.group_size", 4), "did you mean 'rollout.group_size'"),
    "a word as a number": (put("rollout.group_size", "eight"), "group_size: 'eight': it must be a valid integer"),
    "groups of none": (put("rollout.group_size", 0), "group_size: 0: it must be greater than or equal to 1"),
    "a negative learning rate": (put("trainer.learning_rate", -1.0), "learning_rate: -1.0: it must be greater than 0"),
    "no model": (put("model_path", ...), "model_path: required, but missing. Folder or hub name"),
    "no learning rate": (put("trainer.learning_rate", ...), "learning_rate: required, but missing"),
    "no length of the run": (put("trainer.total_steps", ...), "total_steps and total_epochs are null: give one"),
    "an algorithm with a typo": (put("trainer.advantage", "gropo"), "did you mean 'grpo'"),
    "a loss with a typo": (put("trainer.loss", "pppo"), "did you mean 'ppo'"),
    "a backend with a typo": (put("rollout.backend", "slang"), "it must be 'sglang', 'vllm' or 'embedded'"),
    "a GPU that is not there": (put("trainer.device", "cuda"), "no GPU: use 'auto'"),
    "a model folder that is not there": (
        put("model_path", "runs/models/none"),
        "it must be a directory with config.json and weights",
    ),
    "a model without weights": (
        model_without("*.safetensors"),
        "no .*safetensors file: save the model with save_pretrained",
    ),
    "a model without a tokenizer": (
        model_without("token*", "*.jinja", "vocab*"),
        "no tokenizer: add it with tokenizer.save_pretrained",
    ),
    "a module with a typo": (
        put("workflow", "tests.e2e.agent.LetterAgent"),
        "no module 'tests.e2e.agent'. Is it on the import path",
    ),
    "a class with a typo": (
        put("workflow", "tests.e2e.agents.LeterAgent"),
        "did you mean 'LetterAgent'",
    ),
    "an agent without run": (agent("WithoutRun"), r"any class or object with `async def run\("),
    "an agent that is not async": (
        agent("NotAsync"),
        "write `async def run.*, or set rollout.agents.isolation: thread",
    ),
    "an agent without keywords": (
        agent("TakesNoKeywords"),
        r"cannot take api_key, .*: write `async def run\(self, data, \*\*extra_kwargs",
    ),
    "an argument that is missing": (
        agent("NeedsAnArgument"),
        r"missing a required argument: 'level'\). It takes level",
    ),
    "an argument that is unknown": (
        put("workflow_kwargs", {"levl": 1}),
        r"unexpected keyword argument 'levl'\). It takes nothing",
    ),
    "rows that are not there": (
        put("train_dataset.path", "rows.jsonl"),
        "rows.jsonl: no such file or folder .looked in",
    ),
    "rows that are no JSON": (
        rows_file('{"question": "a"}\n{"question": \n'),
        "line 2: not JSON: .* write an object per line",
    ),
    "rows of a kind that is unknown": (rows_file("a", "rows.docx"), "unknown file type: rename it to one of .json"),
    "no rows at all": (put("train_dataset.path", "tests.e2e.test_mistakes.no_rows"), "no rows: give at least one"),
    "rows that are no list": (
        put("train_dataset.path", "tests.e2e.test_mistakes.rows_of_text"),
        "it must return a list of dicts",
    ),
    "groups of one": (put("rollout.group_size", 1), "every advantage of grpo would be 0. Use 2 or more"),
    "a run folder that is a file": (folder_is_a_file, "set fileroot to a writable folder"),
}
"""What is told from the files alone, before anything is loaded: the mistake, and what the sentence has."""
STARTED: dict[str, tuple[Change, str]] = {
    "a server that is not there": (no_server, "no inference server answers: .*does rollout.addresses name them"),
    "a column that is missing": (agent("AsksForAnswer"), "'answer'. If that is a column: the row has question"),
    "an agent that returns nothing": (agent("ForgetsToReturn"), r"return a number from run\(\)"),
    "a word as the reward": (
        put("workflow", "tests.e2e.agents.WordyAgent"),
        "the reward is 'good': it must be a finite number",
    ),
    "a reward that is no number": (agent("DividesByZero"), "the reward is nan: it must be a finite number"),
    "an agent that asks no model": (
        put("workflow", "tests.e2e.agents.SilentAgent"),
        "the agent called no model.*: make its client with the base_url",
    ),
    "an agent that raises": (put("workflow", "tests.e2e.agents.BrokenAgent"), "RuntimeError: the agent is broken"),
    "a prompt that is too long": (agent("WritesALot"), "shorten the messages, or raise gconfig.max_tokens"),
    "an image for a model of text": (
        agent("ShowsAPicture"),
        "is an image, but only text is supported: images need a run of",
    ),
    "a tokenizer without a chat template": (
        model_without("*.jinja"),
        "no chat template .*: use that of an instruction-tuned model",
    ),
}
"""What a first episode shows."""


@pytest.mark.parametrize("mistake", WRITTEN)
def test_a_mistake_in_the_files_is_one_sentence(
    mistake: str, run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "GPU" in mistake and torch.cuda.is_available():
        pytest.skip("it is there")
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
    (sentence,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert re.search(says, sentence), sentence
    assert "Traceback" not in said
    assert len(sentence) < 600
    assert not [line for line in steps(folder) if "train/loss" in line]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for path in folder.glob("runs/*/*/metrics.jsonl") for line in path.read_text().splitlines()
    ]
