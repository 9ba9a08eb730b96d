"""Episodes per second of agents that burn CPU, by the number of rollout workers.

    python benchmarks/rollout_workers.py [--workers 1 2] [--episodes 400] [--burn-ms 20] [--rounds 3] [--ray] [--smoke]

Each episode burns ``--burn-ms`` milliseconds of CPU before and after one model call to a stub server, a process of its
own. Rounds alternate between the numbers of workers; the ratio is to the first number, and the limit is that number's
speed times the workers, at most one per core. A second set of rounds burns nothing: it shows what the way through the
workers costs an episode.

With ``--ray``, the last number of workers also runs on a Ray of this machine, over TCP, in the same rounds; and the
start of a run of a tiny model is timed until its first step, by turns without Ray and with it, beside ``ray.init``.

Bars: with 2 workers on 2 cores >= 0.85 of the limit; workers that Ray placed >= 0.95 of local ones; a start with Ray
takes at most as much longer as ``ray.init`` and 3 s.
"""

from __future__ import annotations
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngine,
    InferenceEngineConfig,
    InteractionWithTokenLogpReward,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.cluster.ray_places import RayPlaces, bundles_of, ray_places
from areal_lite.config.loader import load_config
from areal_lite.processes.place import Places, here
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from benchmarks.engine_throughput import wait_for
from benchmarks.report import Figure, make_parser, of_limit, write_figures
from tests.fixtures.tiny_model import build_tiny_model

PROMPT = list(range(1, 129))
IN_FLIGHT = 16


class Burns(RolloutWorkflow):
    """Computes, calls the model, computes."""

    gconfig = GenerationHyperparameters(max_new_tokens=64)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Run one episode."""
        burn(data["burn_s"] / 2)
        response = await engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=self.gconfig))
        burn(data["burn_s"] / 2)
        return {"answer": InteractionWithTokenLogpReward(model_response=response, reward=1.0)}


def burn(seconds: float) -> None:
    """Use this much CPU time of the thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def rate(address: str, workers: int, episodes: int, burn_s: float, places: Places = here) -> float:
    """Return episodes per second, once all workers have loaded the workflow."""
    config = InferenceEngineConfig(
        backend="sglang", addresses=[address], workers=workers, max_concurrent_rollouts=max(IN_FLIGHT, workers)
    )
    with RemoteInfEngine(config, places=places) as engine:
        engine.rollout_batch([{"burn_s": 0.0}] * 2 * workers, Burns)
        start = time.perf_counter()
        groups = engine.rollout_batch([{"burn_s": burn_s}] * episodes, Burns)
        seconds = time.perf_counter() - start
    assert all(group.status == "accepted" for group in groups)
    return episodes / seconds


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--episodes", type=int, default=400)
    parser.add_argument("--burn-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        args.episodes, args.burn_ms, args.rounds = 40, 2.0, 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stub = subprocess.Popen([sys.executable, str(Path(__file__).parents[1] / "tests/stub_server.py"), str(port)])
    figures: list[Figure] = []
    ray_rates: list[float] = []
    with ExitStack() as stack:
        stack.callback(stub.wait)
        stack.callback(stub.kill)
        wait_for(port)
        nodes = stack.enter_context(nodes_for(args.workers[-1], f"127.0.0.1:{port}")) if args.ray else None
        for burn_ms, episodes in ((args.burn_ms, args.episodes), (0.0, 5 * args.episodes)):
            rates: dict[int, list[float]] = {workers: [] for workers in args.workers}
            for _ in range(args.rounds):
                for workers, measured in rates.items():
                    measured.append(rate(f"127.0.0.1:{port}", workers, episodes, burn_ms / 1e3))
                if nodes is not None:
                    places = nodes.__getitem__
                    ray_rates.append(rate(f"127.0.0.1:{port}", args.workers[-1], episodes, burn_ms / 1e3, places))
            medians = {workers: statistics.median(measured) for workers, measured in rates.items()}
            first = args.workers[0]
            print(f"\n{episodes} episodes that burn {burn_ms:g} ms, {args.rounds} rounds")
            for workers, median in medians.items():
                most = min(workers, len(os.sched_getaffinity(0))) / first
                figure = Figure(
                    f"burning {burn_ms:g} ms, workers: {workers}",
                    median,
                    "episodes/s",
                    ratio=median / medians[first],
                    limit=medians[first] * most if burn_ms and workers > first else None,
                )
                figures.append(figure)
                print(f"workers {workers}: {median:8.1f} episodes/s ({figure.ratio:.2f})  {of_limit(figure)}")
            if ray_rates:
                median, local = statistics.median(ray_rates), medians[args.workers[-1]]
                ray_rates.clear()
                figures.append(Figure(f"burning {burn_ms:g} ms, Ray", median, "episodes/s", ratio=median / local))
                print(f"on Ray:    {median:8.1f} episodes/s, {median / local:.3f} of {args.workers[-1]} local workers")
    if args.ray:
        figures += starts(args.rounds)
    write_figures(args.json, figures)


RAY_INIT = """
import time
import ray
began = time.perf_counter()
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print("ready", time.perf_counter() - began, flush=True)
"""


def starts(rounds: int) -> list[Figure]:
    """Time the start of a run, without Ray and with it."""
    seconds: dict[str, list[float]] = {"local": [], "ray": [], "ray.init": []}
    with TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "tiny")
        words = [sys.executable, "-m", "areal_lite", "train", "configs/ray.yaml", f"model_path={model}"]
        words += [f"fileroot={folder}", "trainer.device=cpu", "server.device=cpu"]
        for number in range(rounds):
            for launch, changes in (("local", []), ("ray", ["ray.address=local"])):
                command = [*words, f"launch={launch}", f"trial_name={launch}{number}", *changes]
                seconds[launch].append(_until_line(command, "step "))
            seconds["ray.init"].append(_until_line([sys.executable, "-c", RAY_INIT], "ready"))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    both = f"{medians['local']:.1f} s, {medians['ray'] - medians['local']:.1f} s more with Ray"
    print(f"\nstart of a run: {both}; ray.init: {medians['ray.init']:.1f} s")
    return [Figure(f"start, {name}", median, "s", ratio=median / medians["local"]) for name, median in medians.items()]


def _until_line(command: list[str], start: str) -> float:
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        assert process.stdout is not None
        assert any(line.startswith(start) for line in process.stdout), f"{command} ended with {process.wait()}"
        seconds = time.perf_counter() - began
        process.terminate()
    return seconds


@contextmanager
def nodes_for(workers: int, address: str) -> Iterator[RayPlaces]:
    """Yield places of that many workers on a Ray of this machine."""
    changes = [f"rollout.workers={workers}", f"rollout.addresses=[{address}]", "ray.address=local"]
    config = load_config(Path(__file__).parents[1] / "configs/ray.yaml", changes)
    began = time.perf_counter()
    with TemporaryDirectory() as logs, ray_places(config, Path(logs), bundles_of(config)) as nodes:
        print(f"Ray and its places were ready after {time.perf_counter() - began:.1f} s")
        yield nodes


if __name__ == "__main__":
    main()
