"""The trainer of ``chaos.py``, a process that is killed and resumed: draws batches, checks them, saves its state.

Instead of training it writes each batch to a journal, which a resumed trainer cuts back to its checkpoint as if it were
weights. Its orders come on stdin and its news leave on stdout, both as JSON lines.
"""

from __future__ import annotations
import asyncio
import faulthandler
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
import numpy as np
import torch
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.api.trajectory import Group
from areal_lite.cli.stop_signals import task_stacks
from areal_lite.config.loader import load_config
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.processes.place import Places, here
from areal_lite.rollout import workflow_context
from areal_lite.rollout.dumps.packed_group import File
from areal_lite.rollout.dumps.trajectory_dumper import TrajectoryDumper, next_task_id
from areal_lite.rollout.episodes import group_runner
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client import server_requests
from areal_lite.servers.pool import reconciler
from tests.rollout.scripted import tensors_of

MISDEEDS = {
    "reject": 0.02,
    "raise": 0.02,
    "exit": 0.005,
    "cancel itself": 0.005,
    "hang": 0.003,
    "swallow": 0.003,
    "leak": 0.005,
    "block": 0.0005,
}
"""What one episode of a group does, and the share of the groups."""
BLOCK_S = 1.3
SLOW_WRITE_S = 0.03
CHECKPOINT_EVERY = 1
"""Steps between two checkpoints: trainers are killed every hundred seconds here, not every few hours."""


class Orders:
    """What the parent wants at this moment."""

    def __init__(self) -> None:
        self.finish = False
        self.slow_until = 0.0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            self.finish = order.get("finish", self.finish)
            self.slow_until = time.monotonic() + order.get("slow_s", 0.0)
            if "stacks" in order:
                say(stacks=task_stacks())
                faulthandler.dump_traceback()  # of all threads, to stderr
        os._exit(3)  # the parent is gone


def note(folder: Path, task_id: Any, member: int, do: str) -> None:
    """Write down a misdeed, from any process."""
    with (folder / "misdeeds.jsonl").open("ab", buffering=0) as log:
        log.write(json.dumps([task_id, member, do]).encode() + b"\n")


class ToolAgent(RolloutWorkflow):
    """Several turns with a tool between them; one episode of some groups misbehaves while there is a file ``chaos``."""

    gconfig = GenerationHyperparameters(max_new_tokens=128)

    def __init__(self, folder: Path, grace_s: float) -> None:
        self._folder = folder
        self._grace_s = grace_s
        self._leaked: set[asyncio.Task[None]] = set()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Run the turns; the row says how it misbehaves."""
        context = workflow_context.get()
        draw = random.Random(data["row"] * 64 + context.member_idx)
        do = data["do"] if context.member_idx == data["member"] and (self._folder / "chaos").exists() else None
        if do is not None:
            note(self._folder, context.task_id, context.member_idx, do)
        row = data["row"]
        ids = [20 + row % 80, 20 + row // 80 % 80, 20 + row // 6400 % 80, 20 + context.member_idx]
        ids += [30] * min(200, int(draw.lognormvariate(3, 0.7)))
        turns = min(8, 1 + int(draw.lognormvariate(0.5, 0.6)))
        worst = draw.randrange(turns)
        answers = []
        for turn in range(turns):
            if turn == worst and do is not None and await self._misbehave(do):
                return None
            answers.append(await engine.agenerate(ModelRequest(input_ids=ids, gconfig=self.gconfig)))
            await asyncio.sleep(min(0.3, draw.lognormvariate(-4.5, 1.0)))  # the tool
            ids = ids + answers[-1].output_tokens + [40] * (1 + int(draw.lognormvariate(1.5, 0.7)))
        return tensors_of(*answers, reward=draw.random())

    async def _misbehave(self, do: str) -> bool:
        """Do it; return whether the episode rejects itself."""
        if do == "raise":
            raise KeyError("broken agent")
        if do == "exit":
            raise SystemExit(3)
        if do == "cancel itself":
            raise asyncio.CancelledError
        if do == "hang":
            await asyncio.Event().wait()
        if do == "swallow":
            until = time.monotonic() + 1e9
            while (left := until - time.monotonic()) > 0:
                try:
                    await asyncio.sleep(left)
                except asyncio.CancelledError:
                    until = min(until, time.monotonic() + 3 * self._grace_s)
            raise asyncio.CancelledError
        if do == "leak":
            task = asyncio.create_task(asyncio.sleep(5 * self._grace_s))
            self._leaked.add(task)
            task.add_done_callback(self._leaked.discard)
        if do == "block":
            time.sleep(BLOCK_S)  # noqa: ASYNC251 -- the fault
        return do == "reject"


class CountTasks(RolloutWorkflow):
    """Counts the tasks of the engine's event loop, its own included."""

    calls = count = 0

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> None:
        """Count."""
        CountTasks.calls += 1
        CountTasks.count = len(asyncio.all_tasks())


