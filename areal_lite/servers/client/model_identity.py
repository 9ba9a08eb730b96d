"""The model that a run trains, compared with what servers report about theirs."""

from pathlib import Path
from typing import Any
import orjson
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import is_hub_name
from areal_lite.servers.dialects.dialect import ServerInfo

_SHAPE = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Keys of config.json that two versions of one model share."""


class ModelIdentity:
    """A model by its folder or hub name, and its config.json if that can be read; without a name any server will do."""

    def __init__(self, name: str = "", config: dict[str, Any] | None = None) -> None:
        self.name = name
        self.config = read_config(name) if config is None else config

    def check(self, url: str, info: ServerInfo) -> None:
        """Compare with what the server at ``url`` reports; facts that either side lacks are not compared."""
        if not self.name:
            return
        served = info.model or "a model that it does not name"
        differences = []
        if info.vocab_size and (vocab := self.config.get("vocab_size")) and info.vocab_size != vocab:
            differences.append(f"vocab_size {info.vocab_size} instead of {vocab}")
        window = self.config.get("max_position_embeddings")
        if info.context_length and window and not self.config.get("rope_scaling") and info.context_length > window:
            differences.append(f"a context of {info.context_length} tokens instead of {window}")
        if info.model and (theirs := read_config(info.model)) and self.config:
            differences += [
                f"{key} {theirs[key]!r} instead of {self.config[key]!r}"
                for key in _SHAPE
                if key in theirs and key in self.config and theirs[key] != self.config[key]
            ]
        elif info.model and _names_an_owner(info.model) and _names_an_owner(self.name) and info.model != self.name:
            differences.append("another name")
        if differences:
            raise ConfigError(
                f"{url} serves {served}, the run trains {self.name}: {', '.join(dict.fromkeys(differences))}. Serve "
                "model_path, or fix rollout.addresses"
            )


def read_config(folder: str | None) -> dict[str, Any]:
    """Return the config.json of a model folder, that of its text model if it has several; empty without one."""
    if not folder:
        return {}
    try:
        config = orjson.loads((Path(folder).expanduser() / "config.json").read_bytes())
        text = config.get("text_config", config)
    except (OSError, ValueError, AttributeError):
        return {}
    return text if isinstance(text, dict) else {}


def _names_an_owner(name: str) -> bool:
    """Return whether this is a model on the hub; a name without an owner may be what a server calls its model."""
    return "/" in name and is_hub_name(name)
