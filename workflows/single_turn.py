"""The simplest workflow: one prompt, one answer, one reward, using the engine directly."""

from __future__ import annotations
from collections.abc import Callable
from typing import Any
import torch
from areal_lite.api import (
    AsyncRewardWrapper,
    GenerationHyperparameters,
    InferenceEngine,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.data import load_tokenizer

NOT_PASSED = ("prompt", "completion", "prompt_ids", "completion_ids", "raw_prompt_ids")
"""Keys of the row that a reward function does not get by name."""


class SingleTurnWorkflow(RolloutWorkflow):
    """Ask one question per row.

    A run prepares the prompt in the column ``prompt_key`` as the dataset section says. Otherwise a row has
    ``messages``, or a text in ``prompt`` or ``question``.

    Args:
        reward_fn: ``reward_fn(prompt, completion, prompt_ids, completion_ids, **row)``, or its dotted path; ``row``
            is the dataset row without these four names. Returns a number, a number for each token of
            ``completion_ids``, or a dict with either as ``score`` and with other facts to record.
        gconfig: Sampling parameters.
        tokenizer: A Hugging Face tokenizer, or its path.
        system_prompt: System message before a row's text.
        enable_thinking: Passed to the chat template.
    """

    takes_prompt_ids = True

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters | dict[str, Any],
        tokenizer: Any,
        system_prompt: str | None = None,
        enable_thinking: bool = False,
    ) -> None:
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        gconfig = GenerationHyperparameters(**gconfig) if isinstance(gconfig, dict) else gconfig
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer)
        self.reward = AsyncRewardWrapper(reward_fn)
        self.system_prompt = system_prompt
        self.enable_thinking = enable_thinking

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        prompt_ids = data.get("raw_prompt_ids") or self._prompt_ids(data)
        response = await engine.agenerate(
            ModelRequest(input_ids=prompt_ids, gconfig=self.gconfig, tokenizer=self.tokenizer)
        )
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        prompt = self.tokenizer.decode(prompt_ids)
        row = {key: value for key, value in data.items() if key not in NOT_PASSED}
        reward = await self.reward(prompt, completion, prompt_ids, response.output_tokens, **row)

        prompt_len, answer_len = response.input_len, response.output_len
        if isinstance(reward, list):  # one for each token of the answer
            rewards = {"token_rewards": torch.tensor([[0.0] * prompt_len + reward], dtype=torch.float32)}
        else:
            rewards = {"rewards": torch.tensor([reward], dtype=torch.float32)}
        return rewards | {
            "input_ids": torch.tensor([response.input_tokens + response.output_tokens], dtype=torch.int32),
            "attention_mask": torch.ones(1, prompt_len + answer_len, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt_len + [1] * answer_len], dtype=torch.int32),
            "logprobs": torch.tensor([[0.0] * prompt_len + response.output_logprobs], dtype=torch.float32),
            "versions": torch.tensor([[-1] * prompt_len + response.output_versions], dtype=torch.int32),
        }

    def _prompt_ids(self, data: dict[str, Any]) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages_of(data, self.system_prompt),
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=self.enable_thinking,
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def messages_of(row: dict[str, Any], system_prompt: str | None) -> list[dict[str, Any]]:
    """Return the initial messages of a row."""
    if "messages" in row:
        return list(row["messages"])
    for key in ("prompt", "question"):
        if isinstance(row.get(key), str):
            system = [{"role": "system", "content": system_prompt}] if system_prompt else []
            return [*system, {"role": "user", "content": row[key]}]
    raise ValueError(f"the row has {sorted(row)}: it needs 'messages', or a text in 'prompt' or 'question'")
