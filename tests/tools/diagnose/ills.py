"""Agents and workflows with one ill each."""

from __future__ import annotations
from typing import Any
import torch
from openai import AsyncOpenAI
from areal_lite.api import GenerationHyperparameters, InferenceEngine, ModelRequest, RolloutWorkflow


class Healthy:
    """Rewards the share of lower-case letters among the characters: learnable from random weights."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return self.reward(await self.ask(data, **extra_kwargs))

    async def ask(self, data: dict[str, Any], **extra_kwargs: Any) -> str:
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        completion = await client.chat.completions.create(model="default", messages=messages)
        return completion.choices[0].message.content or ""

    def reward(self, text: str) -> float:
        return sum(c.islower() for c in text) / max(1, len(text))


class Constant(Healthy):
    def reward(self, text: str) -> float:
        return 0.5


class Zero(Healthy):
    def reward(self, text: str) -> float:
        return 0.0


class AlwaysRight(Healthy):
    def reward(self, text: str) -> float:
        return 1.0


class PaysForLength(Healthy):
    def reward(self, text: str) -> float:
        return len(text) / 24


class MaskOff(RolloutWorkflow):
    """Returns a loss mask that covers nothing."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        prompt = list(data["question"].encode())
        response = await engine.agenerate(
            ModelRequest(input_ids=prompt, gconfig=GenerationHyperparameters(max_new_tokens=8))
        )
        ids = torch.tensor([prompt + response.output_tokens])
        logprobs = torch.tensor([[0.0] * len(prompt) + response.output_logprobs])
        versions = torch.tensor([[response.output_versions[0]] * len(prompt) + response.output_versions])
        rewards = torch.tensor([sum(response.output_tokens) % 7 / 7])
        every = torch.ones_like(ids)
        mask = (torch.arange(ids.shape[1]) > 0)[None]
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "attention_mask": every,
            "logprobs": logprobs,
            "versions": versions,
            "rewards": rewards,
        }
