"""Clients that leave before an answer ends: what was sampled of it stays in the dump and in training."""

from __future__ import annotations
import asyncio
from pathlib import Path
from typing import Any
import numpy as np
import openai
import pytest
from transformers import AutoModelForCausalLM
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.agents.scripted_engine import ScriptedEngine, tokenizer
from tests.embedded.serving import serving, worst
from tests.embedded.test_images import EXACT
from tests.fixtures.tiny_model import build_tiny_model

MOST = 16_000
"""Tokens of an answer that takes a server seconds, however quick it is; its stream is closed after the first ones."""


class Leaves:
    """Closes its stream at the first text, then asks again with what it has read."""

    async def run(self, data: dict[str, Any], **access: Any) -> float:
        client = openai.AsyncOpenAI(**access)
        messages: list[Any] = [{"role": "user", "content": "Tell me all."}]
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        async for chunk in stream:
            if text := chunk.choices[0].delta.content:
                break
        await stream.close()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Why?"}]
        await client.chat.completions.create(model="m", messages=messages, max_tokens=3)
        return 1.0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_closed_stream_leaves_its_tokens_in_the_record(workers: int, tmp_path: Path) -> None:
    path = build_tiny_model(tmp_path / "model", context=MOST + 1000)

    async def play() -> Any:
        async with serving(path, context_length=MOST + 1000) as server:
            config = InferenceEngineConfig(
                backend="embedded",
                addresses=[server.address],
                tokenizer_path=str(path),
                fileroot=str(tmp_path),
                workers=workers,
                gconfig=GenerationHyperparameters(max_new_tokens=MOST, ignore_eos=True),
            )

            def run() -> Any:
                with RemoteInfEngine(config) as engine:
                    return engine.rollout_batch([{}], workflow=f"{__name__}.Leaves", group_size=1)

            return await asyncio.to_thread(run)

    (group,) = asyncio.run(play())
    assert group.rewards == [1.0], group.error
    (trajectory,) = group.trajectories
    answers = [turn for turn in trajectory.turns if turn.role == "assistant"]
    cut, whole = sorted(answers, key=lambda turn: turn.stop_reason == "length")  # the second may end first
    model = AutoModelForCausalLM.from_pretrained(path)

    assert (cut.stop_reason, whole.stop_reason) == ("abort", "length")
    assert 0 < len(cut.ids) < MOST
    assert cut.loss_mask.all() and whole.loss_mask.all()
    assert set(np.asarray(cut.versions).tolist()) == {0}
    assert cut.parent is not None
    before = np.concatenate([trajectory.turns[place].ids for place in trajectory.path_to(cut.parent)])
    logits = model(input_ids=_row(np.concatenate([before, cut.ids]))).logits[0, len(before) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, _row(cut.ids)[0][:, None])[:, 0]
    assert cut.logprobs is not None
    assert worst(cut.logprobs.tolist(), expected.tolist()) < EXACT
    assert trajectory.counts["cut_answers"] == 1
    assert trajectory.counts["answers"] == 2


def _row(ids: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(ids))[None].long()


class Slow(ScriptedEngine):
    """Samples until it is told to stop; ``sampled`` tokens have come by then."""

    def __init__(self, sampled: int, *, can_cut: bool = True) -> None:
        super().__init__([])
        self.sampled, self.can_cut, self.cut = sampled, can_cut, asyncio.Event()

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        self.requests.append(req)
        ids = self.tokenizer.encode("half", add_special_tokens=False)[: self.sampled]
        if req.on_tokens is not None:
            req.on_tokens(ids, [-1.0] * len(ids))
        await self.cut.wait()
        return ModelResponse(
            input_tokens=req.input_ids,
            output_tokens=ids,
            output_logprobs=[-1.0] * len(ids),
            output_versions=[4] * len(ids),
            stop_reason="abort",
            rid=req.rid,
        )

    async def cut_short(self, rid: str) -> bool:
        assert rid == self.requests[-1].rid
        self.cut.set()
        return self.can_cut


def times_out(engine: Slow, tmp_path: Path, *, stream: bool) -> Any:
    tokenizer().save_pretrained(tmp_path)

    async def run(data: dict[str, Any], **access: Any) -> float:
        client = openai.AsyncOpenAI(**access).with_options(timeout=0.05, max_retries=0)
        with pytest.raises(Exception, match="timed out|in time"):
            answer: Any = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "x"}], stream=stream
            )
            async for _ in answer:
                pass
        return 1.0

    class Agent:
        def __init__(self) -> None:
            self.run = run

    workflow = AgentWorkflow(Agent(), InferenceEngineConfig(tokenizer_path=str(tmp_path)))
    return asyncio.run(workflow.arun_episode(engine, {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_timed_out_at_the_client_trains_what_was_sampled(stream: bool, tmp_path: Path) -> None:
    engine = Slow(sampled=2)
    (answer,) = times_out(engine, tmp_path, stream=stream).values()

    assert answer.model_response.output_versions == [4, 4]
    assert answer.reward == 1.0


@pytest.mark.parametrize("engine", [Slow(sampled=0), Slow(sampled=2, can_cut=False)])
def test_an_answer_without_tokens_or_of_an_engine_that_cannot_cut_is_not_recorded(engine: Slow, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="called no model"):
        times_out(engine, tmp_path, stream=False)
