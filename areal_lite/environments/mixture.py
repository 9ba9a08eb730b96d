"""A list of environments in place of a dataset section: ``train_dataset: [{env: ..., weight: 2}, ...]``.

One dataset has all rows, with columns ``env`` and ``data_source`` (the part). ``mixture_sampler`` orders training rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from pydantic import TypeAdapter
from areal_lite.config.dataset_config import MIXTURE, MixturePart
from areal_lite.environments import catalog
from areal_lite.errors import ConfigError


def fill(values: dict[Any, Any], *, where: str) -> None:
    """Replace the lists of environments in a run's YAML by dataset sections, and add the workflow that plays them;
    raises ConfigError, and ValidationError for a part's keys. Held-out rows default to the parts' environments."""
    train, held_out = (values.get(name) for name in ("train_dataset", "eval_dataset"))
    if not isinstance(train, list) or not isinstance(held_out, list | None):
        raise ConfigError(
            f"{where}: only one of train_dataset and eval_dataset is a list of environments: write the other as a list "
            "too, or leave eval_dataset out"
        )
    for key in ("env", "workflow"):
        if values.get(key) is not None:
            raise ConfigError(
                f"{where}: {key} is {values[key]!r}, but a list of environments as train_dataset sets it: remove one"
            )
    lists = TypeAdapter(dict[str, list[MixturePart]]).validate_python(
        {"train_dataset": train} | ({} if held_out is None else {"eval_dataset": held_out})
    )
    if "eval_dataset" not in values:
        own = {"size", "seed"}
        lists["eval_dataset"] = [
            MixturePart(env=part.env, name=part.name, kwargs={k: v for k, v in part.kwargs.items() if k not in own})
            for part in lists["train_dataset"]
        ]
    seed = catalog.seed_of(values)
    for section, parts in lists.items():
        named = [_with_defaults(part, f"{where}: {section}.{i}", section) for i, part in enumerate(parts)]
        if len({part.name for part in named}) < len(named):
            names = ", ".join(str(part.name) for part in named)
            raise ConfigError(f"{where}: {section} has two parts of one name ({names}): give each its own name")
        values[section] = {"path": MIXTURE, "kwargs": {"parts": list(map(asdict, named)), "seed": seed}}
    values["train_dataset"]["sampler"] = {"path": f"{__name__}_sampler", "name": "MixtureSampler"}
    values["workflow"] = catalog.AGENT
    if isinstance(kwargs := values.get("workflow_kwargs", {}), dict):
        envs = list(dict.fromkeys(part.env for parts in lists.values() for part in parts))
        values["workflow_kwargs"] = {"env": envs, "seed": seed} | kwargs


def _with_defaults(part: MixturePart, where: str, section: str) -> MixturePart:
    """Return the part with its name and its numbers of rows; raises ConfigError."""
    catalog.check_has_rows(part.env, where=f"{where}.env")
    for key in ("until", "weight") if section == "eval_dataset" else ():
        if (value := getattr(part, key)) != getattr(MixturePart, key):
            raise ConfigError(f"{where}.{key} is {value:g}, but held-out rows all run: remove it")
    return replace(part, name=part.name or part.env, kwargs=catalog.NUMBERS[section] | part.kwargs)


def rows(parts: Sequence[Mapping[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return the rows of all parts, part by part; ``seed``, the run's, is for the sampler."""
    return [
        {**row, "env": part["env"], "data_source": part["name"]}
        for part in parts
        for row in catalog.rows(part["env"], part["kwargs"])
    ]
