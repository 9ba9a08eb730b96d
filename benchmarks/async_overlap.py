"""Asynchronous training with slow episodes: step time, staleness, discarded tokens, and the share of slow rows.

A trainer thread sleeps ``--train-s`` per step while the engine generates against a stub server in the same process.
Batches have 8 groups of one episode. Workloads:

- ``tools``: two model calls of 20 ms; in 1 row of 8 a tool call of 0.6 s between them. Slow rows are those.
- ``lognormal``: one model call per episode, its length log-normal (sigma 1, median ``--median-s``); tokens
  proportional to seconds. Slow rows are the slowest quartile.
- ``fast``: one model call of half a train step, so that training is the bottleneck. No slow rows.

Each setting is a staleness bound and ``rollout.stale_groups``; bound 0 is synchronous training. ``generation`` is the
step time of the same setting with a train step of 0 s, measured in the same run. Printed per setting:

- ``step`` and ``ratio``: mean milliseconds per step, without the first 10, and that over the ideal
  ``max(train, generation)``;
- ``floor``: step time that no policy without discards can beat. An episode that starts with version ``v`` has to end
  before the batch of version ``v + bound``, so ``bound + 1`` steps last at least as long as the longest episode ``D``
  of a batch and one train step: ``(D + train) / (bound + 1)`` if all ``D`` are equal, and ``D / (bound + 1)`` without
  training. ``floor ratio`` is the ratio at that floor: it is above 1.1 where ``D`` is between ``bound`` and 10 train
  steps;
- ``slow 60`` and ``slow all``: percentage points between the share of slow rows among the trained groups and among the
  same number of rows of the data, over the first 60 steps and over all;
- ``discarded``: sampled tokens that grew too old to train, in percent of the sampled ones;
- staleness of the trained groups: mean, maximum, and the share at the bound.

    python benchmarks/async_overlap.py [--steps 60] [--jobs 6] [--workloads tools lognormal fast]

Bars with ``wait`` at bounds 1, 2 and 4: ratio <= 1.1, slow shares within 0.5 points, discarded < 2 %; in ``fast``
mean staleness <= 1 at bound 2. docs/benchmarks.md has figures.
"""

from __future__ import annotations
import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import NormalDist
from typing import Any
import torch
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import (
    GenerationHyperparameters,
    Group,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from benchmarks.report import Figure, make_parser, write_figures
from tests.rollout.scripted import tensors_of
from tests.stub_server import StubServer, StubThread

BATCH = 8
WARM_UP = 10
"""Steps that fill the pipeline."""
CALL_S = 0.02
TOOL_S = 0.6
TOKENS_PER_S = 500
Row = dict[str, Any]


class TimedServer(StubServer):
    """Takes as many milliseconds per answer as the first token of the prompt says."""

    async def _generating(self, body: dict[str, Any]) -> bool:
        await asyncio.sleep(body["input_ids"][0] / 1000)
        return False

    async def info(self, _: web.Request) -> web.Response:
        """Return the context length."""
        return web.json_response({"context_length": 2**20})


class Timed(RolloutWorkflow):
    """One model call, or two with a tool call between them."""

    async def arun_episode(self, engine: InferenceEngine, data: Row) -> dict[str, torch.Tensor]:
        """Run the row's calls and its tool."""
        call_s: float = data["call_s"]
        gconfig = GenerationHyperparameters(max_new_tokens=max(1, round(call_s * TOKENS_PER_S)))
        prompt = [max(1, round(call_s * 1000)), 2, 3]
        answers = [await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=gconfig))]
        if data["calls"] == 2:
            await asyncio.sleep(data["tool_s"])
            prompt = answers[0].input_tokens + answers[0].output_tokens + [2]
            answers.append(await engine.agenerate(ModelRequest(input_ids=prompt, gconfig=gconfig)))
        return tensors_of(*answers)


