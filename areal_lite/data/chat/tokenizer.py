"""Loads a model's tokenizer (once per folder) and processor."""

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_hub_name, is_hub_name

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
# Importing transformers from two threads at once breaks its circular imports.
_lock = threading.Lock()


def load_tokenizer(path: str) -> Any:
    """Return the Hugging Face tokenizer of ``path``, a folder or a hub name. Thread-safe."""
    with _lock:
        return _load(path)


@functools.cache
def _load(path: str) -> Any:
    if is_hub_name(path):
        check_hub_name(path, key="tokenizer")
    from transformers import AutoTokenizer

    fix = "name a folder with tokenizer.json and tokenizer_config.json, such as the model's"
    with _as_config_error(f"no tokenizer can be loaded from {path!r}", fix):
        # A folder's code is never run; without this transformers asks on the terminal whether it may.
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # nosec B615 # a folder, or a hub name of the user's config


def check_chat_template(tokenizer: Any) -> None:
    """Raise ConfigError for a tokenizer that cannot write messages."""
    if getattr(tokenizer, "chat_template", "") is None:
        raise ConfigError(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template to render messages with: "
            "use that of an instruction-tuned model, or write one to chat_template.jinja in its folder"
        )


@functools.cache
def tokenizer_files(path: str) -> dict[str, bytes]:
    """Return the files of tokenizer and image processor of ``path`` by name, as they are stored beside weights."""
    with TemporaryDirectory() as folder:
        save_tokenizer(load_tokenizer(path), Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer, and the settings of the image processor of the folder that it was loaded from."""
    tokenizer.save_pretrained(folder)
    for name in _PROCESSOR_FILES:
        source = Path(tokenizer.name_or_path) / name
        if source.is_file():
            shutil.copyfile(source, folder / name)


def load_processor(path: str) -> Any:
    """Return the multi-modal processor in the folder ``path``; None if the model reads only text, or a library that the
    processor needs (torchvision, for videos) is missing: runs read images without it."""
    if not any((Path(path) / f"{kind}_config.json").is_file() for kind in ("preprocessor", "processor")):
        return None
    fix = "give the model's own preprocessor_config.json, or remove it to use only text"
    with _lock, _as_config_error(f"the processor of {path!r} cannot be loaded", fix):
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]  # nosec B615 # a folder
        except ImportError:
            return None


@contextmanager
def _as_config_error(problem: str, fix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers raises many types for a missing or broken folder
        first_line = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{problem} ({first_line}): {fix}") from error
