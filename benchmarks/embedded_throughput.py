"""Tokens per second of the embedded server against ``model.generate`` and transformers' continuous batching.

One run measures all three on the same model, threads and prompts, since only their ratio means something on a
shared machine:

* ``generate``: ``model.generate`` on a static batch, all prompts there from the start, sampling at temperature 1.
* ``continuous``: ``model.generate_batch`` of transformers, with all requests there from the start.
* ``embedded``: our server as a child process, over HTTP, with ``--batch`` requests in flight: Poisson arrivals until
  the batch is full, then a new request for each that ended. All requests sent count, their prefill included.
* ``embedded, groups``: the same, but each prompt is sent ``--group`` times, as GRPO does.

    python benchmarks/embedded_throughput.py --model DIR --threads 1 --batch 64 --new-tokens 64
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import time

import aiohttp

from areal_lite.embedded import EmbeddedServer


async def embedded(
    address: str, prompts: list[list[int]], *, in_flight: int, new_tokens: int, arrival_s: float
) -> float:
    """Return seconds from the first request to the last reply."""
    arrivals = random.Random(1)
    room = asyncio.Semaphore(in_flight)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: list[int]) -> None:
            params = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 1.0}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(f"{address}/generate", json=body) as response:
                reply = await response.json()
                assert reply["meta_info"]["completion_tokens"] == new_tokens, reply
            room.release()

        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                await room.acquire()
                tasks.create_task(one(prompt))
                await asyncio.sleep(arrivals.expovariate(1 / arrival_s))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="batches sent to the embedded server")
    parser.add_argument("--skip-continuous", action="store_true")
    args = parser.parse_args()

    draw = random.Random(0)
    lengths = [draw.randint(args.prompt_tokens // 2, args.prompt_tokens * 3 // 2) for _ in range(args.batch)]
    prompts = [[draw.randrange(100, 5000) for _ in range(length)] for length in lengths]
    rounds = [[draw.randrange(100, 5000) for _ in p] for _ in range(args.rounds) for p in prompts]
    groups = [prompt for prompt in rounds[:: args.group] for _ in range(args.group)]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, {args.dtype}")

    server = EmbeddedServer(
        model_path=args.model,
        dtype=args.dtype,
        num_threads=args.threads,
        max_running_requests=args.batch,
        device="cpu",
    )
    figures = {}
    with server:
        for name, sent in (("embedded", rounds), ("embedded, groups", groups)):
            seconds = asyncio.run(
                embedded(server.address, sent, in_flight=args.batch, new_tokens=args.new_tokens, arrival_s=0.01)
            )
            figures[name] = len(sent) * args.new_tokens / seconds

    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    sampling = {"max_new_tokens": args.new_tokens, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    width = max(lengths)
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        start = time.perf_counter()
        model.generate(padded, attention_mask=mask, min_new_tokens=args.new_tokens, **sampling)
        figures["generate"] = args.batch * args.new_tokens / (time.perf_counter() - start)
    if not args.skip_continuous:
        config = GenerationConfig(**sampling, eos_token_id=-1, temperature=1.0)
        start = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False)
        count = sum(len(output.generated_tokens) for output in outputs.values())
        figures["continuous"] = count / (time.perf_counter() - start)
    for name, figure in figures.items():
        print(f"{name:18} {figure:8.1f} tokens/s  {figure / figures['generate']:5.2f} of generate")


if __name__ == "__main__":
    main()
