"""Steps with rewards per turn, built by hand or drawn by hypothesis."""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
import torch
from hypothesis import strategies as st
from areal_lite.trainer.estimators import EstimatorInputs, Turns


class RewardedTurn(NamedTuple):
    """One rewarded turn of an episode."""

    reward: float
    index: int
    parent: int = -1
    """Place among the episode's turns."""
    num_tokens: int = 1


Episode = tuple[str, Sequence[RewardedTurn]]
"""Group id and turns."""


def line(*rewards: float) -> list[RewardedTurn]:
    """Return turns that follow each other."""
    return [RewardedTurn(reward, index, index - 1) for index, reward in enumerate(rewards)]


def make_turn_step(episodes: Sequence[Episode], dtype: torch.dtype = torch.float64) -> EstimatorInputs:
    """Return a step of these episodes; an episode's score is the sum of its turns' rewards."""
    turns = [(number, turn) for number, (_, own) in enumerate(episodes) for turn in own]
    first = [sum(len(own) for _, own in episodes[:number]) for number in range(len(episodes))]
    counts = torch.tensor([turn.num_tokens for _, turn in turns])
    of_token = torch.arange(len(turns)).repeat_interleave(counts)
    of_turn = torch.tensor([number for number, _ in turns])
    scores = torch.tensor([sum(turn.reward for turn in own) for _, own in episodes], dtype=dtype)
    of_episode = of_turn[of_token]
    token_rewards = torch.zeros(len(of_token), dtype=dtype)
    ends = torch.ones(len(of_token), dtype=torch.bool)
    ends[:-1] = of_episode[1:] != of_episode[:-1]
    token_rewards[ends] = scores[of_episode[ends]]
    return EstimatorInputs(
        scores=scores,
        group_ids=[group for group, _ in episodes],
        episodes=of_episode,
        token_rewards=token_rewards,
        turns=Turns(
            of_token=of_token,
            rewards=torch.tensor([turn.reward for _, turn in turns], dtype=dtype),
            episodes=of_turn,
            index=torch.tensor([turn.index for _, turn in turns]),
            parents=torch.tensor([first[number] + turn.parent if turn.parent >= 0 else -1 for number, turn in turns]),
        ),
    )


def with_whole_turns(step: EstimatorInputs) -> EstimatorInputs:
    """Return the step with one rewarded turn per episode."""
    count = len(step.scores)
    turns = Turns(
        of_token=step.episodes,
        rewards=step.scores,
        episodes=torch.arange(count),
        index=torch.zeros(count, dtype=torch.int64),
        parents=torch.full((count,), -1),
    )
    return replace(step, turns=turns)


@st.composite
def turn_trees(draw: st.DrawFn) -> list[RewardedTurn]:
    """Draw the turns of one episode: a forest in which some model calls earned no reward."""
    turns: list[RewardedTurn] = []
    for place in range(draw(st.integers(1, 5))):
        parent = draw(st.integers(-1, place - 1))
        before = turns[parent].index + 1 if parent >= 0 else 0
        index = before + draw(st.integers(0, 1))
        turns.append(RewardedTurn(draw(st.integers(-4, 4)) / 7, index, parent, draw(st.integers(0, 3))))
    return turns


turn_episodes = st.lists(st.tuples(st.sampled_from("ab"), turn_trees()), min_size=1, max_size=6)
