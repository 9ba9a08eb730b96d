"""Let the model retry after a wrong answer: one sequence of exact tokens, and a reward discounted per retry."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any
from areal_lite.agents import ArealOpenAI
from areal_lite.api import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    InteractionWithTokenLogpReward,
    RolloutWorkflow,
)
from areal_lite.data import load_tokenizer

NOT_PASSED = ("prompt", "completion", "prompt_ids", "completion_ids", "raw_prompt_ids")
"""Keys of the row that a reward function does not get by name."""
FEEDBACK = "Your answer is either wrong or not in the form asked for. Please try to answer it again."


class MultiTurnWorkflow(RolloutWorkflow):
    """Ask until the reward is above 0, at most ``max_turns`` times; all answers are trained.

    A run prepares the prompt in the column ``prompt_key`` as the dataset section says. Otherwise a row has
    ``messages``, or a text in ``prompt`` or ``question``.

    Args:
        reward_fn: ``reward_fn(prompt, completion, prompt_ids, completion_ids, **row)``, or its dotted path; ``row``
            is the dataset row without these four names. Returns a number, or a dict with it as ``score`` and with
            other facts to record.
        gconfig: Sampling parameters.
        tokenizer: A Hugging Face tokenizer, or its path.
        max_turns: Maximum number of answers.
        turn_discount: Factor on the reward for each answer after the first.
        system_prompt: System message before a row's text.
        feedback: User message after a wrong answer.
    """

    takes_prompt_ids = True

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        system_prompt: str | None = None,
        feedback: str = FEEDBACK,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}: it must be at least 1")
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.gconfig = GenerationHyperparameters(**gconfig) if isinstance(gconfig, dict) else gconfig
        self.reward = AsyncRewardWrapper(reward_fn)
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self.system_prompt = system_prompt
        self.feedback = feedback

    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> dict[str, InteractionWithTokenLogpReward]:
        prompt_ids = data.get("raw_prompt_ids")
        client = ArealOpenAI(engine, self.tokenizer, self.gconfig, prompt_ids=prompt_ids)
        messages: list[Any] = (
            [{"role": "user", "content": self.tokenizer.decode(prompt_ids)}]
            if prompt_ids
            else self._first_messages(data)
        )
        row = {key: value for key, value in data.items() if key not in NOT_PASSED}
        discount, reward = 1.0, 0.0
        for turn in range(self.max_turns):
            if turn:
                messages.append({"role": "user", "content": self.feedback})
                discount *= self.turn_discount
            completion = await client.chat.completions.create(messages=messages)
            answer = completion.choices[0].message
            messages.append(answer)
            response = client.get_interaction(completion.id).model_response
            prompt = self.tokenizer.decode(response.input_tokens)
            reward = await self.reward(
                prompt, answer.content or "", response.input_tokens, response.output_tokens, **row
            )
            if isinstance(reward, list):
                raise ValueError("the reward function rewards tokens one by one, and this workflow whole episodes")
            if reward > 0:
                break
        client.set_last_reward(reward * discount)
        return client.export_interactions(style="concat")

    def _first_messages(self, row: dict[str, Any]) -> list[Any]:
        if "messages" in row:
            return list(row["messages"])
        text = row.get("prompt", row.get("question"))
        if not isinstance(text, str):
            raise ValueError(f"the row has {sorted(row)}: it needs 'messages', or a text in 'prompt' or 'question'")
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": text}]
