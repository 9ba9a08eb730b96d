"""Filters that a config names: of ``should_accept_fn``, which groups train; of ``buffer_filter``, which come first."""

import math
from numbers import Real
from typing import Any
from areal_lite.api.engine_api import FilterDecision
from areal_lite.data.source.source_settings import SampleGroup


def nonzero_reward_std(trajectory: dict[str, Any]) -> FilterDecision:
    """Keep a group whose rewards differ: equal rewards give no advantage and no gradient. Source: DAPO
    (arXiv:2503.14476), dynamic sampling."""
    episodes: dict[int, list[float]] = {}
    given = trajectory.get("episode_rewards") or trajectory["rewards"].tolist()
    for member_idx, reward in zip(trajectory.get("member_idx", range(len(given))), given, strict=True):
        episodes.setdefault(int(member_idx), []).append(reward)
    rewards = {round(sum(values) / len(values), 9) for values in episodes.values()}  # a mean of equal ones may differ
    if len(rewards) > 1:
        return FilterDecision(True)
    return FilterDecision(False, f"all rewards are {rewards.pop():g}")


def highest_reward_first(
    source: Any, rollout_id: int | None, buffer: list[SampleGroup], num_samples: int
) -> list[SampleGroup]:
    """Take the groups of the highest mean reward; those without a reward yet come last."""
    settings = getattr(source, "settings", source)  # slime's args have their own reward_key
    reward_key = getattr(settings, "reward_key", None)

    def mean_reward(group: SampleGroup) -> float:
        rewards = [
            sample.get_reward_value(None if isinstance(sample.reward, Real) else reward_key)
            for sample in group
            if isinstance(sample.reward, Real) or (reward_key is not None and sample.reward is not None)
        ]
        return sum(rewards) / len(rewards) if rewards else -math.inf

    return sorted(buffer, key=mean_reward, reverse=True)[:num_samples]
