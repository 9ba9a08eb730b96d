"""Workflows with a known outcome."""

from __future__ import annotations
import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec
import torch
from areal_lite.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from areal_lite.rollout import workflow_context

P = ParamSpec("P")


def on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return run


def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Return once the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.005)


def tensors_of(*responses: ModelResponse, reward: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the row of one sequence whose turns are ``responses``; the last one's prompt holds all before it."""
    last = responses[-1]
    ids = last.input_tokens + last.output_tokens
    mask, logprobs, versions = [0] * len(ids), [0.0] * len(ids), [-1] * len(ids)
    for response in responses:
        span = slice(response.input_len, response.input_len + response.output_len)
        mask[span] = [1] * response.output_len
        logprobs[span] = response.output_logprobs
        versions[span] = response.output_versions
    return {
        "input_ids": torch.tensor([ids], dtype=torch.int32),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
        "loss_mask": torch.tensor([mask], dtype=torch.int32),
        "logprobs": torch.tensor([logprobs], dtype=torch.float32),
        "versions": torch.tensor([versions], dtype=torch.int32),
        "rewards": torch.tensor([reward], dtype=torch.float32),
    }


class OneTurn(RolloutWorkflow):
    """One call of the model; ``row["do"]`` says how it ends."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Run the script of the row."""
        do = data.get("do", "ok")
        if do == "raise":
            raise KeyError("broken agent")
        if do == "exit":
            raise SystemExit(3)
        if do == "self-cancel":
            raise asyncio.CancelledError
        if do == "hang":
            await asyncio.Event().wait()
        if do == "odd" and workflow_context.get().member_idx % 2:
            raise ValueError("odd member")
        if do == "bad":
            return {"input_ids": torch.zeros(3)}
        response = await engine.agenerate(ModelRequest(input_ids=data.get("ids", [1, 2, 3])))
        return None if do == "reject" else tensors_of(response, reward=float(data.get("reward", 1.0)))


class TwoTurns(RolloutWorkflow):
    """Answer, a token from the world, answer."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Run both turns."""
        first = await engine.agenerate(ModelRequest(input_ids=[1, 2, 3]))
        ids = first.input_tokens + first.output_tokens + [5, 6]
        second = await engine.agenerate(ModelRequest(input_ids=ids))
        return tensors_of(first, second)
