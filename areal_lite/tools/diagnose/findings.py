"""Pure functions from a run's episodes to curves, and from a curve to a figure that a row of checks.toml judges."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import pairwise
from math import sqrt
from typing import Any
from areal_lite.tools.diagnose.episodes import Curves, Facts, mean

Finding = dict[str, Any]
"""A row of checks.toml (name, limit, meaning, fix, keys, ...) with ``severity`` (``ok`` without an alarm), ``figure``,
and the ``curve`` that it was taken from."""
SEVERITIES = ("problem", "warning", "ok")
MIN_VERSIONS, LONG = 3, 10
"""Versions from which a reward can be called stalled, and from which that itself is a finding."""
SURE, SOLVED, GROWN = 2.0, 0.8, 1.3
"""Standard errors from which a reward rises, share of its range from which it is high, factor of growing answers."""


@cache
def checks() -> list[Finding]:
    text = (resources.files("areal_lite.tools.diagnose") / "checks.toml").read_text()
    return [{"take": "last", "when": "always", "below": False, **row} for row in tomllib.loads(text)["check"]]


def diagnose(episodes: Sequence[Facts], metrics: Curves) -> list[Finding]:
    """Return a finding for each figure that the run has, the worst first."""
    curves = all_curves(episodes, metrics)
    rewards = [facts["reward"] for facts in episodes if "reward" in facts] or [0.0]
    low, high, lengths = min(rewards), max(rewards), curves["tokens"]
    is_high = high > low and _last(curves["reward"]) >= low + SOLVED * (high - low)
    holds = {
        "always": True,
        "stalled": len(curves["reward"]) >= MIN_VERSIONS and not (is_high or rise_of_reward(episodes) > SURE),
        "growing": _last(lengths) > GROWN * _last(lengths[::-1]),
    }
    found = []
    for check in checks():
        if curve := curves.get(check["source"]):
            most, part = max(value for _, value in curve), curve[::-1] if check["take"] == "first" else curve
            figure = most if check["take"] == "most" else _last(part)
            beyond = figure < check["limit"] if check["below"] else figure > check["limit"]
            severity = check["severity"] if beyond and holds[check["when"]] else "ok"
            found.append({**check, "severity": severity, "figure": figure, "curve": curve})
    return sorted(found, key=lambda each: SEVERITIES.index(each["severity"]))


def all_curves(episodes: Sequence[Facts], metrics: Curves) -> Curves:
    """Return every curve that a check may name: metrics by step, facts by version, and what is made of them."""
    counts = Counter(facts["reward"] for facts in episodes if "reward" in facts)
    best, common = max(counts, default=0.0), max(counts, key=lambda reward: counts[reward], default=0.0)
    judged = [facts | _of_reward(facts, best, common) for facts in episodes]
    names = {name for facts in judged for name in facts}
    curves: Curves = {"reward": [], "tokens": []} | metrics | {name: by_version(judged, name) for name in names}
    sampled = dict(curves.get("rollout/generated_tokens", ()))
    lost = [each for each in curves.get("rollout/discarded_tokens", ()) if sampled.get(each[0])]
    return curves | {
        "entropy_jump": [(s, abs(now - before)) for (_, before), (s, now) in pairwise(curves.get("train/entropy", ()))],
        "discarded": [(step, tokens / sampled[step]) for step, tokens in lost],
        "rise": [(LONG, rise_of_reward(episodes))] if len(curves["reward"]) >= LONG else [],
    }


def by_version(episodes: Iterable[Facts], name: str) -> list[tuple[int, float]]:
    """Return the mean of a fact by version."""
    values: dict[int, list[float]] = {}
    for facts in episodes:
        if name in facts:
            values.setdefault(int(facts["version"]), []).append(facts[name])
    return [(version, mean(each)) for version, each in sorted(values.items())]


def rise_of_reward(episodes: Iterable[Facts]) -> float:
    """Return how far the reward of the last third of versions is above the first third's, in standard errors
    of groups, because the episodes of a group share a row."""
    groups: dict[float, dict[float, list[float]]] = {}
    for facts in episodes:
        if "reward" in facts:
            groups.setdefault(facts["version"], {}).setdefault(facts["group"], []).append(facts["reward"])
    versions = [[mean(rewards) for rewards in groups[version].values()] for version in sorted(groups)]
    if not versions:
        return 0.0
    last, first = ([each for version in _third(part) for each in version] for part in (versions, versions[::-1]))
    rise = mean(last) - mean(first)
    parts = ([each - mean(part) for each in part] for part in (last, first))
    error = sqrt(sum(mean(each * each for each in part) / len(part) for part in parts))
    return rise / error if error else 0.0


def _of_reward(facts: Facts, best: float, common: float) -> Facts:
    """Return whether an episode has no reward, the most frequent one or the best one, and facts of the best ones."""
    if (reward := facts.get("reward")) is None:
        return {}
    found = {"zero": reward == 0} | ({"common": reward == common} if common else {})
    found |= {"best": reward == best} if best > 0 else {}
    known = [name for name in ("empty", "cut", "quoted") if name in facts and reward == best > 0]
    return found | {f"best_{name}": facts[name] for name in known}


def _third(values: Sequence[Any]) -> Sequence[Any]:
    """Return the last third, at least one."""
    return values[-max(1, len(values) // 3) :]


def _last(curve: Sequence[tuple[int, float]]) -> float:
    return mean(value for _, value in _third(curve)) if curve else 0.0
