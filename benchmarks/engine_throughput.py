"""Episodes per second and CPU per episode of the engine, against a bare aiohttp loop that does the same work.

Both send the same requests over keep-alive connections to the same stub server (a process of its own)
and build the same six tensors of each answer; the bare loop has no gate, no checks, no records. Rounds
alternate between the two, and a third with dumping on. Printed are the medians, and those of the rounds' ratios.

    python benchmarks/engine_throughput.py [--episodes 32000] [--in-flight 256] [--rounds 3]

Bars: episodes/s >= 0.85 and CPU per episode <= 1.25 of the bare loop; dumping costs <= 10 % of episodes/s.
docs/benchmarks.md has the figures and the machine they are from.
"""

from __future__ import annotations
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
import aiohttp
import orjson
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from benchmarks.report import Figure, make_parser, write_figures

PROMPT = list(range(1, 129))
SOCKETS = 512


def tensors(prompt: list[int], tokens: list[int], logprobs: list[float], versions: list[int]) -> dict[str, Any]:
    """Return the row both sides build."""
    length, sampled = len(prompt) + len(tokens), len(tokens)
    head = length - sampled
    return {
        "input_ids": torch.tensor([prompt + tokens], dtype=torch.int32),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] * head + [1] * sampled], dtype=torch.int32),
        "logprobs": torch.tensor([[0.0] * head + logprobs], dtype=torch.float32),
        "versions": torch.tensor([[-1] * head + versions], dtype=torch.int32),
        "rewards": torch.tensor([1.0], dtype=torch.float32),
    }


class OneCall(RolloutWorkflow):
    """What the bare loop does, as a workflow."""

    gconfig = GenerationHyperparameters(max_new_tokens=64)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        """Ask once and build the row."""
        response = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=self.gconfig))
        return tensors(PROMPT, response.output_tokens, response.output_logprobs, response.output_versions)


async def bare_loop(url: str, episodes: int, in_flight: int) -> int:
    """Run the same requests with as little as possible around them; return how many rows were built."""
    body = orjson.dumps(
        {
            "input_ids": PROMPT,
            "sampling_params": {"max_new_tokens": 64, "temperature": 1.0},
            "return_logprob": True,
            "stream": False,
        }
    )
    rows: list[dict[str, Any]] = []
    left = iter(range(episodes))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=SOCKETS)) as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as reply:
                    answer = orjson.loads(await reply.read())
                pairs = answer["meta_info"]["output_token_logprobs"]
                tokens, logprobs = [p[1] for p in pairs], [p[0] for p in pairs]
                rows.append(tensors(PROMPT, tokens, logprobs, [0] * len(tokens)))

        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(worker())
    return len(rows)


def bare_round(url: str, episodes: int, in_flight: int) -> int:
    """Run one round of the bare loop."""
    return asyncio.run(bare_loop(url, episodes, in_flight))


def timed(function: Callable[[], int], episodes: int) -> tuple[float, float, float]:
    """Return one round's episodes/s and CPU microseconds per episode, of this process and of the writer process."""
    wall, before = time.perf_counter(), os.times()
    assert function() == episodes
    wall, after = time.perf_counter() - wall, os.times()
    own, writer = sum(after[:2]) - sum(before[:2]), sum(after[2:4]) - sum(before[2:4])
    return episodes / wall, own / episodes * 1e6, writer / episodes * 1e6


def engine_round(address: str, episodes: int, in_flight: int, root: str | None = None) -> Callable[[], int]:
    """Return a round of the engine, its start and end and the last dump included; ``root`` is where it dumps."""

    def run() -> int:
        config = InferenceEngineConfig(
            backend="sglang",
            addresses=[address],
            max_concurrent_rollouts=in_flight,
            faults={"max_connections_per_server": SOCKETS},
            dump_to_file=root is not None,
            fileroot=root or "unused",
        )
        with RemoteInfEngine(config) as engine:
            results = engine.rollout_batch([{}] * episodes, OneCall)
        return sum(result.status == "accepted" for result in results)

    return run


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--episodes", type=int, default=32000, help="a round; the start of the writer's process is part of it"
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.smoke:
        args.episodes, args.in_flight, args.rounds = 64, [16], 1
    report = []
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # In memory: creating a file on a disk costs 20 to 600 us, by file system and by what else writes to it.
    dumps = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    stub = subprocess.Popen([sys.executable, str(Path(__file__).parents[1] / "tests/stub_server.py"), str(port)])
    try:
        wait_for(port)
        for in_flight in args.in_flight:
            episodes = max(args.episodes, 2 * in_flight)
            rounds = {
                "bare loop": partial(bare_round, f"http://127.0.0.1:{port}/generate", episodes, in_flight),
                "engine": engine_round(f"127.0.0.1:{port}", episodes, in_flight),
                "engine, dumping": engine_round(f"127.0.0.1:{port}", episodes, in_flight, dumps),
            }
            figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rounds}
            for number in range(args.rounds + 1):
                for name, run in rounds.items():
                    figure = timed(run, episodes)
                    if name == "engine, dumping":
                        assert sum(1 for _ in Path(dumps).rglob("*.jsonl")) == episodes
                        shutil.rmtree(dumps)
                    if number:  # the first round warms up
                        figures[name].append(figure)
            print(f"\n{episodes} episodes, {in_flight} in flight, {args.rounds} rounds")
            for name, values in figures.items():
                rate, cpu, writer = (statistics.median(column) for column in zip(*values, strict=True))
                ratio, cpu_ratio = (over(values, figures["bare loop"], column) for column in (0, 1))
                print(
                    f"{name:16} {rate:8.0f} episodes/s ({ratio:.2f})  {cpu:7.0f} us CPU ({cpu_ratio:.2f})"
                    + (f" and {writer:.0f} us of the writer" if writer else "")
                )
                report += [
                    Figure(f"{name}, {in_flight} in flight", rate, "episodes/s", ratio=ratio),
                    Figure(f"{name}, {in_flight} in flight: CPU per episode", cpu, "us", ratio=cpu_ratio),
                ]
            kept = over(figures["engine, dumping"], figures["engine"], 0)
            print(f"dumping costs {100 * (1 - kept):.0f} % of the engine's episodes/s")
        write_figures(args.json, report)
    finally:
        stub.kill()
        stub.wait()


def over(values: list[tuple[float, ...]], base: list[tuple[float, ...]], column: int) -> float:
    """Return the median ratio of the rounds: a machine's speed drifts from one round to the next."""
    return statistics.median(value[column] / other[column] for value, other in zip(values, base, strict=True))


def wait_for(port: int) -> None:
    """Return once the stub accepts connections."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit("the stub server did not start")


if __name__ == "__main__":
    main()
