"""What ``benchmarks/growth.py`` measures: one function per curve, run in a process of its own.

Each returns what it measured at one size, or at several sizes on the way to the largest, by name and unit. CPU is that
of this process; the stub server is another.
"""

from __future__ import annotations
import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
import numpy as np
import orjson
import uvloop
from aiohttp import web
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api import episode_context
from areal_lite.api.episode_context import Episode
from areal_lite.api.io_struct import ModelRequest
from areal_lite.api.trajectory import EpisodeStatus, Group, TokenSequence
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import collate_sequences
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.rollout import garbage_collection
from areal_lite.rollout.dumps.dump_lines import dump_lines, dump_text
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.servers.weights.published_weights import WeightFolder
from tests.stub_server import StubServer

if TYPE_CHECKING:
    from areal_lite.trainer.rl.policy_trainer import PolicyTrainer

Measured = dict[str, float]
"""Value by ``name, unit``."""
WINDOW = 10**6
SOCKETS = 512
FORK = multiprocessing.get_context("fork")
BATCH = 500
MAX_PER_SERVER = 32


# -- tools -------------------------------------------------------------------------------------------


def resident_mb() -> float:
    """Return this process's own resident memory in MB, without mapped files, after a garbage collection."""
    gc.collect()
    return own_mb()


def own_mb() -> float:
    """Return this process's own resident memory in MB, without mapped files; garbage that nobody collected counts."""
    return _status_mb("RssAnon")


def reset_peak() -> float:
    """Forget the highest resident memory so far, and return the present one in MB, mapped files included."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def peak_mb() -> float:
    """Return the highest resident memory in MB since :func:`reset_peak`."""
    return _status_mb("VmHWM")


def _status_mb(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) * 1024 / 1e6


def cpu_s(work: Callable[[], object]) -> float:
    """Return the CPU seconds of this process for ``work``."""
    gc.collect()
    began = time.process_time()
    work()
    return time.process_time() - began


async def async_cpu_s(work: Awaitable[object]) -> float:
    """Return the CPU seconds of this process for ``work``."""
    gc.collect()
    began = time.process_time()
    await work
    return time.process_time() - began


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line that fits ``(x, y)`` best."""
    x, y = np.array(points, float).T
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


@contextlib.contextmanager
def stub_servers(count: int) -> Iterator[list[str]]:
    """Run a process that answers at ``count`` loopback addresses, and yield these."""
    parent, child = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(child, count), daemon=True)
    process.start()
    try:
        yield parent.recv()
    finally:
        process.kill()
        process.join()


def _serve(ready: Any, count: int) -> None:
    async def main() -> None:
        server = StubServer(answer_len=64)
        server.told = {"context_length": WINDOW}
        runner = web.AppRunner(server.app(), access_log=None)
        await runner.setup()
        for number in range(count):
            await web.TCPSite(runner, f"127.0.{number // 250}.{1 + number % 250}", 0).start()
        ready.send([f"{host}:{port}" for host, port in runner.addresses])
        await asyncio.Event().wait()

    asyncio.run(main())


# -- the engine --------------------------------------------------------------------------------------


def in_flight(count: int) -> dict[int, Measured]:
    """Return rate, CPU and memory of ``rollout_batch`` with ``count`` episodes in flight, beside the bare loop's."""
    import torch
    from benchmarks.engine_throughput import bare_round, engine_round, timed

    torch.set_num_threads(1)
    episodes = max(2 * count, min(16 * count, 4096))
    with stub_servers(1) as (address,):
        engine_round(address, min(episodes, 1000), min(count, 256))()  # warms up
        before = reset_peak()
        rate, cpu, _ = timed(engine_round(address, episodes, count), episodes)
        memory = max(0.1, peak_mb() - before)
        bare = partial(bare_round, f"http://{address}/generate", episodes, count)
        bare_rate, bare_cpu, _ = timed(bare, episodes)
    measured = {
        "rate, episodes/s": rate,
        "rate of the bare loop, episodes/s": bare_rate,
        "CPU, us/episode": cpu,
        "CPU of the bare loop, us/episode": bare_cpu,
        "memory, KB/episode": memory / episodes * 1e3,
    }
    return {count: measured}


