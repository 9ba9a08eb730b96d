"""Streams of the embedded server, read by the engine's client: the tokens of a plain answer, as they are sampled."""

from __future__ import annotations
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import GenerationHyperparameters, ModelRequest
from tests.embedded.serving import engine_client, load, logprobs_of, serving, worst

PROMPT = list(b"The capital of France is")


def request(*, seed: int | None, on_tokens: Any = None, top_logprobs: int = 0, **sampling: Any) -> ModelRequest:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 40, "seed": seed} | sampling)
    return ModelRequest(input_ids=list(PROMPT), gconfig=gconfig, on_tokens=on_tokens, top_logprobs=top_logprobs)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"min_p": 0.02, "presence_penalty": 1.0},
        {"json_schema": '{"type":"array"}'},
    ],
)
def test_a_streamed_answer_equals_the_plain_one_token_by_token(tiny: Path, sampling: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving(tiny) as server, engine_client(server) as client:
            for seed in range(5):
                parts: list[list[int]] = []
                logprobs: list[float] = []

                def receive(
                    ids: Sequence[int], values: Sequence[float], parts: Any = parts, logprobs: Any = logprobs
                ) -> None:
                    parts.append(list(ids))
                    logprobs.extend(values)

                plain = await client.generate(request(seed=seed, top_logprobs=3, **sampling))
                streamed = await client.generate(request(seed=seed, on_tokens=receive, top_logprobs=3, **sampling))
                assert streamed.output_tokens == plain.output_tokens == [token for part in parts for token in part]
                assert streamed.output_logprobs == logprobs
                assert worst(logprobs, plain.output_logprobs) < 1e-5
                assert streamed.output_versions == plain.output_versions
                assert streamed.stop_reason == plain.stop_reason
                assert [[token for token, _ in top] for top in streamed.output_top_logprobs] == [
                    [token for token, _ in top] for top in plain.output_top_logprobs
                ]
                pieces.append(len(parts))

    pieces: list[int] = []
    asyncio.run(run())
    assert max(pieces) > 1  # as they are sampled, not all at the end


def test_top_logprobs_are_those_of_a_plain_forward(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as server, engine_client(server) as client:
            for temperature in (1.0, 0.5):
                answer = await client.generate(
                    request(
                        seed=3,
                        top_logprobs=4,
                        temperature=temperature,
                        logit_bias={70: 50.0},
                        max_new_tokens=3,
                    )
                )
                assert set(answer.output_tokens) == {70}  # the bias decides, and log-probs do not see it
                assert len(answer.output_top_logprobs) == 3
                model = load(tiny)
                assert (
                    worst(answer.output_logprobs, logprobs_of(model, PROMPT, answer.output_tokens, temperature)) < 1e-4
                )
                for place, top in enumerate(answer.output_top_logprobs):
                    before = answer.output_tokens[:place]
                    for token, logprob in top:
                        expected = logprobs_of(model, PROMPT, [*before, token], temperature)[-1]
                        assert abs(logprob - expected) < 1e-4
                    assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)

    asyncio.run(run())


def test_a_caller_that_leaves_frees_its_slot(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny, max_running_requests=1) as server, engine_client(server) as client:
            server.pace()
            started = asyncio.Event()
            endless = {"max_new_tokens": 200, "ignore_eos": True}
            answer = asyncio.ensure_future(
                client.generate(request(seed=0, on_tokens=lambda *_: started.set(), **endless))
            )
            await asyncio.wait_for(started.wait(), 20)
            assert len(server.scheduler.running) == 1
            before = server.scheduler.generated_tokens
            answer.cancel()
            # The only slot is taken until the stream ends, so this answer shows that it is free.
            assert len((await client.generate(request(seed=1, max_new_tokens=2, ignore_eos=True))).output_tokens) == 2
            assert not server.scheduler.running
            assert server.scheduler.generated_tokens - before < 150
            with pytest.raises(asyncio.CancelledError):
                await answer

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"ignore_eos": True},
        {"ignore_eos": True, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "stop": ["zq"]},
        {"regex": "([a-z]{3}[0-9]{4}){20}"},
    ],
)
def test_an_aborted_and_continued_answer_equals_the_uninterrupted_one(
    tiny: Path, sampling: dict[str, Any], streamed: bool
) -> None:
    async def run() -> None:
        async with serving(tiny) as server, engine_client(server) as client:
            sampling["max_new_tokens"] = 100
            whole = await client.generate(request(seed=5, **sampling))
            received: list[int] = []
            on_tokens = (lambda ids, _: received.extend(ids)) if streamed else None
            task = asyncio.ensure_future(client.generate(request(seed=5, on_tokens=on_tokens, **sampling)))
            steps = 0
            while not task.done() and steps < 3:
                running = [len(one.output_ids) for one in server.scheduler.running]
                if running and running[0] > 5:
                    steps += 1
                    client.gate.hold("trainer")
                    await server.call("/pause_generation", {"mode": "abort"})
                    await server.call("/continue_generation", {})
                    client.gate.release("trainer")
                await asyncio.sleep(0)
            answer = await task
            assert 1 < answer.attempts <= 1 + steps  # the last pause may come after the answer
            assert answer.output_tokens == whole.output_tokens
            assert worst(answer.output_logprobs, whole.output_logprobs) < 1e-4
            if streamed:
                assert received == answer.output_tokens

    asyncio.run(run())


def test_a_failed_step_is_an_error_of_the_stream(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as server, engine_client(server) as client:
            extend, failures = server.scheduler._extend, iter([True])

            def failing(requests: Any, logits: Any) -> None:
                if next(failures, False):
                    raise RuntimeError("out of memory")
                extend(requests, logits)

            server.scheduler._extend = failing  # type: ignore[method-assign]
            received: list[int] = []
            answer = await client.generate(request(seed=1, on_tokens=lambda ids, _: received.extend(ids)))
            assert (answer.attempts, received) == (2, answer.output_tokens)

    asyncio.run(run())