def rows_of(workload: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield rows for ever; every 8 rows hold the same number of slow ones, at random places."""
    rng = random.Random(1)
    normal = NormalDist()
    while True:
        if workload == "tools":
            block = [{"call_s": CALL_S, "calls": 2, "tool_s": TOOL_S * (n == 0), "slow": n == 0} for n in range(8)]
        elif workload == "lognormal":
            # One of each eighth of the distribution: the sample's shares are the distribution's.
            quantiles = [(n + rng.random()) / 8 for n in range(8)]
            seconds = [args.median_s * 2.718281828 ** normal.inv_cdf(q) for q in quantiles]
            block = [{"call_s": s, "calls": 1, "slow": q >= 0.75} for s, q in zip(seconds, quantiles, strict=True)]
        else:
            block = [{"call_s": args.train_s / 2, "calls": 1, "slow": False}] * 8
        rng.shuffle(block)
        yield from block


def length_of(row: Row) -> float:
    """Return the seconds that the row's episode takes."""
    return float(row["call_s"] * row["calls"] + row.get("tool_s", 0.0))


@dataclass(frozen=True)
class Setting:
    """What one run is."""

    workload: str
    bound: int
    stale_groups: str
    train_s: float


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    step_s: float
    slow_60: float
    slow_all: float
    discarded: float
    staleness: list[int]


def measure(args: argparse.Namespace, setting: Setting) -> Outcome:
    """Train ``args.steps`` steps."""
    torch.set_num_threads(1)
    # The stub does not report versions: the engine labels a whole answer with the version its request was sent at.
    with StubThread(TimedServer(answer_len=2**20, tell_version=False)) as stub:
        config = InferenceEngineConfig(
            backend="sglang",
            addresses=[stub.address],
            consumer_batch_size=BATCH,
            max_head_offpolicyness=setting.bound,
            stale_groups=setting.stale_groups,  # type: ignore[arg-type]
            faults={"max_empty_batches": 10**6},
        )
        with RemoteInfEngine(config) as engine:
            rows = rows_of(setting.workload, args)
            batches: list[list[Group]] = []
            staleness: list[int] = []
            began = [time.monotonic()]
            for version in range(args.steps):
                batches.append(engine.prepare_batch(rows, Timed))
                staleness += [version - (group.head_version or 0) for group in batches[-1]]
                if setting.train_s:
                    time.sleep(setting.train_s)
                engine.set_version(version + 1)
                began.append(time.monotonic())
            metrics = engine.rollout_metrics()
    trained = sum(s.num_trained_tokens for batch in batches for group in batch for s in group.sequences)
    return Outcome(
        step_s=(began[-1] - began[WARM_UP]) / (args.steps - WARM_UP),
        slow_60=slow_points(batches[:60], rows_of(setting.workload, args)),
        slow_all=slow_points(batches, rows_of(setting.workload, args)),
        discarded=100 * metrics["discarded_tokens"] / (trained + metrics["discarded_tokens"]),
        staleness=staleness,
    )


def slow_points(batches: list[list[Group]], rows: Iterator[Row]) -> float:
    """Return the share of slow rows among the trained ones minus that among as many rows of the data, in percent."""
    trained = [bool(group.data["slow"]) for batch in batches for group in batch]
    drawn = [bool(row["slow"]) for row, _ in zip(rows, trained, strict=False)]
    return 100 * (sum(trained) - sum(drawn)) / len(trained)


def floor_of(setting: Setting, args: argparse.Namespace) -> float:
    """Return the step time that no policy without discards can beat: the batch of a version starts when it begins."""
    rows = rows_of(setting.workload, args)
    ready, begins = [0.0] * setting.bound, [0.0]
    for _ in range(args.steps):
        ready.append(begins[-1] + max(length_of(next(rows)) for _ in range(BATCH)))
        begins.append(max(begins[-1], ready[len(begins) - 1]) + setting.train_s)
    return (begins[-1] - begins[WARM_UP]) / (args.steps - WARM_UP)


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--train-s", type=float, default=0.05)
    parser.add_argument("--median-s", type=float, default=0.15)
    parser.add_argument("--bounds", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workloads", nargs="+", default=["tools", "lognormal", "fast"])
    parser.add_argument("--policies", nargs="+", default=["wait", "redraw"])
    parser.add_argument("--jobs", type=int, default=6, help="settings measured at a time; they mostly sleep")
    args = parser.parse_args()
    if args.smoke:
        args.steps, args.workloads, args.bounds, args.policies, args.jobs = 13, ["fast"], [1], ["wait"], 1
    settings = [
        Setting(workload, bound, policy, train_s)
        for workload in args.workloads
        for bound, policy in [
            (0, "wait"),
            *((bound, policy) for bound in args.bounds for policy in args.policies),
        ]
        for train_s in (args.train_s, 0.0)
    ]
    if args.jobs == 1:
        outcomes = {setting: measure(args, setting) for setting in settings}
    else:
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
            outcomes = dict(zip(settings, pool.map(partial(measure, args), settings), strict=True))
    figures = []
    print(
        f"{args.steps} steps of {BATCH} groups, train step {args.train_s * 1000:.0f} ms\n"
        f"{'workload':9} {'bound':>5} {'stale':6} {'step ms':>8} {'generation':>10} {'ratio':>5} {'floor':>6} "
        f"{'floor ratio':>11} "
        f"{'slow 60':>7} {'slow all':>8} {'discarded':>9} {'staleness':>9} {'max':>3} {'at bound':>8}"
    )
    for setting in settings:
        if not setting.train_s:
            continue
        outcome = outcomes[setting]
        alone = replace(setting, train_s=0.0)
        alone_s, floor_s = outcomes[alone].step_s, floor_of(setting, args)
        ratio = outcome.step_s / max(setting.train_s, alone_s)
        name = f"{setting.workload}, bound {setting.bound}, {setting.stale_groups}"
        figures.append(Figure(name, outcome.step_s * 1000, "ms", ratio=ratio, limit=floor_s * 1000))
        at_bound = sum(s == setting.bound for s in outcome.staleness) / len(outcome.staleness)
        print(
            f"{setting.workload:9} {setting.bound:5} {setting.stale_groups:6} {outcome.step_s * 1000:8.1f} "
            f"{alone_s * 1000:10.1f} {ratio:5.2f} {floor_s * 1000:6.1f} "
            f"{floor_s / max(setting.train_s, floor_of(alone, args)):11.2f} "
            f"{outcome.slow_60:+7.2f} {outcome.slow_all:+8.2f} "
            f"{outcome.discarded:8.2f}% {statistics.mean(outcome.staleness):9.2f} {max(outcome.staleness):3} "
            f"{at_bound:8.1%}"
        )
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
