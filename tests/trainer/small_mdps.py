"""Ten decision processes small enough to enumerate: policy gradients, and the exact expected updates of estimators."""

from __future__ import annotations
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import NamedTuple
import torch
from torch import Tensor
from areal_lite.trainer.estimators import Estimator, EstimatorInputs, Turns


class Outcome(NamedTuple):
    """What an action may lead to."""

    reward: float
    state: str | None = None
    """None: the episode ends."""
    probability: float = 1.0


class Step(NamedTuple):
    """One turn of an episode."""

    parameter: int
    """Place of its action's logit among all parameters."""
    reward: float


class Path(NamedTuple):
    """A whole episode, and how likely it is."""

    probability: float
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class MDP:
    """States with actions; the policy is a softmax over a state's logits. Episodes begin in the first state."""

    actions: Mapping[str, Sequence[Sequence[Outcome]]]
    logits: Mapping[str, Sequence[float]]
    """Of the actions in a state; a state without any has equal ones."""

    @property
    def parameters(self) -> list[tuple[str, int]]:
        """State and action of each parameter."""
        return [(state, action) for state, given in self.actions.items() for action in range(len(given))]

    def probabilities(self, state: str) -> list[float]:
        """Return the policy's probability of each action."""
        logits = self.logits.get(state, [0.0] * len(self.actions[state]))
        weights = [math.exp(logit) for logit in logits]
        return [weight / sum(weights) for weight in weights]

    def paths(self) -> list[Path]:
        """Return all episodes."""
        return list(self._paths(next(iter(self.actions))))

    def _paths(self, state: str | None) -> Iterator[Path]:
        if state is None:
            yield Path(1.0, ())
            return
        places = self.parameters
        for action, (chance, outcomes) in enumerate(zip(self.probabilities(state), self.actions[state], strict=True)):
            for outcome in outcomes:
                for rest in self._paths(outcome.state):
                    step = Step(places.index((state, action)), outcome.reward)
                    yield Path(chance * outcome.probability * rest.probability, (step, *rest.steps))

    def score_functions(self) -> Tensor:
        """Return ``[P, P]``, the gradient of each parameter's log-probability."""
        places = self.parameters
        rows = torch.zeros(len(places), len(places), dtype=torch.float64)
        for row, (state, action) in enumerate(places):
            for column, (other, choice) in enumerate(places):
                if other == state:
                    rows[row, column] = float(choice == action) - self.probabilities(state)[choice]
        return rows

    def gradient(self, gamma: float = 1.0) -> Tensor:
        """Return ``[P]``, the gradient of the expected return, each turn's part without the discount before it."""
        total, scores = torch.zeros(len(self.parameters), dtype=torch.float64), self.score_functions()
        for path in self.paths():
            for turn, step in enumerate(path.steps):
                later = sum(gamma**place * other.reward for place, other in enumerate(path.steps[turn:]))
                total += path.probability * later * scores[step.parameter]
        return total

    def blocks(self) -> list[list[int]]:
        """Return the parameters of each turn index."""
        found: dict[int, set[int]] = {}
        for path in self.paths():
            for turn, step in enumerate(path.steps):
                state = self.parameters[step.parameter][0]
                found.setdefault(turn, set()).update(
                    place for place, (other, _) in enumerate(self.parameters) if other == state
                )
        return [sorted(found[turn]) for turn in sorted(found)]


def expected_update(mdp: MDP, estimator: Estimator, *, group_size: int, **options: object) -> Tensor:
    """Return ``[P]``, the mean over all groups of the mean over their episodes of advantage times the gradient of the
    log-probability, summed over the turns. All turns have one token, so that credit is not a question of length."""
    paths = mdp.paths()
    groups = list(combinations_with_replacement(range(len(paths)), group_size))
    chances = [_chance(group, paths) for group in groups]
    inputs, steps = _inputs([[paths[place] for place in group] for group in groups])
    advantages = estimator(inputs, **options).advantages
    weights = torch.tensor(chances, dtype=torch.float64).repeat_interleave(group_size)[inputs.episodes] / group_size
    scores = mdp.score_functions()[torch.tensor([step.parameter for step in steps])]
    return ((advantages * weights)[:, None] * scores).sum(0)


def _chance(group: Sequence[int], paths: Sequence[Path]) -> float:
    """Return the probability of a group, in any order of its episodes."""
    orders = math.factorial(len(group))
    for place in set(group):
        orders //= math.factorial(group.count(place))
    return orders * math.prod(paths[place].probability for place in group)


