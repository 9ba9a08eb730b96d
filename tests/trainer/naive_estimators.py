"""Advantage estimators as loops over groups and episodes, by their names in a YAML; they fill in ``advantages``."""

from __future__ import annotations
import math
from collections.abc import Callable, Sequence
from typing import Any
import torch
from torch import Tensor


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def grpo(step: Any, divide_by_std: bool = True) -> None:
    for members in step.groups():
        totals = [episode.total for episode in members]
        mean, scale = sum(totals) / len(totals), _deviation(totals) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            equal = len(set(totals)) == 1
            step.credit(episode, 0.0 if equal else (episode.total - mean) / scale)


def dr_grpo(step: Any) -> None:
    grpo(step, divide_by_std=False)


def grpo_passk(step: Any, divide_by_std: bool = True) -> None:
    for members in step.groups():
        ranked = sorted(members, key=lambda episode: episode.total)
        scale = _deviation([episode.total for episode in members]) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            step.credit(episode, 0.0)
        if len(ranked) > 1 and ranked[-1].total != ranked[-2].total:
            step.sure(torch.tensor(ranked[-1].total - ranked[-2].total))
            step.credit(ranked[-1], (ranked[-1].total - ranked[-2].total) / scale)


def rloo(step: Any) -> None:
    for members in step.groups():
        for episode in members:
            others = [one.total for one in members if one is not episode]
            step.credit(episode, episode.total - sum(others) / len(others) if others else 0.0)


def opo(step: Any) -> None:
    for members in step.groups():
        tokens = sum(episode.n for episode in members)
        mean = sum(episode.n * episode.total for episode in members) / max(tokens, 1)
        for episode in members:
            step.credit(episode, episode.total - mean)


def gpg(step: Any, f_norm: float = 1.0) -> None:
    nonzero = sum(episode.total != 0 for episode in step.episodes)
    for members in step.groups():
        mean = sum(episode.total for episode in members) / len(members)
        for episode in members:
            step.credit(episode, (episode.total - mean) * len(step.episodes) / max(nonzero, 1) / f_norm)


def reinforce_plus_plus_baseline(step: Any) -> None:
    dr_grpo(step)
    step.whiten()
    for members in step.groups():
        if len({episode.total for episode in members}) == 1:
            for episode in members:
                step.credit(episode, 0.0)


def _discounted(values: Tensor, discount: float) -> Tensor:
    sums, later = torch.zeros_like(values), 0.0
    for place in reversed(range(len(values))):
        later = float(values[place]) + discount * later
        sums[place] = later
    return sums


def reinforce(step: Any, gamma: float = 1.0) -> None:
    for episode in step.episodes:
        episode.advantages = _discounted(episode.rewards, gamma)


def reinforce_plus_plus(step: Any, gamma: float = 1.0) -> None:
    reinforce(step, gamma)
    step.whiten()


def remax(step: Any) -> None:
    reinforce(step)
    for episode in step.episodes:
        episode.advantages = episode.advantages - step.baselines[episode.group]


def gae(step: Any, gamma: float = 1.0, lam: float = 1.0) -> None:
    for episode in step.episodes:
        following = torch.cat((episode.values[1:], torch.zeros(min(episode.n, 1), dtype=torch.float64)))
        errors = episode.rewards + gamma * following - episode.values
        episode.advantages = _discounted(errors, gamma * lam)
        episode.returns = episode.advantages + episode.values
    step.whiten()


def optimal_token_baseline(step: Any, credit_lone_tail: bool = False) -> None:
    for episode in step.episodes:
        episode.advantages = torch.zeros(episode.n, dtype=torch.float64)
        episode.returns = _discounted(episode.rewards, 1.0)
        norms = 1 - 2 * episode.proximal.exp() + episode.squared
        episode.energy = (norms * episode.correction**2).cumsum(0)
    for members in step.groups():
        for place in range(max(episode.n for episode in members)):
            there = [episode for episode in members if episode.n > place]
            returns = [float(episode.returns[place]) for episode in there]
            energies = [float(episode.energy[place]) for episode in there]
            baseline = sum(r * e for r, e in zip(returns, energies, strict=True)) / (sum(energies) + 1e-8)
            for episode, value in zip(there, returns, strict=True):
                if len(set(returns)) > 1:
                    episode.advantages[place] = value - baseline
                elif credit_lone_tail and len(there) == 1 and len(members) > 1:
                    episode.advantages[place] = value


def turn_grpo(step: Any, divide_by_std: bool = True) -> None:
    turn_returns(step, gamma=0.0, divide_by_std=divide_by_std)


def _turn_totals(episode: Any, gamma: float) -> list[float]:
    """Return each turn's reward without its KL penalty, plus the discounted mean of the turns that continue it."""
    turns, costs = episode.sequences, episode.penalties.split(episode.tokens_of)
    parents = []
    for turn in turns:
        above = [turn.path[:end] for end in range(1, len(turn.path))]
        places = [place for place, other in enumerate(turns) if other.path in above]
        parents.append(max(places, key=lambda place: len(turns[place].path), default=None))

    def total(place: int) -> float:
        below = [total(child) for child, parent in enumerate(parents) if parent == place]
        own = float(turns[place].reward) - float(costs[place].sum())
        return own + (gamma * sum(below) / len(below) if below else 0.0)

    return [total(place) for place in range(len(turns))]


def turn_returns(step: Any, gamma: float = 1.0, divide_by_std: bool = True) -> None:
    for episode in step.episodes:
        indices = [turn.turn_idx for turn in episode.sequences]
        episode.turns = list(zip(indices, _turn_totals(episode, gamma), strict=True))
    for members in step.groups():
        compared: dict[int, tuple[float, float]] = {}
        for index in {index for episode in members for index, _ in episode.turns}:
            visits = [[value for at, value in episode.turns if at == index] for episode in members]
            visits = [values for values in visits if values]
            means = [sum(values) / len(values) for values in visits]
            if len(visits) < 2:
                continue
            mean = means[0] if len({value for values in visits for value in values}) == 1 else sum(means) / len(means)
            squares = sum(sum((value - mean) ** 2 for value in values) / len(values) for values in visits)
            compared[index] = mean, math.sqrt(squares / (len(visits) - 1)) + 1e-6 if divide_by_std else 1.0
        for episode in members:
            advantages = []
            for (index, value), count in zip(episode.turns, episode.tokens_of, strict=True):
                mean, scale = compared.get(index, (value, 1.0))
                advantages += [(value - mean) / scale] * count
            episode.advantages = torch.tensor(advantages, dtype=torch.float64)


ESTIMATORS: dict[str, Callable[..., None]] = {
    estimate.__name__: estimate
    for estimate in (
        grpo, dr_grpo, grpo_passk, rloo, opo, gpg, reinforce_plus_plus_baseline, reinforce, reinforce_plus_plus,
        remax, gae, optimal_token_baseline, turn_grpo, turn_returns,
    )
}  # fmt: skip
