"""Delay of the episodes' event loop while agents hold prompts of 128k tokens.

    python benchmarks/long_prompts.py [--tokens 131072] [--episodes 8] [--turns 6] [--isolation process] [--model DIR]

Eight agents with the plain OpenAI SDK run at once in one engine against a stub server (a process of its own); each has
a first message of its own of so many tokens, and each further turn sends the whole history again with a short message.
Meanwhile another episode of the same engine sleeps 1 ms again and again: how late it wakes is the delay that every
other episode has, too. Beside it, the same agents with a short first message. Bar: 99 % of the delays <= 10 ms.
"""

from __future__ import annotations
import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
import numpy as np
from openai import AsyncOpenAI

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import GenerationHyperparameters, InferenceEngine, InferenceEngineConfig, RolloutWorkflow
from areal_lite.config.rollout_config import AgentsConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from benchmarks.engine_throughput import wait_for
from benchmarks.report import Figure, make_parser, write_figures

SLEEP_S = 0.001


class Reader:
    """Asks about a long text, turn after turn."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)
        messages: list[Any] = [{"role": "user", "content": data["text"]}]
        for turn in range(data["turns"]):
            completion = await client.chat.completions.create(model="default", messages=messages)
            messages += [completion.choices[0].message, {"role": "user", "content": f"Go on after part {turn}."}]
        return 1.0


class Probe(RolloutWorkflow):
    """Measures how late the loop wakes it, until it is told to stop."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.stopped = False

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        while not self.stopped:
            asked = time.perf_counter()
            await asyncio.sleep(SLEEP_S)
            self.delays.append(time.perf_counter() - asked - SLEEP_S)


def long_text(tokenizer: Any, tokens: int, seed: int) -> str:
    """Return words of about ``tokens`` tokens."""
    draw = random.Random(seed)
    words = [
        draw.choice(("alpha", "river", "seven", "quick", "brown", "stone", "window", "paper")) for _ in range(tokens)
    ]
    sample = " ".join(words[:1000])
    per_word = len(tokenizer.encode(sample, add_special_tokens=False)) / 1000
    return " ".join(words[: int(tokens / per_word)])


def delays(model: str, port: int, args: Any, tokens: int, folder: str) -> tuple[np.ndarray[Any, Any], float]:
    """Return the delays in seconds, and the seconds that the episodes took."""
    tokenizer = load_tokenizer(model)
    rows = [{"text": long_text(tokenizer, tokens, seed), "turns": args.turns} for seed in range(args.episodes)]
    probe = Probe()
    config = InferenceEngineConfig(
        backend="sglang",
        addresses=[f"127.0.0.1:{port}"],
        tokenizer_path=model,
        max_concurrent_rollouts=args.episodes + 1,
        gconfig=GenerationHyperparameters(max_new_tokens=64, max_tokens=2 * tokens + 100_000),
        agents=AgentsConfig(isolation=args.isolation),
        dump_to_file=True,
        fileroot=folder,
    )
    with RemoteInfEngine(config) as engine:
        engine.rollout_batch([{"text": "warms up", "turns": 1}], Reader)
        engine.submit({}, probe)
        began = time.perf_counter()
        try:
            results = engine.rollout_batch(rows, Reader)
        finally:
            probe.stopped = True
        seconds = time.perf_counter() - began
        engine.wait(1)
    assert [result.error for result in results] == [None] * args.episodes
    return np.array(probe.delays), seconds


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--isolation", choices=("inline", "thread", "process"), default="inline")
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            from tests.fixtures.tiny_model import build_tiny_model

            args.model, args.tokens, args.episodes, args.turns = str(build_tiny_model(Path(folder) / "m")), 500, 2, 2
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            port = listening.getsockname()[1]
        script = str(Path(__file__).parents[1] / "tests/stub_server.py")
        stub = subprocess.Popen([sys.executable, script, str(port), "--delay-s", "0.2", "--context-length", "1000000"])
        try:
            wait_for(port)
            figures = []
            for name, tokens in (("short prompts", 100), (f"prompts of {args.tokens:,} tokens", args.tokens)):
                late, seconds = delays(args.model, port, args, tokens, f"{folder}/{tokens}")
                half, most, worst = 1e3 * np.quantile(late, [0.5, 0.99, 1.0]).clip(1e-6)
                print(
                    f"{name:<28} {args.episodes} episodes x {args.turns} turns in {seconds:5.1f} s: loop late by "
                    f"{half:.2f} ms (median), {most:.1f} ms (99 %), {worst:.1f} ms (longest)"
                )
                figures += [Figure(f"{name}: delay, 99 %", most, "ms"), Figure(f"{name}: longest delay", worst, "ms")]
        finally:
            stub.kill()
            stub.wait()
        write_figures(args.json, figures)


if __name__ == "__main__":
    main()
