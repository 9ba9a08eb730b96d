"""Groups whose episodes are trees of model calls, cut into sequences in any way."""

from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass, replace
import torch
from torch import Tensor
from areal_lite.api.io_struct import ModelResponse
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.api.turn_tree import trajectory_of


@dataclass(frozen=True)
class Call:
    """One model call of an episode."""

    parent: int
    """Place of the call it continues; -1: the prompt."""
    asked: list[int]
    """Tokens of the environment before it."""
    answer: list[int]
    joins: bool = False
    """Whether it lies in one sequence with the call before it, where it continues that one."""
    reward: float | None = None
    """None: the episode's."""


@dataclass(frozen=True)
class Episode:
    """Calls in depth-first order, and the reward."""

    calls: list[Call]
    reward: float

    def cut(self, joins: Sequence[bool]) -> Episode:
        """Return the episode cut into other sequences."""
        return Episode([replace(c, joins=j) for c, j in zip(self.calls, joins, strict=False)], self.reward)


def group_of(name: str, prompt: list[int], episodes: Sequence[Episode], *, baseline: float | None = None) -> Group:
    """Return the group of these episodes; each call is trained in one sequence."""
    return Group(
        task_id=name,
        group_id=name,
        status=EpisodeStatus.ACCEPTED,
        data={},
        trajectories=[
            trajectory_of(tensor_dict(prompt, episode), model_calls(prompt, episode), member_idx=place)
            for place, episode in enumerate(episodes)
        ],
        baseline=baseline,
    )


def model_calls(prompt: list[int], episode: Episode) -> list[ModelResponse]:
    """Return the calls as the engine recorded them."""
    made: list[ModelResponse] = []
    for place, call in enumerate(episode.calls):
        before = made[call.parent].input_tokens + made[call.parent].output_tokens if call.parent >= 0 else prompt
        made.append(
            ModelResponse(
                input_tokens=before + call.asked,
                output_tokens=call.answer,
                output_logprobs=[behaviour(token) for token in call.answer],
                output_versions=[1] * len(call.answer),
                rid=str(place),
            )
        )
    return made


def tensor_dict(prompt: list[int], episode: Episode) -> dict[str, Tensor]:
    """Return what a workflow would: one row per sequence, right-padded."""
    rows: list[tuple[list[int], list[int], float]] = []
    for place, (call, made) in enumerate(zip(episode.calls, model_calls(prompt, episode), strict=True)):
        mask = [0] * made.input_len + [1] * made.output_len
        if call.joins and place and call.parent == place - 1:
            earlier = rows.pop()[1]
            mask[: len(earlier)] = earlier
        reward = episode.reward if call.reward is None else call.reward
        rows.append((made.input_tokens + made.output_tokens, mask, reward))
    length = max(len(ids) for ids, _, _ in rows)
    ids, masks = (torch.tensor([row[at] + [0] * (length - len(row[at])) for row in rows]) for at in (0, 1))
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[at < len(row[0]) for at in range(length)] for row in rows]),
        "loss_mask": masks,
        "logprobs": torch.where(masks > 0, ids % 7 / 3 - 6.5, 0.0),
        "versions": torch.where(masks > 0, 1, -1),
        "rewards": torch.tensor([row[2] for row in rows], dtype=torch.float32),
    }


def behaviour(token: int) -> float:
    """Return a log-prob near those of the tiny model, so that ratios lie on both sides of every bound."""
    return token % 7 / 3 - 6.5


def line(count: int, *, joins: bool = False) -> list[Call]:
    return [Call(place - 1, [20 + place], [40 + place, 60 + place], joins) for place in range(count)]
