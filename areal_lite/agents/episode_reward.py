"""Turn the return value of an agent's ``run()`` into rewards of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_lite.agents.session.chat_history import Interactions
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.reward_value import as_reward


def rewarded(
    session: ChatSession, reward: Any, weights: Mapping[str, float] | None = None, key: str | None = None
) -> tuple[Interactions, dict[str, float]]:
    """Return the sequences of an ended session with their rewards, and the parts of the reward by name.

    | ``run()`` returns | rewards |
    |---|---|
    | a number | the episode; all answers are trained as conversations |
    | a dict by completion id | these answers, each a sequence of its own; others are not trained |
    | a list with a number or None per answer, in order | the same, by index |
    | a dict by name of ``rollout.rewards.weights`` | the episode with the weighted sum |
    | a dict with ``rollout.rewards.key`` | the episode with that part; other parts may also be text |

    Raises:
        ValueError: If it is none of these.
    """
    if isinstance(reward, Mapping):
        if not reward:
            raise ValueError("run() returned an empty dict: return None to reject the episode")
        if key is not None and key in reward:
            total = as_reward(reward[key])
            numbers = {str(name): value for name, value in reward.items() if not isinstance(value, str | None)}
            return _of_episode(session, total), {name: as_reward(value) for name, value in numbers.items()}
        if weights and reward.keys() <= weights.keys():
            parts = {str(name): as_reward(value) for name, value in reward.items()}
            total = sum(weights[name] * value for name, value in parts.items())
            return _of_episode(session, as_reward(total)), parts
        return _of_answers(session, reward, weights), {}
    if isinstance(reward, Sequence) and not isinstance(reward, str | bytes):
        ids = list(session.interactions)
        if len(reward) != len(ids):
            raise ValueError(
                f"run() returned {len(reward)} rewards for {len(ids)} answers: return one number or None for each"
            )
        by_id = {key: value for key, value in zip(ids, reward, strict=True) if value is not None}
        if not by_id:
            raise ValueError("run() rewards no answer: return None to reject the episode")
        return _of_answers(session, by_id, weights), {}
    return _of_episode(session, as_reward(reward)), {}


def _of_episode(session: ChatSession, reward: float) -> Interactions:
    return {key: replace(answer, reward=reward) for key, answer in session.history.export("concat").items()}


def _of_answers(session: ChatSession, rewards: Mapping[Any, Any], weights: Mapping[str, float] | None) -> Interactions:
    answers = session.history.export("individual")
    if unknown := [key for key in rewards if key not in answers]:
        raise ValueError(
            f"run() rewards {unknown[0]!r}, which is not one of its completions: {list(answers)}; "
            f"rollout.rewards.weights names {list(weights) if weights else 'no parts of a reward'}"
        )
    return {key: replace(answer, reward=as_reward(rewards[key])) for key, answer in answers.items() if key in rewards}
