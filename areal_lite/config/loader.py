"""Load a YAML file and ``key=value`` overrides into a validated config.

All errors are reported at once, one per line with file, key, value, rule and fix. A config names code by dotted path,
so it must be trusted; it is still parsed as plain data. ``interpolation`` replaces ``${...}`` before validation.
"""

import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload
from pydantic import TypeAdapter, ValidationError
from areal_lite.config.dump import plain, write_yaml
from areal_lite.config.interpolation import Key, check_resolved, resolve
from areal_lite.config.keys import describe_fields, field_type, owners, section_of
from areal_lite.config.rollout_config import FaultsConfig, InferenceEngineConfig, RewardsConfig, RunIdentity
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.config.schema import meaning_of
from areal_lite.config.yaml_text import Opener, parse_yaml, read_text
from areal_lite.errors import ConfigError, did_you_mean

C = TypeVar("C", bound=ExperimentConfig)
KINDS = {"sft": "SFTConfig", "dpo": "DPOConfig", "reward_model": "RewardModelConfig"}
"""Classes of :mod:`areal_lite.config.supervised_config` by ``kind``; a file without it is reinforcement learning."""


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ...) -> RunConfig: ...
@overload
def load_config(path: str | Path, overrides: Sequence[str] = ..., *, root: type[C]) -> C: ...
def load_config(path: str | Path, overrides: Sequence[str] = (), *, root: type[Any] = RunConfig) -> ExperimentConfig:
    """Return the validated config of the file ``path`` with ``overrides`` applied; raises ConfigError.

    The ``rollout`` of a RunConfig inherits the experiment name, trial name, fileroot and seed of the run, and the
    model's tokenizer unless it names another. The run takes from ``rollout`` what only ``rollout`` sets.

    Args:
        path: A YAML file of at most 1 MiB. Its texts may refer to environment variables (``${oc.env:NAME,default}``)
            and to other values (``${section.key}``).
        overrides: ``section.key=value`` each; the value is YAML (``null``, ``[a, b]``, ``0.5``); the last one wins.
        root: Expected config class. ExperimentConfig accepts any file: its ``kind`` selects the class, and a file
            without ``kind`` is a RunConfig.
    """
    return _load(path, overrides, root).config


def load_recorded(run: Path, opened: Opener, overrides: Sequence[str] = (), *, root: type[C]) -> C:
    """Return the config that a run left in its folder, as :func:`load_config` does; it may be somebody else's folder.
    Keys that have moved since the run are read at their old place: the folder of a run stays readable. The config
    refers to nothing outside of it, and ``opened`` refuses a link out of the folder."""
    return _load(run / "config.yaml", overrides, root, opened).config  # type: ignore[return-value]


def describe_value(path: str | Path, overrides: Sequence[str], key: str, *, root: type[Any]) -> str:
    """Return the value of a dotted key after loading, and where it comes from, as one line; empty without a value."""
    loaded = _load(path, overrides, root)
    value: Any = dataclasses.asdict(loaded.config)
    written: Any = loaded.values
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            return ""
        value = value[name]
        written = written.get(name) if isinstance(written, dict) else None
    if isinstance(value, dict):
        return ""
    source = loaded.sources.get(key) or ("default" if written is None and value is not None else str(path))
    return f"value {write_yaml(plain(value, key), flow=True)}  ({source})"


class _Loaded(NamedTuple):
    config: ExperimentConfig
    values: dict[Any, Any]
    """As in the file, with overrides and references applied."""
    sources: dict[str, str]
    """Source of each value that is not simply from the file, by dotted key."""


