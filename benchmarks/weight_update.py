"""Seconds and bytes of a weight update, and what running answers lose, by way and server.

    python benchmarks/weight_update.py [--servers embedded sglang vllm] [--ways disk memory broadcast adapter]
        [--json FILE]

Each update happens while answers run. The ways take turns; adapters (rank 16) have a server of their own. *publish*
is the trainer's part, before it may train on; *update* lasts until the server serves the new weights; *stall* is the
longest time without a token in the answers. *lost* are tokens missing in the answers at their end; *again* are those
whose states were computed twice: prompt and tokens so far of each answer that an update met. SGLang and vLLM are
started from the environments of AREAL_LITE_SGLANG_PYTHON and AREAL_LITE_VLLM_PYTHON.

Medians of three updates (``--updates 3 --requests 2 --tokens 48``; vLLM's memory and broadcast with ``keep``: of two),
on two cores with nothing else to do, of SmolLM2-135M-Instruct in float32, on a CPU:

    server    way        pause  publish s  update s  stall s     MB  lost  again
    embedded  disk       abort       0.90      0.56     0.73  538.1     0     88
    embedded  memory     abort       0.24      0.22     0.40  538.1     0     88
    embedded  broadcast  abort       0.22      0.88     0.38  538.1     0    106
    embedded  adapter    abort       0.08      0.11     0.30   19.6     0     88
    embedded  disk       keep        1.46      0.57     0.72  538.1     0     88
    embedded  memory     keep        0.12      0.19     0.35  538.1     0     88
    embedded  broadcast  keep        0.22      0.80     0.37  538.1     0    106
    embedded  adapter    keep        0.09      0.11     0.32   19.6     0     88
    sglang    disk       abort       1.64      1.18     1.34  538.1     0     90
    sglang    memory     abort       0.28      1.16     1.31  538.1     0     90
    sglang    broadcast  abort       0.20      1.44     1.56  538.1     0     90
    sglang    adapter    abort       0.08      1.04     1.14   19.6     0     90
    sglang    disk       keep        2.05      0.20     0.39  538.1     0     88
    sglang    memory     keep        0.15      0.21     0.41  538.1     0     88
    sglang    broadcast  keep        0.26      0.56     0.76  538.1     0     88
    sglang    adapter    keep        0.08      0.33     0.22   19.6     0      0
    vllm      disk       abort       1.58      0.67     0.89  538.1     0     89
    vllm      memory     abort       0.25      0.65     0.85  538.1     0     89
    vllm      broadcast  abort       0.26      1.87     1.41  538.1     0    106
    vllm      adapter    abort       0.07      0.17     0.76   19.6     0     89
    vllm      disk       keep        1.88      0.71     0.78  538.1     0     89
    vllm      memory     keep        0.15      0.64     0.78  538.1     0     90
    vllm      broadcast  keep        0.26      2.34     1.35  538.1     0    114
    vllm      adapter    keep        0.08      0.17     0.71   19.6     0      0

A broadcast goes through gloo and the cores of both processes, and its server receives into a second copy: on one
machine ``memory`` is faster. What a broadcast saves is the file (*publish*); on the embedded server and vLLM, answers
stand still only while the weights are loaded, not while they are sent. SGLang's ``abort`` takes a second by itself.
Adapters are a 27th of the bytes; with ``keep``, SGLang and vLLM finish running answers on the adapters that they
began with.
"""

from __future__ import annotations
import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.config.trainer_config import AdapterShape, LoRAConfig
from areal_lite.models.lora import adapter_shape
from areal_lite.models.policy_model import load_policy
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.servers.programs.server_process import ServerProcess
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightBroadcast
from areal_lite.servers.weights.publisher import Publish, weight_publisher
from benchmarks.report import Figure, make_parser, write_figures
from tests.fixtures.tiny_model import build_tiny_model

MODEL = "runs/models/SmolLM2-135M-Instruct"
PROMPT = [1, *range(100, 139)]


@dataclass(frozen=True)
class Update:
    """Figures of one update; of a row, their medians."""

    publish_s: float
    update_s: float
    stall_s: float
    megabytes: float
    tokens_lost: float
    tokens_again: float


class Answers:
    """Answers that run while the weights change."""

    def __init__(self, engine: RemoteInfEngine, count: int, num_tokens: int) -> None:
        self._count, self._num_tokens = count, num_tokens
        self._arrivals: list[list[float]] = [[] for _ in range(count)]
        gconfig = GenerationHyperparameters(max_new_tokens=num_tokens, ignore_eos=True)
        self._tasks = [
            asyncio.create_task(
                engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig, on_tokens=self._receiver(number)))
            )
            for number in range(count)
        ]

    def _receiver(self, number: int) -> Any:
        def receive(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
            self._arrivals[number].append(time.perf_counter())

        return receive

    async def begun(self) -> None:
        """Return once each has three parts."""
        while min(map(len, self._arrivals)) < 3:  # noqa: ASYNC110 -- not worth a condition
            await asyncio.sleep(0.001)

    async def figures(self) -> tuple[float, int, int]:
        """Return the longest stall in seconds, the tokens lost, and those computed again."""
        answers: list[ModelResponse] = await asyncio.gather(*self._tasks)
        stall = max(after - before for times in self._arrivals for before, after in zip(times, times[1:], strict=False))
        lost = sum(self._num_tokens - answer.output_len for answer in answers)
        met = [answer for answer in answers if len(set(answer.output_versions)) > 1]
        again = sum(len(PROMPT) + answer.output_versions.index(answer.output_versions[-1]) for answer in met)
        return stall, lost, again


async def measure(engine: RemoteInfEngine, publish: Publish, version: int, args: argparse.Namespace) -> Update:
    began = time.perf_counter()
    weights = await asyncio.to_thread(publish, version)
    publish_s = time.perf_counter() - began
    answers = Answers(engine, args.requests, args.tokens)
    await answers.begun()
    began = time.perf_counter()
    await engine.aupdate_weights(weights)
    update_s = time.perf_counter() - began
    stall, lost, again = await answers.figures()
    fresh = GenerationHyperparameters(max_new_tokens=4, ignore_eos=True)
    answer = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=fresh))
    if set(answer.output_versions) != {version}:
        raise SystemExit(f"the server answers with {answer.output_versions} after an update to {version}")
    return Update(publish_s, update_s, stall, num_bytes(weights) / 1e6, lost, again)


