"""Filters for ``should_accept_fn``: they choose the groups to train on and give a reason for each rejection."""

from __future__ import annotations

from typing import Any

from areal_lite.api.engine_api import FilterDecision


def nonzero_reward_std(trajectory: dict[str, Any]) -> FilterDecision:
    """Keep a group whose rewards differ: equal rewards give no advantage and no gradient.

    Source: DAPO (arXiv:2503.14476), dynamic sampling.
    """
    episodes: dict[int, list[float]] = {}
    members = trajectory.get("member_idx", range(len(trajectory["rewards"])))
    for member_idx, reward in zip(members, trajectory["rewards"].tolist(), strict=True):
        episodes.setdefault(int(member_idx), []).append(reward)
    rewards = {sum(values) / len(values) for values in episodes.values()}
    if len(rewards) > 1:
        return FilterDecision(True)
    return FilterDecision(False, f"all rewards are {rewards.pop():g}")
