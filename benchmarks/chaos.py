"""What faults of every kind cost a run: eight servers that fail, episodes that misbehave, a trainer that is killed.

Servers (``chaos_server.py``) and trainer (``chaos_trainer.py``) are processes of their own. Episodes take several turns
with a tool between them; a seed decides their lengths and every fault:

- of one reply: connection reset, 500, truncated, not JSON, wrong lengths, NaN, an id beyond the vocabulary, no token,
  too many, a version from the future, a slow drip; another request's id, another prompt's length, a first token of a
  version from the future, below 0, of 30 digits or with a fraction, a log-prob that is inf in float32, no end
- of servers: killed and started again with the first weights, stopped and continued, 503, 429 with Retry-After, updates
  that are acknowledged and not loaded, connections refused by half of them at once
- of the trainer: killed and resumed from its checkpoint, a slow disk under the dumps
- of nodes, with ``--launch ray``: a node with a rollout worker is killed, and another one joins
- of episodes: raise, SystemExit, cancel themselves, hang, swallow their cancellation, leak a task, block the event loop

Before and after the faults the same run goes undisturbed, which measures its speed without them. From that comes the
effective training time: the seconds in which an undisturbed run would have trained the tokens that were kept, as a
share of all seconds (RobustRL, arXiv:2512.22492), and of the seconds that the faults left. The log must name each fault
that a request or an episode met (``NAMED_BY``).

    python benchmarks/chaos.py [--smoke | --episodes 100000] [--seed 1] [--launch ray]

With ``--launch ray``, episodes run in two workers on Ray's own cluster of three nodes, all on this machine. What is
left in the trainer's process is then not counted, as Ray is in it.

Prints one JSON object; the exit code is 1 if a check failed. docs/benchmarks.md has figures.
"""

from __future__ import annotations
import argparse
import json
import math
import queue
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos_server import REPLY_FAULTS
from benchmarks.report import Figure, make_parser, write_figures

HERE = Path(__file__).parent

QUIET_SHARE = 0.1
"""Share of the groups before the faults, and again after them."""
RESTART_S = 1.0
"""Seconds for which a killed server stays away."""
STOP_S = 15.0
"""Seconds for which a server is stopped: longer than it takes to tell a hung server from a slow one."""
PATIENCE_S = 120.0
"""Seconds without an ended group after which the run counts as hung."""
NOTICE_S = 15.0
"""Seconds in which the log must say that a server is out."""
LASTING = ("kill", "stop", "503", "429", "stays old", "partition", "slow disk", "kill trainer")
"""Faults that last; each round has all of them in a random order."""

NAMED_BY = {
    "reset": "ServerDisconnectedError|Connection reset",
    "500": "HTTP 500",
    "truncated": "payload is not completed",
    "garbage": "not JSON",
    "lengths": "output_ids that differ",
    "nan": "log-probs that are not numbers",
    "vocabulary": "not in the vocabulary",
    "empty": "no tokens, with the finish reason",
    "long": "tokens for a request of at most",
    "newer": "tokens of version",
    "flood": "a reply of more than",
    "other id": "the answer to another request",
    "other prompt": "prompt tokens instead of",
    "first newer": "tokens of version",
    "negative version": "the weight version '",
    "fraction": "the weight version 3.7",
    "30 digits": "the weight version '",
    "overflow": "log-probs that are not finite",
    "503": "HTTP 503",
    "429": "HTTP 429",
    "stays old": "it acknowledged version",
    "block": "blocks the event loop",
    "raise": "KeyError",
    "exit": "SystemExit",
    "cancel itself": "CancelledError",
    "hang": "episode_timeout_s",
    "swallow": "episode_timeout_s",
    "kill node": r"worker-\d on node \S+ \(log \S+\) is lost",
}
"""What the log says of a server or, of an episode, its record in the dump, by the fault that it names.

What fails nothing is not named: a reply that drips within its time, a disk that the queue of the dumps makes up for, a
rejection, a task that is left behind and ends by itself. Nor is the trainer's own death, which its parent sees.
"""
WORKER = "rollout.workers.worker_process"
OUT = r" is (down|behind|slow): "
"""What the log says of a server that was killed, stopped or cut off."""


Away = tuple[float, float]
"""From and until when a process could not work."""


