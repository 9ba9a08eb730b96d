"""The embedded server for own scripts, and settings of servers that are given one by one. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from areal_lite.config.schema import meaning_of
from areal_lite.config.server_config import EmbeddedServerConfig, ServerConfig
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.servers.programs.embedded_program import EmbeddedProgram
from areal_lite.servers.programs.server_program import ServedModel

C = TypeVar("C", bound=EmbeddedServerConfig)


class EmbeddedServer(EmbeddedProgram):
    """One child process that serves one model.

    Example:
        with EmbeddedServer(model_path="models/smollm2", dtype="float32") as server:
            requests.post(f"{server.address}/generate", json=...)
    """

    def __init__(
        self,
        *,
        model_path: str,
        seed: int = 0,
        weight_version: str = "0",
        deterministic: bool = False,
        log_path: str | Path | None = None,
        **settings: Any,
    ) -> None:
        """Check the settings; ``start`` runs the server.

        Args:
            model_path: Directory with config.json, tokenizer and safetensors weights; or a name on the Hugging Face
                Hub.
            seed: Seed for requests without one; their outputs then depend on the order of arrival.
            weight_version: Name of the first weights.
            deterministic: Make the bits of each answer depend on its request, the weights and ``num_threads`` only.
                Requests run one by one and share no KV cache: several times slower with many at once.
            log_path: File to append the child's stdout and stderr to. None: a temporary file, for error messages.
            settings: Fields of ``EmbeddedServerConfig``.

        Raises:
            ConfigError: If a setting is unknown or out of range, or model or port cannot be used.
        """
        config = ServerConfig(**asdict(checked_settings(EmbeddedServerConfig, settings)))
        model = ServedModel(
            model_path=model_path, seed=seed, weight_version=weight_version, deterministic=deterministic
        )
        super().__init__("the embedded server", config, model, log_path=None if log_path is None else Path(log_path))
        check_model_path(model_path)  # a run checks its model before it makes servers of it
        check_image_model(model_path)


def checked_settings(kind: type[C], settings: dict[str, Any]) -> C:
    """Build the config class ``kind`` from field names and values; raises ConfigError with every fault."""
    try:
        return kind(**settings)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    known = ", ".join(kind.__dataclass_fields__)
    lines = []
    for fault in faults:
        name = str(fault["loc"][0])
        if fault["type"] == "unexpected_keyword_argument":
            lines.append(f"the embedded server has no setting {name!r}; it has {known}.")
        else:
            rule = fault["msg"].replace("Input should", "it must")
            lines.append(f"{name} is {fault['input']!r}: {rule}. {meaning_of(kind, name)}")
    raise ConfigError("\n".join(lines))
