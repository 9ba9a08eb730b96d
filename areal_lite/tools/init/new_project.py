"""areal-lite init: a new project from a template.

The templates are working projects, tested as they are: an agent, its task, a YAML, a test and a README. They use the
names ``my_agent`` and ``path/to/model``, which are replaced.
"""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from areal_lite.errors import ConfigError, StorageError
from areal_lite.files.hub_name import is_hub_name
from areal_lite.servers.programs.embedded_settings import check_model_path

_FOLDER = Path(__file__).with_name("templates")
_NAME, _MODEL = "my_agent", "path/to/model"
_MODELS = Path("runs/models")


@dataclass(frozen=True, slots=True)
class Project:
    """A new project in the working directory."""

    name: str
    template: str
    model: str | None
    """Its ``model_path``; None for the template's placeholder."""

    @property
    def next_steps(self) -> str:
        """The next commands, for the terminal."""
        command = "sft" if self.template == "sft" else "train"
        model = f" for the model {self.model}" if self.model else f"; set model_path in {self.name}/config.yaml"
        return (
            f"{self.name}/ is made from the template {self.template}{model}\n"
            f"test it:   python -m unittest {self.name}.test_agent\n"
            f"check it:  areal-lite doctor {self.name}/config.yaml\n"
            f"train it:  areal-lite {command} {self.name}/config.yaml"
        )


def init(name: str, *, template: str = "single", model: str | None = None) -> Project:
    """Write the folder ``name`` from a template."""
    _check_name(name)
    if model is not None and not is_hub_name(model):  # a run asks the hub
        check_model_path(model, key="--model")
    model = model or _first_model()
    texts = {path.name: path.read_text("utf-8") for path in sorted((_FOLDER / template).iterdir()) if path.is_file()}
    try:
        Path(name).mkdir()
        for file, text in texts.items():
            text = text.replace(_NAME, name)
            if file == "config.yaml" and model is not None:
                text = text.replace(_MODEL, json.dumps(model, ensure_ascii=False))
            Path(name, file).write_text(text, "utf-8")
    except OSError as error:
        raise StorageError(f"{name} cannot be written: {error}: run init in a writable folder") from error
    return Project(name, template, model)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) or not isinstance(yaml.safe_load(name), str):
        raise ConfigError(
            f"the name {name!r} cannot be imported, or is no text in YAML: use letters, digits and '_', such as "
            f"{_NAME!r}. The folder is made in the working directory"
        )
    if Path(name).exists():
        raise ConfigError(f"{name} exists, and init overwrites nothing: choose another name, or remove it")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError(f"{name!r} is the name of an importable module, which would hide it: choose another name")


def _first_model() -> str | None:
    configs = sorted(_MODELS.glob("*/config.json"))
    return str(configs[0].parent) if configs else None
