"""``areal-lite doctor --from``: what a config of verl, slime or AReaL means here, and where our defaults differ.

Reads that config as data: nothing it names is imported or run. Each key is compared or listed as not carried over.
"""

import inspect
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.run_config import RunConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.config.yaml_text import parse_yaml, read_text
from areal_lite.errors import ConfigError
from areal_lite.tools.doctor.origin_keys import ORIGINS, UNUSED, At
from areal_lite.trainer.objectives import policy_loss

_NAMES = {"verl": "verl", "slime": "slime", "areal": "AReaL"}
_REQUIRED = {
    *("experiment_name", "model_path", "train_dataset.path"),
    *("trainer.learning_rate", "trainer.total_steps", "trainer.total_epochs"),
}
"""Keys without a default here."""


class Difference(NamedTuple):
    """A key of the origin, and the key here that says the same."""

    origin_key: str
    origin_value: Any
    given: bool
    """Whether the config sets it; else the value is the origin's default."""
    key: str
    value: Any
    """What to write here for the same behaviour."""
    default: Any
    """What a config without the key means here; None if the key is required or off."""
    differs: bool
    """Whether the value must be written because the default is another."""
    why: str


class Ported(NamedTuple):
    """A config of another system, compared."""

    origin: str
    config: str
    keys: list[Difference]
    not_carried_over: list[str]
    """Keys of the config that have no counterpart here, with this value."""

    def lines(self) -> Iterator[str]:
        """Yield the lines for people."""
        name, shown = _NAMES[self.origin], set()
        for differs, given in ((True, False), (True, True), (False, True)):
            for each in self.keys:
                if (each.differs, each.given) != (differs, given) or (each.key, repr(each.value)) in shown:
                    continue
                shown.add((each.key, repr(each.value)))
                word = "warning" if differs and not given else "write" if differs else "ok"
                source = f"{name} {'sets' if given else 'defaults to'} {each.origin_key}: {_text(each.origin_value)}"
                ours = "a required key here" if each.key in _REQUIRED else f"the default here is {_text(each.default)}"
                why = f" ({each.why})" if each.why else ""
                yield f"{word:<9}{each.key}: {_text(each.value)}; {source}, {ours}{why}"
        for key in self.not_carried_over:
            yield f"{'warning':<9}{key} is not carried over: no key here says the same with this value"


def ported(origin: str, path: str) -> Ported:
    """Compare the config at ``path``: YAML, or a shell script with the arguments of its command. Raises ConfigError if
    it cannot be read, or holds no key of ``origin``."""
    given = _read(origin, Path(path))
    defaults = {at.key: at.default for _, at in ORIGINS[origin]}
    values = {key: None if value is UNUSED else value for key, value in defaults.items()} | given
    if not given.keys() & defaults.keys():
        raise ConfigError(
            f"{path}: none of its {len(given)} keys is one of {_NAMES[origin]}'s: is --from right? "
            f"It is for {', '.join(ORIGINS)}"
        )

    def converted(at: At) -> Any:
        value = values[at.key]
        if isinstance(value, str) and "$" in value:  # of a shell, or a reference that the file does not resolve
            return UNUSED
        try:
            return at.converted(value, values.get)
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            raise ConfigError(f"{path}: {at.key} is {value!r:.200}, no value that {_NAMES[origin]} takes") from None

    loss = next(str(converted(at)) for key, at in ORIGINS[origin] if key == "trainer.loss")
    keys, carried = [], set()
    for key, at in ORIGINS[origin]:
        is_given = at.key in given
        if not is_given and at.default is UNUSED:
            continue
        value, wanted = values[at.key], converted(at)
        if wanted is not UNUSED or value == at.default:
            carried.add(at.key)
        if wanted is not UNUSED:
            default = default_of(key, loss)
            differs = not _equal(wanted, default) or (key in _REQUIRED and is_given)
            keys.append(Difference(at.key, value, is_given, key, wanted, default, differs, at.why))
    return Ported(origin, path, keys, sorted(given.keys() - carried))


