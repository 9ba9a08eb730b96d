"""The last answer of a dumped line, as reward functions and training rows need it; the run's config and tokenizer."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from areal_lite.config.yaml_text import parse_yaml, read_text
from areal_lite.errors import ConfigError
from areal_lite.tools.foreign_files import has_plain_files, open_inside

CONFIG = "config.yaml"
UNREADABLE = (ValueError, ArithmeticError, RecursionError, OSError)
"""Errors that a config made by hand may raise; a ConfigError is a ValueError."""


class Answer(NamedTuple):
    """A model call: what the model read, and what it wrote."""

    prompt: str
    """Special tokens shown."""
    completion: str
    """Without special tokens if there is a tokenizer to remove them."""
    prompt_ids: list[int]
    completion_ids: list[int]
    cut_off: bool
    """True if it ended at a token limit or was aborted."""


def last_answer(record: Mapping[str, Any], tokenizer: Any = None) -> Answer | None:
    """Return the last answer of a dumped line; None without an answer, or without its text."""
    turns = record["turns"]
    last = max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
    if last is None or not turns[last]["ids"]:
        return None
    texts = [turn.get("text") for turn in turns[: last + 1]]
    prompt_ids = [id for turn in turns[:last] for id in turn["ids"]]
    if tokenizer is None:
        if None in texts:
            return None
        prompt, completion = "".join(texts[:-1]), texts[-1]
    else:
        prompt = tokenizer.decode(prompt_ids)
        completion = tokenizer.decode(turns[last]["ids"], skip_special_tokens=True)
    cut_off = turns[last].get("stop_reason") in ("length", "abort")
    return Answer(prompt, completion, prompt_ids, turns[last]["ids"], cut_off)


def run_tokenizer(run: Path, named: str | None = None) -> Any:
    """Return the tokenizer ``named``, or the one of the run in the folder ``run``; None without one on this machine."""
    from areal_lite.data.chat.tokenizer import load_tokenizer

    if named is not None:
        return load_tokenizer(named)
    for path in (model_folders(run)[0], run / "model"):
        if (path / "tokenizer_config.json").is_file() and has_plain_files(path, run):  # never a download
            with contextlib.suppress(ConfigError):
                return load_tokenizer(str(path))
    return None


def model_folders(run: Path) -> tuple[Path, Path]:
    """Return the folders of tokenizer and model that the config in ``run`` names; the run's own without a config."""
    # Read as YAML: a config that this version refuses still names them.
    with contextlib.suppress(*UNREADABLE, LookupError, AttributeError, TypeError):
        config = parse_yaml(read_text(run / CONFIG, open_inside), where=CONFIG)
        model = Path(config["model_path"])
        return Path((config.get("rollout") or {}).get("tokenizer_path") or model), model
    return run / "model", run / "model"