def _inputs(groups: Sequence[Sequence[Path]]) -> tuple[EstimatorInputs, list[Step]]:
    episodes = [path.steps for group in groups for path in group]
    names = [str(number) for number, group in enumerate(groups) for _ in group]
    lengths = torch.tensor([len(steps) for steps in episodes])
    steps = [step for own in episodes for step in own]
    episode = torch.arange(len(episodes)).repeat_interleave(lengths)
    index = torch.tensor([turn for own in episodes for turn in range(len(own))])
    rewards = torch.tensor([step.reward for step in steps], dtype=torch.float64)
    scores = torch.zeros(len(episodes), dtype=torch.float64).index_add_(0, episode, rewards)
    token_rewards = torch.zeros_like(rewards)
    token_rewards[lengths.cumsum(0) - 1] = scores
    numbers = torch.arange(len(steps))
    turns = Turns(
        of_token=numbers,
        rewards=rewards,
        episodes=episode,
        index=index,
        parents=torch.where(index > 0, numbers - 1, -1),
    )
    inputs = EstimatorInputs(scores=scores, group_ids=names, episodes=episode, token_rewards=token_rewards, turns=turns)
    return inputs, steps


def sure(reward: float, state: str | None = None) -> list[Outcome]:
    """Return the only outcome of an action."""
    return [Outcome(reward, state)]


def coin(reward: float, chance: float, state: str | None = None) -> list[Outcome]:
    """Return two outcomes: the reward with this chance, else 0."""
    return [Outcome(reward, state, chance), Outcome(0.0, state, 1 - chance)]


STOP_OR_GO = MDP({"start": [sure(0.7), sure(0.5, "more")], "more": [sure(1.0), sure(0.0)]}, {})
"""Stop now for 0.7, or go on for 0.5 and another 0.5 expected."""

MDPS: dict[str, MDP] = {
    "stop or go": STOP_OR_GO,
    "better to stop": MDP(
        {"start": [sure(0.4), sure(0.5, "more")], "more": [sure(-0.6), sure(0.1)]},
        {"start": [0.3, -0.2], "more": [0.4, 0.0]},
    ),
    "only the end pays": MDP(
        {
            "start": [sure(0, "left"), sure(0, "right")],
            "left": [sure(1.0), sure(0.2)],
            "right": [sure(0.1), sure(0.0)],
        },
        {"start": [-0.5, 0.5], "left": [0.2, -0.1]},
    ),
    "a price first": MDP(
        {"start": [sure(0.0), sure(-0.3, "paid")], "paid": [sure(1.0), sure(0.4)]},
        {"start": [0.6, 0.0]},
    ),
    "a bait": MDP(
        {"start": [sure(0.3), sure(1.0, "trap")], "trap": [sure(-2.0), sure(-0.5)]},
        {"start": [0.0, 0.4], "trap": [0.3, 0.0]},
    ),
    "each turn costs": MDP(
        {
            "start": [sure(0.5), sure(-0.1, "second")],
            "second": [sure(0.5), sure(-0.1, "third")],
            "third": [sure(0.5), sure(0.8)],
        },
        {"second": [0.2, 0.0]},
    ),
    "four turns": MDP(
        {
            "start": [sure(0.6), sure(0.2, "second")],
            "second": [sure(0.1), sure(0.2, "third")],
            "third": [sure(0.0), sure(0.2, "fourth")],
            "fourth": [sure(0.9), sure(0.1)],
        },
        {"start": [0.5, 0.0], "third": [-0.3, 0.3]},
    ),
    "chance": MDP(
        {
            "start": [sure(0.45), [Outcome(0.1, "good", 0.5), Outcome(0.1, "bad", 0.5)]],
            "good": [sure(1.0), sure(0.5)],
            "bad": [sure(0.3), sure(-0.4)],
        },
        {"good": [0.1, -0.2]},
    ),
    "two ways to one place": MDP(
        {"start": [sure(0.2, "middle"), sure(0.0, "middle"), sure(0.6)], "middle": [coin(1.0, 0.7), sure(0.1)]},
        {"start": [0.0, 0.3, 0.1], "middle": [-0.2, 0.2]},
    ),
    "turns that do not touch": MDP(
        {"start": [sure(0.8, "next"), sure(0.3, "next")], "next": [sure(0.1), sure(0.9)]},
        {"start": [0.0, 0.4], "next": [0.2, 0.0]},
    ),
}