def _load(path: str | Path, overrides: Sequence[str], root: type[Any], opened: Opener | None = None) -> _Loaded:
    values = parse_yaml(read_text(Path(path), opened), where=str(path))
    if values is None:
        required = ", ".join(name for name, info in root.__pydantic_fields__.items() if info.is_required())
        raise ConfigError(f"{path}: the file is empty: write a mapping with at least {required}")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the file holds a {type(values).__name__}: write a mapping, 'key: value'")
    if opened is not None:
        check_resolved(values, where=str(path))
    root = _config_class(values, overrides, root, where=str(path))
    sources: dict[str, str] = {}
    for override in overrides:
        sources[_apply_override(values, override, where=str(path))] = f"{path}, override {override!r}"
    for key, written in resolve(values, where=str(path), default_of=lambda key: _default_of(root, key)).items():
        sources[key] = f"{sources.get(key, path)}, from {written!r}"
    try:
        if issubclass(root, RunConfig) and (_is_mixture(values) or values.get("env") is not None):
            name = "mixture" if _is_mixture(values) else "catalog"
            importlib.import_module(f"areal_lite.environments.{name}").fill(values, where=str(path))
        config: ExperimentConfig = TypeAdapter(root).validate_python(values)
        if isinstance(config, RunConfig):
            config = _with_run_identity(config, values, str(path))
    except ValidationError as error:
        raise ConfigError("\n".join(_messages(error, root, str(path), sources))) from None
    return _Loaded(config, values, sources)


def _is_mixture(values: Mapping[Any, Any]) -> bool:
    return any(isinstance(values.get(name), list) for name in ("train_dataset", "eval_dataset"))


def class_of(kind: str) -> type[Any]:
    """Return the config class of a kind of supervised training."""
    cls: type[Any] = getattr(importlib.import_module("areal_lite.config.supervised_config"), KINDS[kind])
    return cls


def _config_class(values: dict[Any, Any], overrides: Sequence[str], root: type[Any], *, where: str) -> type[Any]:
    """Return the config class of the file's ``kind``, which must be a subclass of ``root``."""
    kinds = [values["kind"]] if "kind" in values else []
    kinds += [override.removeprefix("kind=") for override in overrides if override.startswith("kind=")]
    if not kinds:
        if root is ExperimentConfig and not ({"workflow", "env"} & values.keys() or _is_mixture(values)):
            raise ConfigError(
                f"{where}: neither kind nor workflow: set kind: {' | '.join(KINDS)}, or a workflow or env for "
                "reinforcement learning"
            )
        if "kind" in root.__pydantic_fields__ and "workflow" in values:
            raise ConfigError(f"{where}: a file with a workflow is reinforcement learning: use areal-lite train")
        return RunConfig if root is ExperimentConfig else root
    kind = kinds[-1]
    if kind not in list(KINDS):
        raise ConfigError(
            f"{where}: kind: {_short(kind)}: it must be {' | '.join(KINDS)}, or absent for reinforcement learning"
        )
    if not issubclass(class_of(kind), root):
        raise ConfigError(f"{where}: kind: {kind!r}: use the command areal-lite {kind.replace('_', '-')}")
    return class_of(kind)


def _apply_override(values: dict[Any, Any], override: str, *, where: str) -> str:
    where = f"{where}, override {override!r}"
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{where}: write section.key=value")
    *sections, last = key.split(".")
    section: Any = values
    for depth, name in enumerate(sections, 1):
        inner = {} if section.get(name) is None else section[name]
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {'.'.join(sections[:depth])} is {_short(inner)}, not a section")
        section[name] = section = dict(inner)  # an alias of it elsewhere stays as it is
    section[last] = parse_yaml(text, where=where)
    return key


def _messages(error: ValidationError, root: type[Any], path: str, sources: Mapping[str, str]) -> Iterator[str]:
    for entry in error.errors(include_url=False):
        keys = [str(part) for part in entry["loc"]]
        dotted = ".".join(keys)
        is_rule = entry["type"] == "value_error"  # of a section, whichever of its keys has the source
        source = next(
            (
                source
                for key, source in sources.items()
                if f"{dotted}.".startswith(f"{key}.") or (key.startswith(f"{dotted}.") and not is_rule)
            ),
            path,
        )
        owner, meaning = None, ""
        for owner, name in owners(root, keys):  # the meaning of the nearest known field
            meaning = (meaning_of(owner, name) if owner else "") or meaning
        prefix = f"{source}: {'.'.join(keys[:-1])}: ".replace(": : ", ": ")
        if entry["type"] == "unexpected_keyword_argument" and owner is not None:
            yield prefix + _unknown(owner, keys[-1], root)
        elif entry["type"] == "missing":
            yield f"{source}: {dotted}: required, but missing. {meaning}"
        else:
            rule = entry["msg"].removeprefix("Value error, ").replace("Input should", "it must")
            if entry["type"] == "dataclass_type":
                rule = "it must be a section: indented 'key: value' lines"
            # Our own validators already name the value.
            value = "" if entry["type"] == "value_error" else f"{_short(entry['input'])}: "
            yield f"{source}: {dotted}: {value}{rule}. {meaning}".rstrip(" ")


