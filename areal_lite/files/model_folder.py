"""Models, by folder or by name on the Hugging Face Hub, checked before anything loads them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from areal_lite.errors import ConfigError
from areal_lite.files.hub_name import check_hub_name, is_hub_name


def check_model_path(model_path: str, *, key: str = "model_path", has_tokenizer: bool = True) -> None:
    """Check that a model directory can be loaded, or that the Hugging Face Hub or its cache has the name."""
    path = Path(model_path).expanduser()
    if not path.is_dir():
        if not is_hub_name(model_path):
            what = "is a file" if path.is_file() else "does not exist"
            raise ConfigError(
                f"{key} {model_path!r} {what}: it must be a directory with config.json and weights, or the "
                "name of a model on the Hugging Face Hub, such as 'HuggingFaceTB/SmolLM2-135M-Instruct'."
            )
        check_hub_name(model_path, key=key)
        return
    if not (path / "config.json").is_file():
        raise ConfigError(f"{key} {model_path!r} has no config.json: give the directory that save_pretrained wrote.")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{key} {model_path!r} has no *.safetensors file: save the model with save_pretrained.")
    if has_tokenizer and not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        raise ConfigError(f"{key} {model_path!r} has no tokenizer: add it with tokenizer.save_pretrained.")
    try:
        stored_tensors(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_text_model(model_path: str) -> None:
    """Check that a model directory does not hold a model that reads images; a name on the Hub passes unchecked."""
    try:
        config = json.loads((Path(model_path).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # not a directory, or check_model_path and the loader say more
    if isinstance(config, dict) and config.get("vision_config"):
        raise ConfigError(
            f"model_path {model_path!r} is a {config.get('model_type')} model, which reads images: trainer and "
            "embedded server take models of text only. Use the text model of the same family."
        )


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a directory by their names, file by file.

    Raises:
        ConfigError: If there are no such files, one is not complete, or the index names a tensor that no file has.
    """
    if not path.is_dir():
        raise ConfigError(f"model_path {str(path)!r} is not a directory; give one that a trainer wrote.")
    index = path / "model.safetensors.index.json"
    indexed: Mapping[str, str] = {}
    if index.is_file():
        try:
            indexed = json.loads(index.read_text())["weight_map"]
            files = [path / name for name in sorted(set(indexed.values()))]
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{index} is not an index of weights ({error!r}). Save the checkpoint again.") from error
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"Cannot find any model weights with `{path}`: it has no *.safetensors file.")
    tensors = {name: tensor for file in files for name, tensor in _tensors_of(file).items()}
    if missing := sorted(indexed.keys() - tensors.keys()):
        raise ConfigError(f"{index} lists {missing[0]!r}, but no file has it; save the checkpoint again.")
    return tensors


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(str(file), framework="np") as opened:  # compares the header with the size of the file
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: StoredTensor(file, tuple(slice_.get_shape())) for name, slice_ in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{file} is not a complete safetensors file: {error}. It was changed or is cut off. Save the checkpoint "
            "again."
        ) from error