def num_bytes(weights: PublishedWeights) -> int:
    """Return the bytes that a server reads or receives."""
    if isinstance(weights, WeightBroadcast):
        return sum(tensor.nbytes for bucket in weights.buckets for tensor in bucket.tensors.values())
    return sum(file.stat().st_size for file in Path(weights.path).rglob("*.safetensors"))


def load_model(args: argparse.Namespace, *, adapted: bool) -> Any:
    """Return the model to publish, with random adapters if its adapters are."""
    if not adapted:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = load_policy(args.model, device=torch.device("cpu"), lora=LoRAConfig())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.01)
    return model


def start(kind: str, args: argparse.Namespace, folder: Path, adapters: AdapterShape | None) -> ServerProcess:
    if kind == "embedded":
        return EmbeddedServer(model_path=args.model, dtype=args.dtype, num_threads=1, device="cpu")
    from tests.real_servers.launch import real_process

    return real_process(kind, Path(args.model).absolute(), folder, adapters=adapters)  # in float32


def rows(kind: str, ways: list[str], args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the median figures of each way and pause mode on one server."""
    adapted = ways == ["adapter"]
    model = load_model(args, adapted=adapted)
    kept: dict[tuple[str, str], list[Update]] = {}
    version = 0
    with ExitStack() as stack:
        server = stack.enter_context(start(kind, args, folder / "logs", adapter_shape(model) if adapted else None))
        publishers: dict[str, Publish] = {}
        for way in ways:
            config = InferenceEngineConfig(weight_update=way)
            publisher = weight_publisher(config, model, folder / kind / way, getattr(torch, args.dtype))
            publishers[way] = stack.enter_context(publisher)
        for pause in args.pauses:
            config = InferenceEngineConfig(addresses=[server.address], backend=kind, weight_update_pause=pause)
            with RemoteInfEngine(config) as engine:
                for round_number in range(args.updates + 1):
                    for way in ways:
                        version += 1
                        with torch.no_grad():
                            for parameter in model.parameters():
                                if parameter.requires_grad:
                                    parameter.mul_(1.0001)
                        figures = asyncio.run(measure(engine, publishers[way], version, args))
                        print(kind, way, pause, round_number, figures, file=sys.stderr, flush=True)
                        if round_number:  # the first opens groups and files
                            kept.setdefault((way, pause), []).append(figures)
    return [
        {"server": kind, "way": way, "pause": pause}
        | {name.name: statistics.median(getattr(one, name.name) for one in updates) for name in fields(Update)}
        for (way, pause), updates in kept.items()
    ]


def table(measured: list[dict[str, Any]]) -> str:
    lines = [
        "| server | way | pause | publish s | update s | stall s | MB | lost | again |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in measured:
        lines.append(
            f"| {row['server']} | {row['way']} | {row['pause']} | {row['publish_s']:.2f} | {row['update_s']:.2f} "
            f"| {row['stall_s']:.2f} | {row['megabytes']:.1f} | {row['tokens_lost']:.0f} | {row['tokens_again']:.0f} |"
        )
    return "\n".join(lines)


def _figures(measured: list[dict[str, Any]]) -> list[Figure]:
    units = {"publish_s": "s", "update_s": "s", "stall_s": "s", "megabytes": "MB"}
    return [
        Figure(f"{row['server']}, {row['way']}, {row['pause']}: {name.removesuffix('_s')}", row[name], unit)
        for row in measured
        for name, unit in units.items()
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--servers", nargs="+", default=["embedded", "sglang", "vllm"])
    parser.add_argument("--ways", nargs="+", default=["disk", "memory", "broadcast", "adapter"])
    parser.add_argument("--pauses", nargs="+", default=["abort", "keep"])
    parser.add_argument("--updates", type=int, default=5, help="of each way and pause mode, after one to warm up")
    parser.add_argument("--requests", type=int, default=4, help="answers that run at once")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each answer")
    args = parser.parse_args()
    if args.smoke:
        args.servers, args.updates, args.requests, args.tokens = ["embedded"], 1, 2, 96
    torch.set_num_threads(1)
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.model = str(build_tiny_model(Path(folder) / "model"))
        for kind in args.servers:
            whole = [way for way in args.ways if way != "adapter"]
            for ways in filter(None, (whole, ["adapter"] if "adapter" in args.ways else [])):
                measured += rows(kind, ways, args, Path(folder))
                write_figures(args.json, _figures(measured))
    print(table(measured))


if __name__ == "__main__":
    main()