def _default_of(root: type[Any], key: Key) -> Any:
    if key[0] == "rollout" and key[-1] in (*RunIdentity.__dataclass_fields__, "tokenizer_path"):
        name = str(key[-1]).replace("tokenizer", "model")
        raise ConfigError(f"{'.'.join(key)!r} has no value of its own: write ${{{name}}}")
    for owner, name in owners(root, key):
        if owner is None:
            raise ConfigError(f"there is no key {'.'.join(key)!r}")
        if name not in owner.__pydantic_fields__:
            raise ConfigError(_unknown(owner, name, root))
        field, annotation = owner.__pydantic_fields__[name], field_type(owner, name)
    if field.is_required() or section_of(annotation) is not None:
        raise ConfigError(f"{'.'.join(key)!r} has no value: set it")
    return field.get_default(call_default_factory=True)


_ELSEWHERE = {
    "dataloader_num_workers": "rows are read and prepared while others generate, without loader workers: remove it",
    "train_batch_size": "the rows of a training batch are rollout.consumer_batch_size",
    "total_training_steps": "write trainer.total_steps",
}
"""Replacements of keys of verl."""
_MOVED = {
    **{name: f"rollout.faults.{name}" for name in FaultsConfig.__dataclass_fields__},
    **{f"agent_{name}": f"rollout.agents.{name}" for name in ("workflow", "isolation", "processes")},
    **{n: f"rollout.agents.{n}" for n in ("tool_parser", "reasoning_parser", "tools_in_system_prompt")},
    **{f"reward_{name}": f"rollout.rewards.{name}" for name in RewardsConfig.__dataclass_fields__},
}
"""Keys that are in a sub-section of ``rollout``."""


def _unknown(owner: type[Any], name: str, root: type[Any]) -> str:
    if name in _ELSEWHERE:
        return f"unknown key {name!r}: {_ELSEWHERE[name]}"
    if owner is InferenceEngineConfig and name in _MOVED:
        return f"unknown key {name!r}: write {_MOVED[name]}"
    known = list(owner.__pydantic_fields__)
    elsewhere = [field.key for field in describe_fields(root) if field.key.rpartition(".")[2] == name]
    if name in elsewhere:
        return f"unknown key {name!r}: it is a top-level key; write it outside of the sections"
    if elsewhere:
        return f"unknown key {name!r}; did you mean {elsewhere[0]!r}?"
    return f"unknown key {name!r}" + did_you_mean(name, known, f"; the keys here are {', '.join(known)}")


def _short(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _with_run_identity(config: RunConfig, values: Mapping[Any, Any], path: str) -> RunConfig:
    """Give rollout the run's identity and tokenizer, and the run the identity that only ``rollout`` sets."""
    given = values.get("rollout") or {}
    names = [field.name for field in dataclasses.fields(RunIdentity)]
    alone = [name for name in names if given.get(name) is not None and name not in values]
    config = dataclasses.replace(config, **{name: getattr(config.rollout, name) for name in alone})
    shared = {name: getattr(config, name) for name in names}
    conflicts = [
        f"{path}: rollout.{name}: {given[name]!r} contradicts {name} {value!r} at the top: remove it from rollout"
        for name, value in shared.items()
        if name in given and getattr(config.rollout, name) != value
    ]
    if conflicts:
        raise ConfigError("\n".join(conflicts))
    tokenizer_path = config.rollout.tokenizer_path or config.model_path
    rollout = dataclasses.replace(config.rollout, **shared, tokenizer_path=tokenizer_path)
    return dataclasses.replace(config, rollout=rollout)
