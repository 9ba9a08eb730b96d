"""A workflow file written for AReaL runs after `areal` became `areal_lite` in its imports."""

from __future__ import annotations

import uuid
from typing import Any

import torch

from areal_lite import workflow_context
from areal_lite.agents import ArealOpenAI
from areal_lite.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.infra.remote_inf_engine import GroupedRolloutWorkflow, RemoteInfEngine
from tests.stub_server import StubServer, StubThread


def reward_fn(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    """Reward by the number of tokens."""
    return float(len(completion_ids) == data["length"])


class Tokenizer:
    """As much of a tokenizer as the workflow uses."""

    eos_token_id, pad_token_id = 2, 0

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> list[int]:
        """Return the bytes of the messages."""
        return [b + 3 for m in messages for b in m["content"].encode()]

    def decode(self, ids: list[int]) -> str:
        """Return the ids as text."""
        return " ".join(map(str, ids))


class RLVRWorkflow(RolloutWorkflow):
    """The shape of AReaL's single-turn workflow."""

    def __init__(self, reward_fn: Any, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self.tokenizer = tokenizer
        self.async_reward_fn = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Ask once."""
        input_ids = self.tokenizer.apply_chat_template(data["messages"], tokenize=True, add_generation_prompt=True)
        req = ModelRequest(rid=uuid.uuid4().hex, input_ids=input_ids, gconfig=self.gconfig, tokenizer=self.tokenizer)
        resp = await engine.agenerate(req)
        assert workflow_context.stat_scope() == "rollout"
        assert workflow_context.get().task_id is not None
        reward = await self.async_reward_fn(
            self.tokenizer.decode(input_ids),
            self.tokenizer.decode(resp.output_tokens),
            resp.input_tokens,
            resp.output_tokens,
            **data,
        )
        res = {
            "input_ids": torch.tensor(resp.input_tokens + resp.output_tokens, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * resp.input_len + [1] * resp.output_len, dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * resp.input_len + resp.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * resp.input_len + resp.output_versions, dtype=torch.int32),
            "attention_mask": torch.ones(resp.input_len + resp.output_len, dtype=torch.bool),
            "rewards": torch.tensor(reward, dtype=torch.float32),
        }
        return {k: v.unsqueeze(0) for k, v in res.items()}


def test_an_areal_workflow_runs_with_its_imports_renamed() -> None:
    with StubThread(StubServer(answer_len=5)) as stub:
        config = InferenceEngineConfig(backend="sglang", addresses=[stub.address])
        with RemoteInfEngine(config) as engine:
            rows = [{"messages": [{"role": "user", "content": "hi"}], "length": n} for n in (5, 6)]
            results = engine.rollout_batch(
                rows,
                workflow=RLVRWorkflow,
                workflow_kwargs={
                    "reward_fn": reward_fn,
                    "gconfig": GenerationHyperparameters(max_new_tokens=8),
                    "tokenizer": Tokenizer(),
                },
                group_size=2,
            )
    assert [r.rewards for r in results] == [[1.0, 1.0], [0.0, 0.0]], [r.error for r in results]
    assert ArealOpenAI is not None and GroupedRolloutWorkflow is not None