def default_of(key: str, loss: str = "ppo") -> Any:
    """Return what a config of ours without ``key`` means; None if it is required, or its section is off."""
    section, _, option = key.rpartition(".")
    if section == "trainer.loss_kwargs":
        parameters = inspect.signature(getattr(policy_loss, loss, policy_loss.ppo)).parameters
        return parameters[option].default if option in parameters else None
    if section == "trainer.advantage_kwargs":
        return 1.0  # gamma and lam of every estimator that takes them
    if key == "trainer.loss_aggregation":
        return policy_loss.aggregation_of(loss, where=key)
    trainer = TrainerConfig(total_steps=1, learning_rate=1.0)
    value: Any = RunConfig(experiment_name="e", model_path="-", train_dataset=DatasetConfig(path="-"), trainer=trainer)
    for name in () if key in _REQUIRED else key.split("."):
        value = getattr(value, name, None)
    return None if key in _REQUIRED else list(value) if isinstance(value, tuple) else value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value)[:200]


def _read(origin: str, path: Path) -> dict[str, Any]:
    """Return the keys that a config sets, by dotted name."""
    text = read_text(path)
    if path.suffix in (".sh", ".bash") or text.startswith("#!"):
        return dict(_arguments(text) if origin == "slime" else _overrides(text))
    values = parse_yaml(text, where=str(path))
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"{path} holds no keys: give a YAML of {_NAMES[origin]}, or a shell script (.sh)")
    # Hydra's own sections are no settings of the run.
    values = {name: value for name, value in values.items() if name not in ("defaults", "hydra")}
    if origin == "slime":
        return {str(name).replace("-", "_"): value for name, value in values.items()}
    return dict(_flat(values, {at.key for _, at in ORIGINS[origin]}))


def _flat(values: Mapping[Any, Any], known: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values; references that the file itself resolves are replaced, and the others stay text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    tree: Any = None
    with suppress(OmegaConfBaseException):
        tree = OmegaConf.create(values)  # type: ignore[call-overload]

    def flat(section: Mapping[Any, Any], above: str) -> Iterator[tuple[str, Any]]:
        for name, value in section.items():
            key = f"{above}{name}"
            # the environment is not the config's
            if tree is not None and isinstance(value, str) and "${" in value and "oc.env" not in value:
                with suppress(OmegaConfBaseException):
                    value = OmegaConf.select(tree, key)
                    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            if isinstance(value, Mapping) and value and key not in known:
                yield from flat(value, f"{key}.")
            elif value != "???":  # what OmegaConf calls missing
                yield key, value

    yield from flat(values, "")


def _arguments(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments ``--name value`` of a script: one without a value is a switch, several are a list."""
    name, found = None, []
    for word in (*_words(text, "--"), "--"):
        if not word.startswith("--"):
            found.append(parse_yaml(word, where="a value"))
            continue
        if name:
            yield name, found[0] if len(found) == 1 else found or True
        name, _, value = word.removeprefix("--").replace("-", "_", word.partition("=")[0].count("-")).partition("=")
        found = [parse_yaml(value, where="a value")] if value else []


def _overrides(text: str) -> Iterator[tuple[str, Any]]:
    """Yield Hydra's overrides ``section.key=value`` of a script."""
    for word in _words(text, ""):
        key, is_override, value = word.lstrip("+").partition("=")
        if is_override and "." in key and all(part.isidentifier() for part in key.split(".")):
            yield key, parse_yaml(value, where=key)


def _words(text: str, begins: str) -> Iterator[str]:
    """Yield the words of the lines of a script that begin with ``begins``, without comments and line ends."""
    for line in text.splitlines():
        line = line.strip().removesuffix("\\")
        head, is_array, rest = line.partition("=(")
        line = rest.strip() if is_array and head.isidentifier() else line
        if not line.startswith(begins) or line.startswith("#"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quote that goes on in the next line
            words = line.split()
        yield from (word.rstrip(")") if word.endswith(")") and "(" not in word else word for word in words)
