"""areal-lite init: a new project from a template.

The templates are working projects, tested as they are: an agent, its task, a YAML, a test and a README; agents share
the tests' scripted model, and the task if they have none. ``my_agent`` and ``path/to/model`` in them are replaced.
"""

import argparse
import importlib.util
import json
import re
from pathlib import Path
import yaml
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_model_path, is_hub_name
from areal_lite.files.whole_files import storing

_FOLDER = Path(__file__).with_name("templates")
_NAME, _MODEL = "my_agent", "path/to/model"
_MODELS = Path("runs/models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="a new folder, which is imported by this name")
    templates = ("single", "tools", "multi-turn", "env", "sft")
    add("--template", choices=templates, default="single", help="kind of agent (default: single)")
    add("--model", metavar="PATH", help="model folder or hub name (default: the first in runs/models)")


def run(options: argparse.Namespace) -> int:
    print(init(options.name, template=options.template, model=options.model))
    return 0


def init(name: str, *, template: str = "single", model: str | None = None) -> str:
    """Write the folder ``name`` from a template; return the next commands, for the terminal."""
    _check_name(name)
    if model is not None and not is_hub_name(model):  # a run asks the hub
        check_model_path(model, key="--model")
    model = model or next(map(str, (path.parent for path in sorted(_MODELS.glob("*/config.json")))), None)
    texts = {path.name: path.read_text("utf-8") for path in (_FOLDER / template).iterdir() if path.is_file()}
    if "agent.py" in texts:
        texts = {path.name: path.read_text("utf-8") for path in _FOLDER.glob("*.py")} | texts
    with storing(name, "run init in a writable folder"):
        Path(name).mkdir()
        for file, text in texts.items():
            text = text.replace(_NAME, name)
            if file == "config.yaml" and model is not None:
                text = text.replace(_MODEL, json.dumps(model, ensure_ascii=False))
            Path(name, file).write_text(text, "utf-8")
    command = "sft" if template == "sft" else "train"
    of_model = f" for the model {model}" if model else f"; set model_path in {name}/config.yaml"
    return (
        f"{name}/ is made from the template {template}{of_model}\n"
        f"test it:   python -m unittest {name}.test_agent\n"
        f"check it:  areal-lite doctor {name}/config.yaml\n"
        f"train it:  areal-lite {command} {name}/config.yaml"
    )


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
