"""The table origin_keys.yaml, of what says the same here and in other systems, and the functions that it names.

A conversion gets the value of its key; :data:`UNUSED` means that the key has no effect in the origin, or no counterpart
with this value. Functions ask for other keys of the origin: what the config sets, else the default.
"""

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple
from areal_lite.config.yaml_text import parse_yaml

UNUSED = object()
Get = Callable[[str], Any]
"""Returns the value of a key of the origin: what the config sets, else the default."""
_A, _C = "actor_rollout_ref.actor.", "algorithm.rollout_correction."


class At(NamedTuple):
    """A key of the origin, and how its value is written here."""

    key: str
    default: Any = UNUSED
    """Of the origin; :data:`UNUSED` if it has none, so that only a config that sets the key needs it here."""
    when: str = ""
    """Where the key has an effect: a function of :data:`CONDITIONS`, KEY=VALUE, or a key that is set."""
    convert: str | Mapping[Any, Any] = ""
    """A function of :data:`CONVERSIONS`, or what to write for some values. Others stay; null and "" are unused."""
    take: str | list[str] = ""
    """The keys whose values are written in place of this one's."""
    write: Any = UNUSED
    """What is written, whatever the value."""
    why: str = ""

    def converted(self, value: Any, get: Get) -> Any:
        """Return what to write here for ``value``, or :data:`UNUSED`."""
        key, has_wanted, wanted = self.when.partition("=")
        holds = CONDITIONS[key](get) if key in CONDITIONS else get(key) == wanted if has_wanted else get(key)
        if self.when and not holds:
            return UNUSED
        if self.write is not UNUSED:
            return self.write
        if self.take:
            return get(self.take) if isinstance(self.take, str) else [get(key) for key in self.take]
        if isinstance(self.convert, Mapping):
            return self.convert.get(value, UNUSED if value in (None, "") else value)
        return CONVERSIONS[self.convert](value, get) if self.convert else value


def _number(value: Any) -> float:
    """Return ``value`` as a number; 0 if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _minibatches(value: Any, batch: Any) -> Any:
    return max(1, int(_number(batch) // size)) if (size := _number(value)) >= 1 else UNUSED


def _verl_group_of_one(get: Get) -> bool:
    return bool(get("algorithm.adv_estimator") == "grpo") and _number(get("actor_rollout_ref.rollout.n")) == 1


def _verl_advantage(value: Any, get: Get) -> Any:
    if _verl_group_of_one(get):
        return "reinforce"
    name = get("algorithm.adv_estimator")
    return "dr_grpo" if name == "grpo" and not get("algorithm.norm_adv_by_std_in_grpo") else name


def _verl_bounds(value: Any, get: Get) -> Any:
    """Return one bound per statistic; verl's single number of a k1 statistic has its inverse as the lower bound."""
    names = str(get(_C + "rollout_rs") or "").split(",")
    bounds = [part.strip() for part in str(value).split(",")]
    if value is None or names == [""]:
        return UNUSED
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    pairs = zip(names, bounds, strict=False)
    return ",".join(
        f"{1 / _number(bound):g}_{bound}" if name.endswith("k1") and _number(bound) and "_" not in bound else bound
        for name, bound in pairs
    )


def _slime_kl_loss(get: Get) -> bool:
    return bool(get("use_kl_loss")) and _number(get("kl_loss_coef")) != 0


def _slime_advantage(value: Any, get: Get) -> Any:
    name = {"gspo": "grpo", "cispo": "grpo", "ppo": "gae"}.get(get("advantage_estimator"), get("advantage_estimator"))
    return "dr_grpo" if name == "grpo" and get("disable_grpo_std_normalization") else name


def _slime_minibatches(value: Any, get: Get) -> Any:
    episodes = _number(get("rollout_batch_size")) * _number(get("n_samples_per_prompt"))
    return get("num_steps_per_rollout") or _minibatches(get("global_batch_size"), episodes)


def _areal_advantage(value: Any, get: Get) -> Any:
    if get("critic.path") is not None:
        return "gae"
    mean, std = get("actor.reward_norm.mean_level"), get("actor.reward_norm.std_level")
    if mean == "group" and std in ("group", None):
        return "grpo" if std else "dr_grpo"
    return "reinforce" if mean is None and std is None else UNUSED


def _areal_recomputes(get: Get) -> bool:
    return bool(get("actor.use_decoupled_loss") or get("actor.recompute_logprob"))


CONDITIONS: dict[str, Callable[[Get], Any]] = {
    "verl_group_of_one": _verl_group_of_one,
    "verl_kl_reward": lambda get: get("algorithm.use_kl_in_reward") and not get(_A + "use_kl_loss"),
    "verl_symmetric_clip": lambda get: get(_A + "clip_ratio_low") is None,
    "slime_kl_loss": _slime_kl_loss,
    "slime_kl": lambda get: get("kl_coef") or _slime_kl_loss(get),
    "areal_kl": lambda get: get("ref.path") is not None and _number(get("actor.kl_ctl")) > 0,
    "areal_discounts": lambda get: _areal_advantage(None, get) in ("gae", "reinforce"),
    "areal_recomputes": _areal_recomputes,
}
CONVERSIONS: dict[str, Callable[[Any, Get], Any]] = {
    "given": lambda value, get: UNUSED if value is None else value,
    "is_set": lambda value, get: value is not None,
    "negated": lambda value, get: not value,
    "not_empty": lambda value, get: value or None,
    "last": lambda value, get: value[-1] if isinstance(value, list) and value else value,
    "listed": lambda value, get: [value] if isinstance(value, str | int) else value,
    "limit": lambda value, get: None if _number(value) < 0 else value,
    "steps": lambda value, get: max(0, int(_number(value))),
    "verl_advantage": _verl_advantage,
    "verl_minibatches": lambda value, get: _minibatches(value, get("data.train_batch_size")),
    "verl_clip_eps_high": lambda value, get: None if value == get(_A + "clip_ratio_low") else value,
    "verl_bounds": _verl_bounds,
    "verl_critic_warmup": lambda value, get: max(0, int(_number(value)) - 1),
    "verl_resume": lambda value, get: {"disable": "never", "resume_path": get("trainer.resume_from_path")}.get(
        value, value
    ),
    "slime_advantage": _slime_advantage,
    "slime_minibatches": _slime_minibatches,
    "slime_loss": lambda value, get: value if value in ("gspo", "cispo") else "ppo",
    "areal_advantage": _areal_advantage,
    "areal_proximal": lambda value, get: "trainer" if _areal_recomputes(get) else "behaviour",
    "areal_top_k": lambda value, get: None if _number(value) >= 10**8 else value,
    # on and off are booleans in YAML 1.1
    "areal_resume": lambda value, get: "auto" if value in ("on", "auto", True) else "never",
}
_TABLE = parse_yaml(resources.files(__package__).joinpath("origin_keys.yaml").read_text(), where="origin_keys.yaml")
ORIGINS: dict[str, list[tuple[str, At]]] = {
    origin: [(name, At(row.pop(origin), **row)) for name, rows in _TABLE.items() for row in rows if origin in row]
    for origin in ("verl", "slime", "areal")
}
"""Keys here, with the origin's that say the same."""
