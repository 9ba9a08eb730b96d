"""The names of environments: what ``env: PREFIX:NAME`` means for a run's workflow and rows.

``config`` and ``data`` find this module by its path and only where a name needs it. A name is read without importing
its library, so that a finished run can be looked at where it is not installed.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from areal_lite.config.dotted_path import load_object
from areal_lite.environments.environment import Environment
from areal_lite.errors import ConfigError, did_you_mean

AGENT = "areal_lite.environments.environment_agent.EnvironmentAgent"
NUMBERS = {"train_dataset": {"size": 1000, "seed": 0}, "eval_dataset": {"size": 100, "seed": 1_000_000}}
"""How many rows an environment gives by default, and the number of the first."""
OWN = "env"
"""Prefix of rows for an environment that is a dotted path, as in ``path: env:my_module.MyEnv``."""


class _Adapter(NamedTuple):
    place: str
    """Module in adapters, and class."""
    install: str = "'areal-lite[environments]'"
    has_rows: bool = True
    elsewhere: bool = False
    """Its library is rather installed in another interpreter, so rows are numbers without a look at it."""


ADAPTERS = {
    "gymnasium": _Adapter("gymnasium.GymnasiumGame"),
    "harbor": _Adapter("harbor.HarborTask"),
    "mcp": _Adapter("mcp.McpServer", has_rows=False),
    "openenv": _Adapter("openenv.OpenEnvServer", install="aiohttp"),
    "reasoning-gym": _Adapter("reasoning_gym.ReasoningGymTask", install="reasoning_gym"),
    "scienceworld": _Adapter("scienceworld.ScienceWorldTask", install="scienceworld, and Java"),
    "skyrl-gym": _Adapter("skyrl_gym.SkyRLGymEnvironment", install="skyrl-gym", has_rows=False),
    "textarena": _Adapter("textarena.TextArenaGame"),
    "verifiers": _Adapter(
        "verifiers.VerifiersTaskset",
        install="verifiers, best in an interpreter of its own, and name that: workflow_kwargs.isolation=python:PATH",
        elsewhere=True,
    ),
}


def fill(values: dict[Any, Any], *, where: str) -> None:
    """Give a run's YAML with ``env`` the workflow and the rows that it leaves out; raises ConfigError."""
    env = str(values["env"])
    prefix = _prefix(env, where=f"{where}: env")
    if values.get("workflow") is None:
        values["workflow"] = AGENT
        if isinstance(kwargs := values.get("workflow_kwargs", {}), dict):
            values["workflow_kwargs"] = {"env": env, "seed": seed_of(values)} | kwargs
    if prefix != OWN and not ADAPTERS[prefix].has_rows:
        return
    for name, numbers in NUMBERS.items():
        rows, train = values.get(name, {}), values.get("train_dataset")
        if isinstance(rows, dict) and rows.get("path") is None:
            path = f"{OWN}:{env}" if prefix == OWN else env
            same = train.get("kwargs") if isinstance(train, dict) and train.get("path") == path else None
            values[name] = rows | {"path": path, "kwargs": {**(same or {}), **numbers, **(rows.get("kwargs") or {})}}


def seed_of(values: dict[Any, Any]) -> Any:
    """Return the seed of a run's YAML, which may stand at its top or in ``rollout``."""
    rollout = values.get("rollout")
    seed = values.get("seed", rollout.get("seed", 1) if isinstance(rollout, dict) else 1)
    return int(seed) if isinstance(seed, str) and seed.isdecimal() else seed  # of an environment variable


def check_has_rows(env: str, *, where: str) -> None:
    """Check the prefix of an environment, and that it has rows of its own; raises ConfigError."""
    prefix = _prefix(env, where=where)
    if prefix != OWN and not ADAPTERS[prefix].has_rows:
        raise ConfigError(f"{where} is {env!r}, which has no rows of its own: train it by itself, with env and a path")


def rows(path: str, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an environment, ``size`` from number ``seed`` on; raises ConfigError. An environment without
    rows of its own gets numbers, from which the seeds of its episodes follow."""
    env = path.removeprefix(f"{OWN}:")
    where = "dataset path" if env == path else "env"
    adapter = ADAPTERS.get(_prefix(env, where=where))
    made, name = (None, []) if adapter and adapter.elsewhere else _found(env, where=where)
    try:
        if (own := getattr(made, "rows", None)) is not None:
            return list(own(*name, **kwargs))
        return [{"env": env, "number": number} for number in _numbers(**kwargs)]
    except TypeError as error:
        raise ConfigError(f"dataset {path}: kwargs {dict(kwargs)} do not fit: {error}") from None


def _numbers(size: int = 500, seed: int = 0) -> range:
    return range(seed, seed + size)


def environment_maker(env: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return what makes an environment for one episode; raises ConfigError, with the package to install."""
    made, name = _found(env, where="env")
    return partial(made, *name, **kwargs)


def _found(env: str, *, where: str) -> tuple[Any, list[str]]:
    """Return the class behind a name, and its argument: what follows the prefix."""
    prefix = _prefix(env, where=where)
    if prefix == OWN:
        made = load_object(env, where=where)
        lacks = [f"{name}()" for name in ("reset", "step", "close") if not hasattr(made, name)]
        if lacks and isinstance(made, type) and not hasattr(made, "__getattr__"):
            raise ConfigError(f"{where} {env} has no {' and no '.join(lacks)}: write each as `async def` in its class")
        return made, []
    module, _, name = f"{__package__}.adapters.{ADAPTERS[prefix].place}".rpartition(".")
    try:
        made = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ConfigError(f"{where} {env} needs a package: {error}; pip install {ADAPTERS[prefix].install}") from None
    argument = env.partition(":")[2]
    getattr(made, "check", str)(argument)
    return made, [argument]


def _prefix(env: str, *, where: str) -> str:
    """Return the prefix of a name, ``OWN`` for a dotted path; raises ConfigError."""
    prefix, colon, name = env.partition(":")
    if not colon:
        return OWN
    if prefix in ADAPTERS and name:
        return prefix
    hint = did_you_mean(name and prefix, ADAPTERS, f"; the prefixes are {', '.join(ADAPTERS)}")
    raise ConfigError(f"{where} is {env!r}{hint}; an environment of your own is a dotted path, my_module.MyEnv")