def episodes(total: int) -> dict[int, Measured]:
    """Return CPU and memory of one engine that trains ``total`` episodes in steps of 500, with a weight update each."""
    import torch
    from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
    from benchmarks.engine_throughput import OneCall

    torch.set_num_threads(1)
    points: dict[int, Measured] = {}
    resident: list[tuple[float, float]] = []
    every = max(BATCH, total // 100)
    source = RolloutDataSourceWithBuffer([{"question": f"{i}?"} for i in range(1000)], SourceSettings(shuffle=True))
    with stub_servers(1) as addresses:
        config = InferenceEngineConfig(
            backend="sglang",
            addresses=addresses,
            max_concurrent_rollouts=256,
            consumer_batch_size=BATCH,
            max_head_offpolicyness=2,
            faults={"max_connections_per_server": SOCKETS},
            dump_to_file=False,
        )
        with RemoteInfEngine(config) as engine:
            before = time.process_time()
            for done in range(BATCH, total + 1, BATCH):
                engine.prepare_batch(source, OneCall)
                engine.update_weights_from_disk("unused", done // BATCH)
                if done % every == 0:
                    resident.append((done, own_mb()))
                if done in (total // 100, total // 10, total // 3 // every * every, total):
                    spent = time.process_time() - before
                    points[done] = {"CPU, us/episode": spent / done * 1e6, "memory, MB": resident[-1][1]}
    warm = [point for point in resident if point[0] >= total / 5]
    points[total]["growth, MB/100,000 episodes"] = max(1e-3, slope(warm) * 1e5)
    return points


# -- conversations -----------------------------------------------------------------------------------


def turns(count: int) -> dict[int, Measured]:
    """Return what the last turns of an agent's session of ``count`` turns cost, and its end and record per turn."""
    from benchmarks.agent_call import HttpEngine, make_tokenizer

    renderer = ChatRenderer(make_tokenizer(None))
    answer = renderer.tokenizer.encode("The largest of these numbers is eighty-nine.", add_special_tokens=False)
    engine: Any = HttpEngine(None, "", [*answer, renderer.stop_ids[0]])

    async def session_of(turns: int) -> tuple[ChatSession, float]:
        service = AgentService()
        session = ChatSession(engine, renderer, GenerationHyperparameters(max_tokens=WINDOW))
        headers = {"x-api-key": service.open(session)}
        messages: list[Any] = []
        last = max(1, turns // 10)
        spent = 0.0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Which is the largest number: 12, 89, 41, {turn}?"})
            body = orjson.dumps({"messages": messages, "model": "default"})
            began = time.process_time()
            reply = await service.handle("POST", "/v1/chat/completions", headers, body)
            if turn >= turns - last:
                spent += time.process_time() - began
            messages.append(orjson.loads(reply.body)["choices"][0]["message"])
        assert session.forks == 0
        return session, spent / last

    garbage_collection.relax()
    uvloop.run(session_of(3))  # warms up
    before = resident_mb()
    session, spent = uvloop.run(session_of(count))
    memory = resident_mb() - before
    for interaction in session.interactions.values():
        interaction.reward = 1.0
    answers = [interaction.model_response for interaction in session.interactions.values()]
    end = cpu_s(lambda: _end(session.history.export("concat"), answers))
    return {count: _turn_costs(count, spent, end, memory)}


def calls(count: int) -> dict[int, Measured]:
    """Return the same of a workflow that sends ``count`` prompts itself, each the one before with its answer."""
    from benchmarks.engine_throughput import PROMPT, tensors

    async def conversation(client: EngineClient, turns: int) -> tuple[Episode, dict[str, Any], float]:
        episode = Episode()
        context = episode_context.current()._replace(episode=episode, episodes=[episode])
        outside = episode_context.enter(context)
        ids, sampled, spent = PROMPT, 0, 0.0
        last = max(1, turns // 10)
        for turn in range(turns):
            began = time.process_time()
            gconfig = GenerationHyperparameters(max_new_tokens=64, max_tokens=WINDOW)
            response = await client.generate(ModelRequest(input_ids=ids, gconfig=gconfig))
            if turn >= turns - last:
                spent += time.process_time() - began
            sampled = len(ids)
            ids = ids + response.output_tokens + PROMPT[:16]
        episode_context.leave(outside)
        length = len(ids) - 16 - sampled
        row = tensors(ids[:sampled], ids[sampled:-16], [-0.5] * length, [0] * length)
        return episode, row, spent / last

    async def measure(addresses: list[str]) -> Measured:
        client = EngineClient(InferenceEngineConfig(backend="sglang", addresses=addresses))
        await client.open()
        await conversation(client, 3)  # warms up
        before = resident_mb()
        episode, row, spent = await conversation(client, count)
        memory = resident_mb() - before
        end = cpu_s(lambda: _end(row, episode.calls))
        await client.close()
        return _turn_costs(count, spent, end, memory)

    garbage_collection.relax()
    with stub_servers(1) as addresses:
        return {count: uvloop.run(measure(addresses))}


def _end(returned: dict[str, Any], answers: Sequence[Any]) -> None:
    """Do what the end of an episode does: sequences, turns, the line of the dump."""
    trajectory = trajectory_of(returned, answers)
    group = Group(task_id=0, group_id="0", status=EpisodeStatus.ACCEPTED, data={}, trajectories=[trajectory])
    dump_text(dump_lines(group))


def _turn_costs(count: int, turn_s: float, end_s: float, memory_mb: float) -> Measured:
    return {
        "CPU of the last turns, ms/turn": turn_s * 1e3,
        "CPU of end and dump, ms/turn": end_s / count * 1e3,
        "memory, KB/turn": max(1.0, memory_mb * 1e3 / count),
    }


# -- rows --------------------------------------------------------------------------------------------


def rows(count: int) -> dict[int, Measured]:
    """Return what a file of ``count`` rows costs: loading, first batch, draws, the saved state."""
    import datasets
    from areal_lite.data.rows.row_files import load_dataset

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        _in_child(_write_rows, file, count)
        _in_child(_load_rows, file)
        warm = Path(folder) / "warm.jsonl"
        _write_rows(warm, 100)
        load_dataset(str(warm), cache_dir=folder)
        before = resident_mb()
        measured: Measured = {"first load, us/row": float(file.with_suffix(".cpu").read_text()) / count * 1e6}
        began = time.process_time()
        dataset = load_dataset(str(file), cache_dir=folder)
        measured["later load, ms"] = (time.process_time() - began) * 1e3
        began = time.process_time()
        source = RolloutDataSourceWithBuffer(dataset, SourceSettings(shuffle=True, n_samples_per_prompt=8))
        owed = source.get_samples(256)
        measured["first batch, ms"] = (time.process_time() - began) * 1e3
        draws = 20
        spent = cpu_s(lambda: [source.mark_trained(source.get_samples(256)) for _ in range(draws)])
        measured["draw, us/group"] = spent / draws / 256 * 1e6
        measured["state saved, ms"] = cpu_s(lambda: source.save(1, folder)) * 1e3
        measured["state loaded, ms"] = cpu_s(lambda: source.load(1, folder)) * 1e3
        assert len(source.get_samples(len(owed))) == len(owed)
        measured["memory, MB"] = max(0.1, resident_mb() - before)
    return {count: measured}


def _in_child(work: Callable[..., None], *args: object) -> None:
    process = FORK.Process(target=work, args=args)
    process.start()
    process.join()
    assert process.exitcode == 0


def _write_rows(file: Path, count: int) -> None:
    with file.open("wb") as out:
        for i in range(count):
            out.write(b'{"prompt":"What is %d + %d?","answer":"%d"}\n' % (i, i * 7 % 1000, i + i * 7 % 1000))


def _load_rows(file: Path) -> None:
    from areal_lite.data.rows.row_files import load_dataset

    spent = cpu_s(lambda: load_dataset(str(file), cache_dir=str(file.parent)))
    file.with_suffix(".cpu").write_text(str(spent))


# -- the trainer -------------------------------------------------------------------------------------


def length(count: int) -> dict[int, Measured]:
    """Return what a token of a training step costs in sequences of ``count`` tokens: long answers, or long prompts."""
    from areal_lite.config.trainer_config import TrainerConfig
    from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
    from tests.fixtures.tiny_model import build_tiny_model

    measured: Measured = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model(Path(folder) / "model", hidden_size=64, num_layers=1, context=max(256, count))
        config = TrainerConfig(total_steps=100, learning_rate=1e-6, num_threads=1, device="cpu")
        for name, prompt in (("answers", 16), ("prompts", count - 32)):
            trainer = PolicyTrainer(config, model_path=str(model), seed=0)
            cost = _step_cost(trainer, _random_batch(prompt, count, size=2 if count > 8192 else 16384 // count))
            measured |= {f"{name}: {key}": value for key, value in cost.items()}
    return {count: measured}


def mesh(count: int) -> dict[int, Measured]:
    """Return the same of one answer of ``count`` tokens that several ranks read together (``trainer.sp_size``), of the
    rank that needs most."""
    from tests.fixtures.tiny_model import build_tiny_model
    from tests.models.parallel.rank_programs.training_cases import start_ranks

    measured: Measured = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_tiny_model(folder / "model", hidden_size=64, num_layers=1, context=max(256, count))
        for ranks in (1, 2, 4) if count >= 1024 else (1, 2):
            start_ranks(ranks, _train_as_rank, ranks, model, count, folder)
            costs = [orjson.loads((folder / f"{rank}.json").read_bytes()) for rank in range(ranks)]
            measured |= {f"sp_size {ranks}: {key}": max(cost[key] for cost in costs) for key in costs[0]}
    return {count: measured}


def _train_as_rank(ranks: int, model: Path, count: int, folder: Path) -> None:
    import torch
    from areal_lite.config.trainer_config import TrainerConfig
    from areal_lite.models.parallel.ranks import join_ranks
    from areal_lite.trainer.rl.policy_trainer import PolicyTrainer

    config = TrainerConfig(total_steps=100, learning_rate=1e-6, num_threads=1, device="cpu", sp_size=ranks)
    with join_ranks(torch.device("cpu"), sp_size=ranks) as joined:
        trainer = PolicyTrainer(config, model_path=str(model), seed=0)
        cost = _step_cost(trainer, _random_batch(16, count, size=1))
        (folder / f"{joined.rank}.json").write_bytes(orjson.dumps(cost))


def _random_batch(prompt: int, tokens: int, size: int) -> DataProto:
    """Return ``size`` sequences of ``tokens`` random tokens, of which each two share a prompt."""
    rng = np.random.default_rng(0)
    sequences = []
    for number in range(size):
        if number % 2 == 0:
            head = rng.integers(3, 259, prompt)
        ids = np.concatenate([head, rng.integers(3, 259, tokens - prompt)])
        mask, reward = np.arange(tokens) >= prompt, float(number % 2 or size == 1)
        sequences.append(TokenSequence(input_ids=ids, loss_mask=mask, reward=reward, group_id=str(number // 2)))
    return DataProto.from_single_dict(collate_sequences(sequences, tokens, pad_token_id=0))


def _step_cost(trainer: PolicyTrainer, batch: DataProto) -> Measured:
    """Return CPU per token and memory of a training step, after a small one."""
    trainer.train_step(_random_batch(16, 64, size=2), version=0)
    tokens = int(batch.batch["attention_mask"].sum())
    before = reset_peak()
    spent = cpu_s(lambda: trainer.train_step(batch, version=1))
    return {"CPU, us/token": spent / tokens * 1e6, "memory, MB": max(0.1, peak_mb() - before)}


# -- servers -----------------------------------------------------------------------------------------


def servers(count: int) -> dict[int, Measured]:
    """Return what ``count`` servers cost: choice of one, a request, a check of all, a weight update beside calls."""
    from benchmarks.routing import simulate

    per_request, _, _ = simulate(count, 80 * max(50, 2 * count), 16 * count, 1)

    async def measure(addresses: list[str]) -> Measured:
        client = EngineClient(InferenceEngineConfig(backend="sglang", addresses=addresses))
        start = await async_cpu_s(client.open())
        gconfig = GenerationHyperparameters(max_new_tokens=8)

        async def ask(number: int) -> None:
            for _ in range(number):
                await client.generate(ModelRequest(input_ids=[1, 2, 3], gconfig=gconfig))

        requests = max(8, 4 * count // 256)
        await asyncio.gather(*(ask(4) for _ in range(256)))  # opens connections
        asked = await async_cpu_s(asyncio.gather(*(ask(requests) for _ in range(256))))
        versions = itertools.count(1)
        await client.update_weights(WeightFolder("unused", next(versions)))
        examine = client._reconciler.examine
        checked = await async_cpu_s(asyncio.gather(*map(examine, client.pool.servers)))
        client.gate.hold("trainer")
        waiting = [asyncio.create_task(ask(1)) for _ in range(MAX_PER_SERVER * count)]
        await asyncio.sleep(0)
        published = await async_cpu_s(client.update_weights(WeightFolder("unused", next(versions))))
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await client.close()
        return {
            "start, us/server": start / count * 1e6,
            "choice, us/request": per_request,
            "request, us/request": asked / requests / 256 * 1e6,
            "check, us/server": checked / count * 1e6,
            "weight update, us/server": published / count * 1e6,
        }

    garbage_collection.relax()
    with stub_servers(count) as addresses:
        return {count: uvloop.run(measure(addresses))}


CURVES: dict[str, tuple[Callable[[int], dict[int, Measured]], list[int], list[int], str]] = {
    "in_flight": (in_flight, [256, 1024, 4096, 8192, 16384, 32768], [16], "episodes in flight"),
    "episodes": (episodes, [1_000_000], [1000], "episodes"),
    "turns": (turns, [1, 10, 30, 100, 300, 1000], [4], "turns of an agent's session"),
    "calls": (calls, [1, 10, 30, 100, 300, 1000], [4], "calls of a workflow's conversation"),
    "rows": (rows, [10**3, 10**4, 10**5, 10**6, 10**7], [300], "rows"),
    "length": (length, [128, 512, 2048, 8192, 16384, 32768], [64], "tokens of a sequence"),
    "mesh": (mesh, [8192, 16384, 32768, 65536, 131072], [64], "tokens of a sequence that ranks read together"),
    "servers": (servers, [1, 4, 16, 64, 256, 1024], [2], "servers"),
}
"""Function, sizes, sizes of ``--smoke``, and what is counted, by name of the curve."""
