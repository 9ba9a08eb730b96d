"""Tokens and log-probs equal those of plain transformers, whatever else is in the batch."""

from __future__ import annotations
import asyncio
import random
from pathlib import Path
import pytest
import torch
from areal_lite.embedded.model_runner import ModelRunner
from tests.embedded.serving import load, logprobs_of, reported, serving, worst

PROMPT = list(b"What is the capital of France?")


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}, {}])
def test_logprobs_equal_a_plain_forward_before_filters(tiny: Path, params: dict[str, float]) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            reply = await client.generate(PROMPT, max_new_tokens=40, ignore_eos=True, **params)
            expected = logprobs_of(load(tiny), PROMPT, reply["output_ids"], params.get("temperature", 0.0))
            assert worst(reported(reply), expected) < 1e-4

    asyncio.run(run())


@torch.inference_mode()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_a_pass_may_begin_some_slots_and_extend_others(tiny: Path, order: list[int], compiled: bool) -> None:
    runner, model = ModelRunner(load(tiny), slots=4, context_length=40, compiled=compiled), load(tiny)
    texts, past = [PROMPT[:9], PROMPT[9:14], PROMPT[14:17]], [4, 0, 2]
    runner.forward([3, 1], [texts[0][:4], texts[2][:2]], [0, 0])
    slots, parts = [3, 0, 1], [ids[start:] for ids, start in zip(texts, past, strict=True)]
    logits = runner.forward(*([column[number] for number in order] for column in (slots, parts, past)))  # type: ignore[arg-type]
    for row, number in zip(logits, order, strict=True):
        assert torch.allclose(row, model(torch.tensor([texts[number]])).logits[0, -1], atol=1e-4)


def test_top_logprobs(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            params = {"max_new_tokens": 3, "ignore_eos": True}
            body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 2, "sampling_params": params}
            status, reply = await client.call("/generate", body)
            assert status == 200
            ids = reply["output_ids"]
            with torch.inference_mode():
                logits = load(tiny)(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
            values, tops = logits.log_softmax(-1).topk(2)
            for entries, expected, top in zip(
                reply["meta_info"]["output_top_logprobs"], values.tolist(), tops.tolist(), strict=True
            ):
                assert [entry[1] for entry in entries] == top
                assert worst([entry[0] for entry in entries], expected) < 1e-4

    asyncio.run(run())


def test_requests_that_arrive_at_random_equal_the_same_requests_one_by_one(tiny: Path) -> None:
    """Prompts share prefixes, repeat, end at different times and outnumber the slots of the batch."""
    draw = random.Random(0)
    stems = [[draw.randrange(3, 259) for _ in range(length)] for length in (5, 40, 90)]
    prompts = [draw.choice(stems) + [draw.randrange(3, 259)] * draw.randrange(4) for _ in range(40)]
    lengths = [draw.randrange(1, 30) for _ in prompts]

    async def run() -> None:
        async with serving(tiny, max_running_requests=6, max_prefill_tokens=128) as client:
            started: list[asyncio.Task[dict[str, object]]] = []
            async with asyncio.TaskGroup() as tasks:
                for prompt, length in zip(prompts, lengths, strict=True):
                    started.append(tasks.create_task(client.generate(prompt, max_new_tokens=length)))
                    for _ in range(draw.randrange(3)):  # lets the server run some steps in between
                        await client.call("/v1/loads")
            together = [task.result() for task in started]
        model = load(tiny)
        async with serving(tiny, max_running_requests=1) as client:
            for prompt, length, reply in zip(prompts, lengths, together, strict=True):
                await client.call("/flush_cache", {})
                alone = await client.generate(prompt, max_new_tokens=length)
                assert reply["output_ids"] == alone["output_ids"]
                assert alone["meta_info"]["cached_tokens"] == 0
                assert worst(reported(reply), logprobs_of(model, prompt, alone["output_ids"], 0.0)) < 1e-4
        assert sum(reply["meta_info"]["cached_tokens"] > 0 for reply in together) > 10  # type: ignore[index]

    asyncio.run(run())


def test_a_group_is_prefilled_once_and_the_next_turn_starts_from_the_last(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            await client.call("/pause_generation", {"mode": "in_place"})
            calls = [asyncio.create_task(client.generate(PROMPT, **sampling)) for _ in range(4)]
            while (await client.call("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] < 4:
                pass
            await client.call("/continue_generation", {})
            group = await asyncio.gather(*calls)
            assert sorted(one["meta_info"]["cached_tokens"] for one in group) == [0] + [len(PROMPT)] * 3
            model = load(tiny)
            for one in group:
                assert worst(reported(one), logprobs_of(model, PROMPT, one["output_ids"])) < 1e-4
            history = PROMPT + group[1]["output_ids"] + list(b"and then?")
            turn = await client.generate(history, max_new_tokens=8)
            assert turn["meta_info"]["cached_tokens"] >= len(PROMPT) + 7  # all but the last sampled token
            assert worst(reported(turn), logprobs_of(model, history, turn["output_ids"])) < 1e-4

    asyncio.run(run())


def test_a_seed_decides_the_tokens_in_any_batch(tiny: Path) -> None:
    async def run() -> None:
        params = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 7}
        async with serving(tiny, seed=1) as client:
            alone = await client.generate(PROMPT, **params)
            crowd = await asyncio.gather(
                *(client.generate(PROMPT[: 5 + i], temperature=1.0, max_new_tokens=10 + i) for i in range(8)),
                client.generate(PROMPT, **params),
                client.generate(PROMPT, **params | {"sampling_seed": 8}),
            )
            assert crowd[-2]["output_ids"] == alone["output_ids"] != crowd[-1]["output_ids"]

    asyncio.run(run())


def test_a_deterministic_server_gives_the_same_bits_alone_and_in_a_crowd(tiny: Path) -> None:
    """Prompts with and without a shared prefix, each with its own seed."""
    prompts = [PROMPT + [65 + i] * i for i in range(6)] + [list(b"Unlike the others."), PROMPT, PROMPT * 3]

    async def run() -> None:
        async def ask(number: int) -> tuple[list[int], list[float]]:
            length = 10 + 5 * number
            reply = await client.generate(
                prompts[number], sampling_seed=number, temperature=1.0, max_new_tokens=length, ignore_eos=True
            )
            return reply["output_ids"], reported(reply)

        async with serving(tiny, deterministic=True) as client:
            alone = [await ask(number) for number in range(len(prompts))]
            crowd = await asyncio.gather(*(ask(number) for number in reversed(range(len(prompts)))))
            assert crowd[::-1] == alone
        async with serving(tiny) as client:  # the tokens are the same without the setting
            faster = await asyncio.gather(*(ask(number) for number in range(len(prompts))))
            assert [ids for ids, _ in faster] == [ids for ids, _ in alone]

    asyncio.run(run())
