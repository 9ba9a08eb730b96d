"""Run episodes without training: a custom workflow with four episodes per row.

python examples/01_engine_and_workflow.py [MODEL_FOLDER]
"""

from __future__ import annotations
import sys
from typing import Any
import torch
from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.data import load_tokenizer
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer


class ContinueText(RolloutWorkflow):
    """Continue a text; the reward is the share of distinct tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.gconfig = GenerationHyperparameters(max_new_tokens=16)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        prompt = self.tokenizer.encode(data["text"])
        answer = await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=self.gconfig))
        prompt_len, answer_len = answer.input_len, answer.output_len
        return {
            "input_ids": torch.tensor([answer.input_tokens + answer.output_tokens]),
            "attention_mask": torch.ones(1, prompt_len + answer_len, dtype=torch.bool),
            "loss_mask": torch.tensor([[0] * prompt_len + [1] * answer_len]),
            "logprobs": torch.tensor([[0.0] * prompt_len + answer.output_logprobs]),
            "versions": torch.tensor([[-1] * prompt_len + answer.output_versions]),
            "rewards": torch.tensor([len(set(answer.output_tokens)) / answer_len]),
        }


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct") -> None:
    tokenizer = load_tokenizer(model_path)
    rows = [{"text": text} for text in ("Once upon a time", "The sea is", "Two plus two")]
    with EmbeddedServer(model_path=model_path) as server:
        config = InferenceEngineConfig(addresses=[server.address])
        with RemoteInfEngine(config) as engine:
            for group in engine.rollout_batch(rows, ContinueText(tokenizer), group_size=4):
                assert group.trajectory is not None, group.error  # the group's tensor dict
                shape = list(group.trajectory["input_ids"].shape)
                print(f"{group.data['text']!r}: {group.status}, ids {shape}, rewards {group.rewards}")


if __name__ == "__main__":
    main(*sys.argv[1:])
