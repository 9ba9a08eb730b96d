"""Models, by folder or by name on the Hugging Face Hub, checked before anything loads them. Imports no torch.

A name that cannot be had is an error within two seconds: huggingface_hub retries for 23 s, and this asks once.
"""

import contextlib
import functools
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from safetensors import SafetensorError, safe_open
from areal_lite.errors import ConfigError

TIMEOUT_S = 1.5
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "idefics3")  # models that read images here, by ``model_type``
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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


def is_hub_name(path: str) -> bool:
    """Return whether ``path`` is no folder or file and may be a name on the hub."""
    return not Path(path).expanduser().exists() and bool(_NAME.fullmatch(path))


@functools.cache
def check_hub_name(name: str, *, key: str = "model_path") -> None:
    """Check that the hub or its cache has a model; ``key`` is the config key, for errors; raises ConfigError."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            with contextlib.suppress(EntryNotFoundError):  # the model is there; loading it says what it lacks
                get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=TIMEOUT_S)
            answers.append(None)
        except Exception as error:  # judged below
            answers.append(error)

    # A thread, because resolving the hub's address knows no timeout.
    asking = threading.Thread(target=ask, name="areal-lite-hub", daemon=True)
    asking.start()
    asking.join(TIMEOUT_S)
    error = answers[0] if answers else TimeoutError(f"no answer in {TIMEOUT_S:g} s")
    if error is None or (isinstance(error, HfHubHTTPError) and error.response.status_code in (429, 500, 502, 503, 504)):
        return  # the download tries these again
    reason = str(error).strip().partition("\n")[0][:200]
    raise ConfigError(
        f"{key} {name!r} is neither a directory nor in the cache of the Hugging Face Hub, and {constants.ENDPOINT} "
        f"does not give it ({type(error).__name__}: {reason}): check the name and the network, or give a directory "
        "with config.json and weights"
    ) from error


def stored_config(model_path: str) -> dict[str, Any]:
    """Return the config.json of a model, by folder or name on the hub; nothing if loading the model will say why."""
    from transformers import PretrainedConfig

    try:
        config: dict[str, Any] = PretrainedConfig.get_config_dict(model_path)[0]
    except (OSError, ValueError):
        return {}
    return config


def check_image_model(model_path: str, *, trains_vision: bool = False) -> None:
    """Check that a model directory does not hold a model that reads images in a way that is not computed here, or none
    that does with ``trains_vision``; a name on the Hub is checked when it is loaded."""
    try:
        config = json.loads((Path(model_path).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        return  # not a directory, or check_model_path and the loader say more
    if isinstance(config, dict) and not check_vision_family(config, model_path) and trains_vision:
        raise ConfigError(
            f"trainer.vision is train, and model_path {model_path!r} is a {config.get('model_type')} model, which "
            f"reads no images: remove trainer.vision, or use one of {', '.join(VISION_MODELS)}"
        )


def check_vision_family(config: Mapping[str, Any], model_path: str) -> bool:
    """Return whether a model's config is of one that reads images; raises ConfigError if it is not computed here."""
    family = config.get("model_type")
    if config.get("vision_config") and family not in VISION_MODELS:
        raise ConfigError(
            f"model_path {model_path!r} is a {family} model, whose images are not computed here (in some families the "
            f"tokens of an image see one another in both directions): use one of {', '.join(VISION_MODELS)}, or the "
            "text model of the same family"
        )
    return family in VISION_MODELS


class StoredTensor(NamedTuple):
    file: Path
    shape: tuple[int, ...]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in the safetensors files of a directory by their names, file by file. ConfigError if there are
    no such files, one is not complete, or the index names a tensor that no file has."""
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
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="np") as opened:  # compares the header with the size of the file
                for name in opened.keys():  # noqa: SIM118
                    tensors[name] = StoredTensor(file, tuple(opened.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is not a complete safetensors file: {error}. It was changed or is cut off. Save the "
                "checkpoint again."
            ) from error
    if missing := sorted(indexed.keys() - tensors.keys()):
        raise ConfigError(f"{index} lists {missing[0]!r}, but no file has it; save the checkpoint again.")
    return tensors