class Journal:
    """The batches that were trained, one JSON line each, as durable as the checkpoint beside it."""

    def __init__(self, folder: Path) -> None:
        self._checkpoint = folder / "checkpoint.json"
        self._file = (folder / "journal.jsonl").open("ab+")
        self.state: dict[str, Any] = {"step": 0, "offset": 0, "source": None}
        if self._checkpoint.exists():
            self.state = json.loads(self._checkpoint.read_bytes())
        self._file.seek(self.state["offset"])
        with (folder / "rolled_back.jsonl").open("ab") as rolled_back:
            rolled_back.write(self._file.read().rpartition(b"\n")[0] + b"\n")
        self._file.truncate(self.state["offset"])

    def train(self, record: dict[str, Any]) -> None:
        """Append a batch."""
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def save(self, step: int, source: RolloutDataSource) -> None:
        """Write a checkpoint atomically."""
        os.fsync(self._file.fileno())
        unfinished = self._checkpoint.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"step": step, "offset": self._file.tell(), "source": source.state_dict()}))
        unfinished.replace(self._checkpoint)


def record_of(groups: list[Group], version: int) -> dict[str, Any]:
    """Return a batch's line of the journal, with what is wrong in it."""
    wrong, oldest, tokens = [], version, 0
    for group in groups:
        for sequence in group.sequences:
            mask = sequence.loss_mask
            ids, versions, logprobs = sequence.input_ids[mask], sequence.versions[mask], sequence.logprobs[mask]
            tokens += len(ids)
            oldest = min(oldest, int(versions.min()))
            if not len(ids) or (ids // 100 != versions).any():
                wrong.append(f"group {group.task_id}: versions differ from the servers'")
            last_digits = ids % 100
            if (last_digits < 10).any() or (last_digits > 16).any() or (sequence.input_ids[~mask] >= 2000).any():
                wrong.append(f"group {group.task_id}: tokens that no server sent")
            if not np.isfinite(logprobs).all() or (logprobs > -0.5).any():
                wrong.append(f"group {group.task_id}: log-probs that no server sent")
    return {
        "time": time.time(),
        "version": version,
        "staleness": version - oldest,
        "tokens": tokens,
        "groups": [[group.task_id, group.samples[0].group_index] for group in groups],
        "wrong": wrong,
    }


def say(**news: Any) -> None:
    """Tell the parent."""
    print(json.dumps(news), flush=True)


def open_files() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def rss_mb() -> float:
    """Return the resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def rows_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows, some with a misdeed for one episode of their group."""
    draw, group_size = random.Random(settings["seed"]), settings["rollout"]["group_size"]
    kinds, shares = (*MISDEEDS, None), [settings["more"] * share for share in MISDEEDS.values()]
    shares.append(1 - sum(shares))
    return [
        {"row": i, "do": draw.choices(kinds, shares)[0], "member": draw.randrange(group_size)}
        for i in range(settings["rows"])
    ]


def shorten_waits(settings: dict[str, Any]) -> None:
    """Give hung servers and episodes seconds instead of minutes, so that many faults fit into the run."""
    reconciler.SILENCE_S = 2.0
    reconciler.STRAGGLER_S /= 15
    reconciler.IDLE_WATCH_S = 1.0
    server_requests.CONTROL_TIMEOUT_S = 2.0
    group_runner.CANCEL_GRACE_S = settings["grace_s"]


def slow_disk(orders: Orders) -> None:
    """Let the dumper's disk be slow while the parent wants it."""
    write = TrajectoryDumper._write

    def slow(self: TrajectoryDumper, files: list[File]) -> None:
        for file in files:
            if time.monotonic() < orders.slow_until:
                time.sleep(SLOW_WRITE_S)
            write(self, [file])

    TrajectoryDumper._write = slow  # type: ignore[method-assign]


def count_tasks(engine: RemoteInfEngine, wanted: int | None = None) -> int:
    """Return the tasks on the engine's loop, once there are ``wanted`` or after 20 s."""
    until = time.monotonic() + 20
    while True:
        engine.rollout_batch([{}], CountTasks, group_size=1, is_eval=True)
        if wanted is None or CountTasks.count <= wanted or time.monotonic() > until:
            return CountTasks.count
        time.sleep(0.5)


@contextmanager
def nodes(folder: Path, settings: dict[str, Any]) -> Iterator[Places]:
    """Yield the places of the workers on the nodes of a cluster."""
    from areal_lite.cluster.ray_places import bundles_of, ray_places

    changes = [f"rollout.workers={settings['rollout']['workers']}", "rollout.addresses=[127.0.0.1:1]"]
    config = load_config(Path(__file__).parents[1] / "configs/ray.yaml", [*changes, f"ray.address={settings['ray']}"])
    with ray_places(config, folder / "logs", bundles_of(config)) as places:
        yield places.__getitem__


def main(folder: Path) -> None:
    """Train until the parent says that it is enough."""
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    logging.basicConfig(filename=folder / "trainer.log", format="%(process)d %(created).3f %(levelname)s %(message)s")
    logging.getLogger("areal_lite").setLevel(logging.INFO)  # as the command line has it
    shorten_waits(settings)
    orders = Orders()
    slow_disk(orders)
    source = RolloutDataSource(
        rows_of(settings),
        SourceSettings(n_samples_per_prompt=settings["rollout"]["group_size"], seed=settings["seed"], shuffle=True),
    )
    journal = Journal(folder)
    if journal.state["source"] is not None:
        source.load_state_dict(journal.state["source"])
    config = InferenceEngineConfig(fileroot=str(folder / "runs"), **settings["rollout"])
    uvloop.new_event_loop().close()  # the first one of a process opens files that stay open
    files, first_id = open_files(), next_task_id(config.run_dir)
    note(folder, first_id, -1, "start")
    agent, threads = ToolAgent(folder, settings["grace_s"]), 2  # this one and that of the orders
    with ExitStack() as stack:
        places = stack.enter_context(nodes(folder, settings)) if "ray" in settings else here
        engine = RemoteInfEngine(config, places=places).initialize()
        tasks = 0 if "ray" in settings else count_tasks(engine)  # a workflow sees the tasks of its own process
        memory = _train(engine, source, journal, orders, agent)
        tasks_left = 0 if "ray" in settings else count_tasks(engine, tasks) - tasks
        engine.destroy()
        if "ray" in settings:  # which has threads and files of its own
            threads, files = threading.active_count(), open_files()
    counts = engine.export_stats()
    state = source.state_dict()
    say(
        done=True,
        first_id=first_id,
        ended=sum(counts.values()) - counts["abandoned"] - CountTasks.calls,
        tasks_left=tasks_left,
        threads_left=max(0, threading.active_count() - threads),
        files_left=max(0, open_files() - files),
        memory=memory,
        handed_out=state["group_index"],
        dropped=sum(state["dropped"].values()),
        owed=len(state["owed"]) + len(state["returned"]),
    )


def _train(
    engine: RemoteInfEngine, source: RolloutDataSource, journal: Journal, orders: Orders, agent: ToolAgent
) -> list[tuple[int, float]]:
    """Run steps; return (groups ended, MB) after each."""
    step, memory = journal.state["step"], []
    engine.update_weights_from_disk("weights", step)  # servers may have those of a killed trainer
    say(ready=True, step=step)
    while not orders.finish:
        groups = engine.prepare_batch(source, agent)
        journal.train(record_of(groups, step))
        source.mark_trained(group.samples for group in groups)
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            engine.flush_dumps()  # what a checkpoint counts as trained is on disk
            journal.save(step, source)
        engine.update_weights_from_disk("weights", step)
        counts = engine.export_stats()
        memory.append((sum(counts.values()), rss_mb()))
        up = sum(value for name, value in engine.server_metrics().items() if name.endswith("/up"))
        say(step=step, ended=sum(counts.values()), up=up)
    engine.close_source(source)
    engine.flush_dumps()
    journal.save(step, source)
    return memory


if __name__ == "__main__":
    main(Path(sys.argv[1]))