class Cause(NamedTuple):
    """An injected fault that the log must name: of a server, if it has an address, and between two times."""

    kind: str
    address: str = ""
    start: float = 0.0
    end: float = math.inf


class ServerProcess:
    """A server that can be killed and started again on its port."""

    def __init__(self, port: int, *, seed: int, tokens_per_s: float) -> None:
        self.port = port
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        """Replies and tokens, see ChaosServer."""
        self.down: list[tuple[float, float]] = []
        """When it could not serve."""
        self._seed = seed
        self._tokens_per_s = tokens_per_s
        self._starts = 0
        self.replies_fail = False
        self.away = False
        """Whether it was killed or stopped, and is not back."""

    def start(self) -> None:
        """Start the process; :meth:`until_ready` waits for it."""
        self._starts += 1
        options = ["--tokens-per-s", str(self._tokens_per_s), "--seed", str(self._seed * 1000 + self._starts)]
        options += ["--replies-fail"] if self.replies_fail else []
        command = [sys.executable, str(HERE / "chaos_server.py"), str(self.port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def until_ready(self) -> None:
        """Return once it listens."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline(), "a server did not start"

    def kill(self) -> None:
        """Kill it, once its counts are known."""
        self.count()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def back(self) -> None:
        """Record that it can serve again."""
        self.down[-1] = (self.down[-1][0], time.time())
        self.away = False

    def order(self, kind: str, seconds: float = 0.0) -> None:
        """Begin or end a fault."""
        self._ask({"kind": kind, "seconds": seconds})

    def count(self) -> None:
        """Add the faults that this process injected."""
        counts = self._ask()
        self.faults.update(counts.pop("faults"))
        self.counts.update(counts)

    def _ask(self, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else orjson.dumps(body)
        deadline = time.monotonic() + 15
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/chaos", data, timeout=10) as reply:
                    return orjson.loads(reply.read())
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


class TrainerProcess:
    """The trainer, which is killed and resumed."""

    def __init__(self, folder: Path) -> None:
        self.news: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ended = self.ended_before = 0
        """Ended groups: of this process, and of those before."""
        self.up = 0.0
        self.summary: dict[str, Any] | None = None
        self.down: list[tuple[float, float]] = []
        self.stacks: str | None = None
        self._down_since: float | None = None
        self._folder = folder
        self._stderr = (folder / "stderr.txt").open("ab")

    def start(self) -> None:
        """Start or resume."""
        command = [sys.executable, str(HERE / "chaos_trainer.py"), str(self._folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.news.put(json.loads(line) | {"pid": process.pid})
        self.news.put({"pid": process.pid, "exit": process.wait()})

    def order(self, **order: Any) -> None:
        """Send an order."""
        if "chaos" in order:
            flag = self._folder / "chaos"
            flag.touch() if order["chaos"] else flag.unlink(missing_ok=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """Kill it and start another."""
        self._down_since = time.time()
        self.process.kill()
        self.process.wait()
        self.ended_before, self.ended = self.ended_before + self.ended, 0
        self.start()

    def ask_for_stacks(self) -> str:
        """Return where its tasks wait; its threads are in its stderr."""
        self.order(stacks=True)
        until = time.monotonic() + 10
        while self.stacks is None and time.monotonic() < until:
            self.listen(0.5)
        return self.stacks or f"it does not answer: see {self._folder}/stderr.txt"

    def listen(self, timeout_s: float) -> None:
        """Take in the news of at most ``timeout_s``."""
        try:
            news = self.news.get(timeout=timeout_s)
        except queue.Empty:
            return
        if news["pid"] != self.process.pid:
            return
        if "exit" in news and (news["exit"] or self.summary is None):
            raise SystemExit(f"the trainer ended with {news['exit']}: see {self._folder}/stderr.txt")
        if "ready" in news and self._down_since is not None:
            self.down.append((self._down_since, time.time()))
            self._down_since = None
        self.stacks = news.get("stacks", self.stacks)
        if "done" in news:
            self.summary = news
        self.ended = news["ended"] if "step" in news and "ended" in news else self.ended
        self.up = news.get("up", self.up)


class Nodes:
    """Ray's own cluster of three nodes."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 6, "health_check_timeout_ms": 2000}
        # Hooks for this process's end are signal handlers, which no thread may set; stop() ends the nodes.
        head = {"num_cpus": 1, "_system_config": quick}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        for _ in range(2):
            self._cluster.add_node(num_cpus=1)
        self.address = self._cluster.address

    def kill_one(self) -> None:
        """Kill a node that runs a rollout worker, and have another one join."""
        import psutil

        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self._cluster.worker_nodes}
        programs = [each for each in psutil.process_iter(["cmdline"]) if WORKER in " ".join(each.info["cmdline"] or ())]
        used = [parent.pid for each in programs for parent in each.parents() if parent.pid in raylets]
        self._cluster.remove_node(raylets[next(iter(used or raylets))], allow_graceful=False)
        self._cluster.add_node(num_cpus=1)

    def stop(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


class Chaos:
    """Runs the servers, the trainer and the faults."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.draw = random.Random(args.seed)
        self.ports = _free_ports(args.servers)
        self.servers = [
            ServerProcess(port, seed=args.seed * 100 + i, tokens_per_s=args.tokens_per_s)
            for i, port in enumerate(self.ports)
        ]
        self.trainer = TrainerProcess(folder)
        self.nodes = Nodes() if args.launch == "ray" else None
        self.faults: Counter[str] = Counter()
        self.windows: dict[str, tuple[float, float]] = {}
        """Beginning and end of each phase."""
        self.causes: list[Cause] = []
        """Of the faults that took a server away."""
        self.recovered_s = -1.0
        self._later: list[tuple[float, Callable[[], None]]] = []
        """Ends of faults: time, function."""
        self._waiting: list[threading.Thread] = []

    def run(self) -> None:
        """Run all phases."""
        groups = self.args.episodes // self.args.group_size
        quiet = int(groups * QUIET_SHARE)
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.until_ready()
        self.trainer.start()
        self._until(2 * self.args.batch)  # the start is not measured
        self._phase("before", 2 * self.args.batch + quiet)
        self._set_chaos(True)
        lasting = (*LASTING, "kill node") if self.nodes else LASTING
        began, rounds = self.trainer.ended_before + self.trainer.ended, self.args.rounds
        kinds = [
            kind
            for i in range(rounds)
            for kind in self.draw.sample(lasting, len(lasting))
            if kind != "kill trainer" or i < (rounds + 2) // 3  # then one lives long, so that its memory can be watched
        ]
        step = (groups - quiet - began) / (len(kinds) + 1)
        started = time.time()
        for i, kind in enumerate(kinds):
            self._until(began + step * (i + 1))
            self._inject(kind)
        self._until(groups - quiet)
        self.windows["chaos"] = (started, time.time())
        self._set_chaos(False)
        healed = time.time()
        while self._later or self._waiting or self.trainer.up < len(self.servers):
            self._look()
            assert time.time() < healed + 90, f"{self.trainer.up} of {len(self.servers)} servers came back"
        self.recovered_s = time.time() - healed
        done = self.trainer.ended_before + self.trainer.ended
        self._phase("after", max(groups, done + quiet))
        self.trainer.order(finish=True)
        while self.trainer.summary is None:
            self._look()
        for server in self.servers:
            server.count()

    def _phase(self, name: str, groups: float) -> None:
        started = time.time()
        self._until(groups)
        self.windows[name] = (started, time.time())

    def _until(self, groups: float) -> None:
        """Return once so many groups have ended."""
        last, changed = -1, time.monotonic()
        while (now := self.trainer.ended_before + self.trainer.ended) < groups:
            self._look()
            if now != last:
                last, changed = now, time.monotonic()
            if time.monotonic() > changed + PATIENCE_S:
                where = (
                    f"{now} of {groups:.0f} groups; the tasks of the trainer are at\n{self.trainer.ask_for_stacks()}"
                )
                raise SystemExit(f"nothing has ended for {PATIENCE_S:g} s, at {where}")

    def _look(self) -> None:
        self.trainer.listen(0.05)
        now = time.time()
        due = [function for at, function in self._later if at <= now]
        self._later = [(at, function) for at, function in self._later if at > now]
        for function in due:
            function()
        self._waiting = [thread for thread in self._waiting if thread.is_alive()]

    def _set_chaos(self, on: bool) -> None:
        self.trainer.order(chaos=on)
        for server in self.servers:
            server.replies_fail = on
            if not server.away:
                server.order("on" if on else "off")

    def _is_down(self, server: ServerProcess) -> bool:
        return bool(server.down) and server.down[-1][1] > time.time()

    def _inject(self, kind: str) -> None:
        self.faults[kind] += 1
        seconds = self.args.fault_s * self.draw.uniform(0.7, 1.3)
        if kind == "kill trainer":
            self.trainer.kill()
        elif kind == "slow disk":
            self.trainer.order(slow_s=seconds)
        elif kind == "kill node":
            assert self.nodes is not None
            self.causes.append(Cause(kind, start=time.time()))
            self._waiting.append(threading.Thread(target=self.nodes.kill_one))
            self._waiting[-1].start()
        sound = [server for server in self.servers if not self._is_down(server)]
        if kind in ("kill trainer", "slow disk", "kill node") or not sound:
            return
        if kind == "stop":
            seconds = self.args.stop_s
        half = len(self.servers) // 2
        for server in self.draw.sample(sound, min(len(sound), half)) if kind == "partition" else [sound[0]]:
            self._disturb(server, kind, seconds)
        self.draw.shuffle(self.servers)

    def _disturb(self, server: ServerProcess, kind: str, seconds: float) -> None:
        now = time.time()
        if (
            kind == "kill" or (kind == "partition" and seconds >= 1) or seconds >= STOP_S
        ):  # the rest is too short to see
            self.causes.append(Cause(kind, f"http://127.0.0.1:{server.port}", now, now + seconds))
        if kind in ("kill", "stop"):
            server.away = True
            server.down.append((now, float("inf")))
            back: Callable[[ServerProcess], None]
            if kind == "kill":
                server.kill()
                seconds, back = RESTART_S, self._restart
            else:
                server.process.send_signal(signal.SIGSTOP)
                back = self._continue
            self._later.append((now + seconds, partial(back, server)))
        else:
            server.order(kind, seconds)
            if kind != "429":
                server.down.append((now, now + seconds))

    def _restart(self, server: ServerProcess) -> None:
        def ready() -> None:
            server.until_ready()
            server.back()

        server.start()
        self._waiting.append(threading.Thread(target=ready))
        self._waiting[-1].start()

    def _continue(self, server: ServerProcess) -> None:
        server.process.send_signal(signal.SIGCONT)
        server.back()
        server.order("on" if server.replies_fail else "off")

    def stop(self) -> None:
        """End all processes."""
        for process in [getattr(each, "process", None) for each in (self.trainer, *self.servers)]:
            if process is not None:
                process.kill()
                process.wait()
        if self.nodes is not None:
            self.nodes.stop()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


# -- what came of it ---------------------------------------------------------------------------------


def read_lines(path: Path) -> list[Any]:
    """Return the objects of a JSON lines file; a killed process may have left half a line."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [orjson.loads(line) for line in lines[:-1] if line]


def read_misdeeds(path: Path) -> dict[Any, tuple[int, str]]:
    """Return member and misdeed by task id. A trainer that starts uses the ids again that its killed predecessor did
    not dump."""
    misdeeds: dict[Any, tuple[int, str]] = {}
    for task_id, member, do in read_lines(path):
        if do == "start":
            misdeeds = {known: each for known, each in misdeeds.items() if known < task_id}
        else:
            misdeeds[task_id] = (member, do)
    return misdeeds


def read_dumps(folder: Path, misdeeds: dict[Any, tuple[int, str]]) -> dict[str, Any]:
    """Return what the dump says: groups by their end, twins, episodes that the infrastructure lost, tokens of those
    that misbehaved, and which misdeeds it names."""
    ends: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    named: Counter[str] = Counter()
    unnamed: Counter[str] = Counter()
    episodes = twins = torn = wasted = with_worker = 0
    ids: set[int] = set()
    for path in folder.rglob("rollout/*/*.jsonl"):
        if path.parts[-3] != "rollout":
            continue
        name = path.name.removesuffix(".jsonl")
        twins += not name.isdecimal() or int(name) in ids
        ids.add(int(name.partition(".")[0]))
        lines = read_lines(path)
        members = {line["member_idx"] for line in lines}
        torn += len(members) != len(lines) or members != set(range(len(members)))
        for line in lines:
            episodes += 1
            ends[line["status"]] += 1
            member, do = misdeeds.get(line["task_id"], (-1, None))
            written = sum(len(turn["ids"]) for turn in line["turns"] if turn["role"] == "assistant")
            if line["error_kind"] == "worker":
                with_worker += 1
                wasted += written
            elif line["status"] == "failed" and (line["error_kind"] == "engine" or do is None):
                lost[f"{line['error_kind']}: {line['error'].strip().splitlines()[-1][:160]}"] += 1
            elif member == line["member_idx"] and line["status"] != "accepted":
                wasted += written
                if line["status"] == "failed" and do in NAMED_BY:
                    (named if re.search(NAMED_BY[do], line["error"]) else unnamed)[do] += 1
    return {
        **{"groups": ids, "episodes": episodes, "ends": dict(ends), "twins": twins, "torn": torn, "lost": lost},
        **{"wasted": wasted, "named": named, "unnamed": unnamed, "with_worker": with_worker},
    }


def unnamed_causes(causes: list[Cause], log: list[tuple[float, str]]) -> list[str]:
    """Return the causes that no line (time, text) of the log names."""

    def is_named(cause: Cause) -> bool:
        lines = [line for line in log if not cause.address or f"server {cause.address} " in line[1]]
        if cause.kind in NAMED_BY:
            return any(re.search(NAMED_BY[cause.kind], text) for _, text in lines)
        said = [text for at, text in lines if at < cause.start and re.search(r" is \w+: ", text)][-1:]  # its last state
        said += [text for at, text in lines if cause.start <= at <= cause.end + NOTICE_S]
        return any(re.search(OUT, text) for text in said)

    return [f"{cause.kind} {cause.address}".rstrip() for cause in causes if not is_named(cause)]


def log_lines(log: Path) -> list[tuple[float, str]]:
    """Return time and text of each line of a trainer's log."""
    found = (re.match(r"\d+ ([\d.]+) [A-Z]+ (.*)", line) for line in log.read_text().splitlines())
    return [(float(match[1]), match[2]) for match in found if match]


def tokens_per_s(steps: list[dict[str, Any]], window: tuple[float, float]) -> float:
    """Return the speed at which batches came in a window without faults."""
    inside = [step for step in steps if window[0] <= step["time"] <= window[1]]
    if len(inside) < 2:
        return 0.0
    # the first batch was begun before the window
    return float(sum(step["tokens"] for step in inside[1:])) / max(inside[-1]["time"] - inside[0]["time"], 1e-9)


def effective_s(kept: list[dict[str, Any]], window: tuple[float, float], quiet_tokens_per_s: float) -> float:
    """Return the seconds in which a run without faults would have trained the tokens of a window's kept steps: what a
    killed trainer had trained since its checkpoint does not count."""
    tokens = sum(step["tokens"] for step in kept if window[0] <= step["time"] <= window[1])
    return float(tokens) / max(quiet_tokens_per_s, 1e-9)


def stall_s(steps: list[dict[str, Any]], at: float, trainer: list[Away]) -> float:
    """Return the longest time between two steps, one of which ended within ``NOTICE_S`` after ``at``; one in which the
    trainer was away has a cause of its own."""
    times = [float(step["time"]) for step in steps]
    gaps = [(a, b) for a, b in zip(times, times[1:], strict=False) if b >= at and a <= at + NOTICE_S]
    return max((b - a for a, b in gaps if not any(a <= low <= b for low, _ in trainer)), default=0.0)


def capacity_s(window: tuple[float, float], trainer: list[Away], servers: list[list[Away]]) -> float:
    """Return the seconds of a window in which servers and trainer could work, from when each was away; a server's count
    by its share."""
    tick, total, now = 0.02, 0.0, window[0]
    while now < window[1]:
        if not any(low <= now < high for low, high in trainer):
            up = sum(not any(low <= now < high for low, high in server) for server in servers)
            total += tick * up / len(servers)
        now += tick
    return total


def state_lines(log: Path) -> tuple[Counter[str], int, Counter[str]]:
    """Return lines on servers by state, those that repeat the state before, and all other lines by their form."""
    states: Counter[str] = Counter()
    others: Counter[str] = Counter()
    last: dict[tuple[str, str], str] = {}
    repeated = 0
    for line in log.read_text().splitlines():
        if found := re.match(r"(\d+) \S+ WARNING server (\S+) is (\w+): ", line):
            life, server, state = found.groups()
            repeated += last.get((life, server), "back") == state
            last[life, server] = state
            states[state] += 1
        elif found := re.match(r"\d+ [\d.]+ [A-Z]+ (.*)", line):
            others[re.sub(r"\d+(\.\d+)?", "N", found[1])[:100]] += 1
    return states, repeated, others


def slope_mb(memory: list[tuple[int, float]], group_size: int) -> float:
    """Return the growth in MB per 100,000 episodes, by least squares over the later two thirds."""
    late = memory[len(memory) // 3 :]
    if len(late) < 2:
        return 0.0
    mean_x, mean_y = (sum(column) / len(late) for column in zip(*late, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in late)
    return sum((x - mean_x) * (y - mean_y) for x, y in late) / max(spread, 1e-9) / group_size * 100_000


def report(chaos: Chaos, folder: Path, seconds: float) -> dict[str, Any]:
    """Return all figures and checks."""
    args, trainer = chaos.args, chaos.trainer
    summary = trainer.summary
    assert summary is not None
    journal, rolled_back = read_lines(folder / "journal.jsonl"), read_lines(folder / "rolled_back.jsonl")
    misdeeds = read_misdeeds(folder / "misdeeds.jsonl")
    dump = read_dumps(folder / "runs", misdeeds)
    trained = [number for step in journal for _, number in step["groups"]]
    trained_ids = [task_id for step in journal for task_id, _ in step["groups"]]
    faults: Counter[str] = sum((server.faults for server in chaos.servers), Counter())
    counts: Counter[str] = sum((server.counts for server in chaos.servers), Counter())
    replies = counts["replies"]
    missing = {kind: f"{faults[kind]} of {share * replies:.0f}" for kind, share in REPLY_FAULTS.items()}
    rare = [k for k, share in REPLY_FAULTS.items() if faults[k] < 0.8 * share * replies - 3 * (share * replies) ** 0.5]
    states, repeated, others = state_lines(folder / "trainer.log")
    both = sorted([*journal, *rolled_back], key=lambda step: float(step["time"]))
    quiet = [tokens_per_s(both, chaos.windows[name]) for name in ("before", "after")]
    window = chaos.windows["chaos"]
    good_share = 1 - (counts["spoiled"] + dump["wasted"]) / max(counts["generated"], 1)
    left_s = capacity_s(window, trainer.down, [server.down for server in chaos.servers]) * good_share
    useful_s = effective_s(journal, window, sum(quiet) / 2)
    causes = [*chaos.causes, *([Cause("block")] if any(do == "block" for _, do in misdeeds.values()) else [])]
    causes += [
        Cause(kind, f"http://127.0.0.1:{server.port}")
        for server in chaos.servers
        for kind, count in server.faults.items()
        if count and kind in NAMED_BY
    ]
    unnamed = unnamed_causes(causes, log_lines(folder / "trainer.log")) + list(dump["unnamed"].elements())
    named_share = 1 - len(unnamed) / max(len(causes) + sum((dump["named"] + dump["unnamed"]).values()), 1)
    lost_share = sum(dump["lost"].values()) / dump["episodes"]
    last_ids = {task_id for task_id in dump["groups"] if task_id >= summary["first_id"]}
    ratio = useful_s / left_s
    slope = slope_mb(summary["memory"], args.group_size)
    checks = {
        "no episode ended twice": dump["twins"] == dump["torn"] == 0,
        "all that ended is dumped": len(last_ids) == summary["ended"],
        "all that was trained is dumped": {i for i in trained_ids if i >= summary["first_id"]} <= last_ids,
        "no sample trained twice": len(trained) == len(set(trained)),
        "no group forgotten": summary["handed_out"] == len(trained) + summary["dropped"] + summary["owed"],
        "no batch over the bound": all(step["staleness"] <= args.staleness for step in both),
        "tokens, versions and log-probs are the servers'": not any(step["wrong"] for step in both),
        # one episode of a small run is more than its share
        "lost to the infrastructure <= 0.05 %": lost_share <= (0.005 if args.smoke else 0.0005),
        "effective training time >= 0.9 of the capacity left": args.smoke or ratio >= 0.9,
        "the log names every cause": args.smoke or not unnamed,
        "one line per change of a server's state": repeated == 0,
        "no task left": summary["tasks_left"] <= 0,
        "no thread or file left": summary["threads_left"] == 0 and summary["files_left"] == 0,
        "memory flat": args.episodes < 50_000 or slope <= 20,
        "every fault was injected": args.smoke or not rare,
    }
    return {
        "episodes": dump["episodes"],
        "ends": dump["ends"],
        "seconds": round(seconds, 1),
        "steps": len(journal),
        "steps rolled back": len(rolled_back),
        "trained groups": len(trained),
        "dropped groups": summary["dropped"],
        "lost to the infrastructure": dict(dump["lost"]),
        "lost with their worker, and drawn again": dump["with_worker"],
        "lost %": round(100 * lost_share, 4),
        "largest staleness": max(step["staleness"] for step in both),
        "tokens/s without faults, before and after": [round(value) for value in quiet],
        "effective training time": round(useful_s / (window[1] - window[0]), 3),
        "effective training time of the capacity left": round(ratio, 3),
        "capacity left": round(left_s / (window[1] - window[0]), 3),
        "causes named": round(named_share, 4),
        "causes not named": dict(Counter(unnamed)),
        "s without a step after a lost node": [
            round(stall_s(both, cause.start, trainer.down), 1) for cause in chaos.causes if cause.kind == "kill node"
        ],
        "faults that lasted": dict(chaos.faults),
        "faults of replies": missing,
        "503 and 429": {kind: faults[kind] for kind in ("503", "429")},
        "misdeeds of episodes": dict(Counter(do for _, do in misdeeds.values())),
        "seconds until all servers were up": round(chaos.recovered_s, 1),
        "lines on servers": dict(states),
        "other lines": dict(others.most_common(8)),
        "memory": f"{summary['memory'][-1][1]:.0f} MB, {slope:+.1f} MB per 100,000 episodes",
        "groups of the last trainer, ended and dumped": [summary["ended"], len(last_ids)],
        "left": {name: summary[name] for name in ("tasks_left", "threads_left", "files_left")},
        "checks": checks,
    }


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = make_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=1200.0, help="of each server")
    parser.add_argument("--launch", choices=("local", "ray"), default="local")
    parser.add_argument("--keep", type=Path, help="folder for the dumps, the journal and the log")
    args = parser.parse_args()
    args.group_size, args.staleness = 4, 4
    args.batch, args.fault_s, args.stop_s, args.timeout_s, args.grace_s, args.more = 96, 3.0, STOP_S, 30.0, 1.0, 1
    if args.smoke:
        args.episodes, args.servers, args.tokens_per_s = 800, 4, 3000.0
        args.batch, args.fault_s, args.stop_s, args.timeout_s, args.grace_s, args.more = 16, 0.3, 0.3, 20.0, 0.3, 5
    args.rounds = max(1, round(args.episodes / 10_000))
    return args


def main() -> None:
    """Run and print."""
    args = parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(folder, args)
    rollout = {
        "backend": "sglang",
        "addresses": [f"127.0.0.1:{port}" for port in chaos.ports],
        "group_size": args.group_size,
        "consumer_batch_size": args.batch,
        "max_head_offpolicyness": args.staleness,
        "max_concurrent_rollouts": 2 * args.batch,
        "over_sampling_groups": args.batch,
        "stale_groups": "redraw",
        "faults": {"episode_timeout_s": args.timeout_s},
        "dump_to_file": True,
    }
    settings = {"rows": max(1000, args.episodes // 3), "seed": args.seed, "grace_s": args.grace_s, "more": args.more}
    settings["rollout"] = rollout
    if chaos.nodes is not None:
        settings["ray"], rollout["workers"] = chaos.nodes.address, 2
    (folder / "settings.json").write_text(json.dumps(settings))
    began = time.monotonic()
    try:
        chaos.run()
        figures = report(chaos, folder, time.monotonic() - began)
    finally:
        chaos.stop()
    if args.keep is None:
        shutil.rmtree(folder)
    print(json.dumps(figures, indent=2))
    of_left = "effective training time of the capacity left"
    report_figures = [
        Figure("effective training time", figures["effective training time"], "", ratio=figures[of_left]),
        Figure("causes that the log names", figures["causes named"], ""),
        Figure("episodes that ended", figures["episodes"], ""),
    ]
    write_figures(args.json, report_figures)
    if failed := [name for name, held in figures["checks"].items() if not held]:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
