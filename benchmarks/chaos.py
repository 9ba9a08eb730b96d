"""What faults of every kind cost a run: eight servers that fail, episodes that misbehave, a trainer that is killed.

Servers (``chaos_server.py``) and trainer (``chaos_trainer.py``) are processes of their own. Episodes take several turns
with a tool between them; a seed decides their lengths and every fault:

- of one reply: connection reset, 500, truncated, not JSON, wrong lengths, NaN, an id beyond the vocabulary, no token,
  too many, a version from the future, a slow drip; another request's id, another prompt's length, a first token of a
  version from the future, below 0, of 30 digits or with a fraction, a log-prob that is inf in float32, no end
- of servers: killed and started again with the first weights, stopped and continued, 503, 429 with Retry-After, updates
  that are acknowledged and not loaded, connections refused by half of them at once
- of the trainer: killed and resumed from its checkpoint, a slow disk under the dumps
- of episodes: raise, SystemExit, cancel themselves, hang, swallow their cancellation, leak a task, block the event loop

Before and after the faults the same run goes undisturbed, which measures its speed without them.

    python benchmarks/chaos.py [--smoke | --episodes 100000] [--seed 1]

Prints one JSON object; the exit code is 1 if a check failed. docs/benchmarks.md has figures.
"""

from __future__ import annotations

import argparse
import json
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
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos_server import REPLY_FAULTS
from benchmarks.report import Figure, make_parser, write_figures

HERE = Path(__file__).parent

QUIET_SHARE = 0.1
"""Share of the groups before the faults, and again after them."""
RESTART_S = 1.0
"""Seconds for which a killed server stays away."""
LASTING = ("kill", "stop", "503", "429", "stays old", "partition", "slow disk", "kill trainer")
"""Faults that last; each round has all of them in a random order."""


class ServerProcess:
    """A server that can be killed and started again on its port."""

    def __init__(self, port: int, *, seed: int, tokens_per_s: float) -> None:
        self.port = port
        self.faults: Counter[str] = Counter()
        self.replies = 0
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
        self.faults.update(counts["faults"])
        self.replies += counts["replies"]

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
        self._down_since: float | None = None
        self._folder = folder
        self._chaos = False
        self._stderr = (folder / "stderr.txt").open("ab")

    def start(self) -> None:
        """Start or resume."""
        command = [sys.executable, str(HERE / "chaos_trainer.py"), str(self._folder)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._stderr, text=True)
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
        self.order(chaos=self._chaos)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.news.put(json.loads(line) | {"pid": process.pid})
        self.news.put({"pid": process.pid, "exit": process.wait()})

    def order(self, **order: Any) -> None:
        """Send an order."""
        self._chaos = order.get("chaos", self._chaos)
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
        if "done" in news:
            self.summary = news
        self.ended = news["ended"] if "step" in news and "ended" in news else self.ended
        self.up = news.get("up", self.up)


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
        self.faults: Counter[str] = Counter()
        self.windows: dict[str, tuple[float, float]] = {}
        """Beginning and end of each phase."""
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
        began, rounds = self.trainer.ended_before + self.trainer.ended, self.args.rounds
        kinds = [
            kind
            for i in range(rounds)
            for kind in self.draw.sample(LASTING, len(LASTING))
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
            assert time.monotonic() < changed + 120, f"nothing has ended for 120 s, at {now} of {groups:.0f} groups"

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
        sound = [server for server in self.servers if not self._is_down(server)]
        if kind in ("kill trainer", "slow disk") or not sound:
            return
        half = len(self.servers) // 2
        for server in self.draw.sample(sound, min(len(sound), half)) if kind == "partition" else [sound[0]]:
            self._disturb(server, kind, seconds)
        self.draw.shuffle(self.servers)

    def _disturb(self, server: ServerProcess, kind: str, seconds: float) -> None:
        now = time.time()
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


def read_dumps(folder: Path, misdeeds: dict[Any, str]) -> dict[str, Any]:
    """Return what the dump says: groups by their end, twins, and episodes that the infrastructure lost."""
    ends: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    episodes = twins = torn = 0
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
            do = misdeeds.get(line["task_id"])
            if line["status"] == "failed" and (line["error_kind"] == "engine" or do is None):
                lost[f"{line['error_kind']}: {line['error'].strip().splitlines()[-1][:160]}"] += 1
    return {"groups": ids, "episodes": episodes, "ends": dict(ends), "twins": twins, "torn": torn, "lost": lost}


def tokens_per_s(steps: list[dict[str, Any]], window: tuple[float, float], capacity_s: float | None = None) -> float:
    """Return the speed at which batches came in a window, per second of ``capacity_s`` if given."""
    inside = [step for step in steps if window[0] <= step["time"] <= window[1]]
    if len(inside) < 2:
        return 0.0
    if capacity_s is None:  # the first batch was begun before the window
        capacity_s = inside[-1]["time"] - inside[0]["time"]
        inside = inside[1:]
    return float(sum(step["tokens"] for step in inside)) / max(capacity_s, 1e-9)


def capacity_s(chaos: Chaos) -> float:
    """Return the seconds of the chaos in which servers and trainer could work; a server's count by its share."""
    started, ended = chaos.windows["chaos"]
    tick, total, now = 0.02, 0.0, started
    while now < ended:
        if not any(low <= now < high for low, high in chaos.trainer.down):
            up = sum(not any(low <= now < high for low, high in server.down) for server in chaos.servers)
            total += tick * up / len(chaos.servers)
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
    misdeeds = {task_id: do for task_id, _, do in read_lines(folder / "misdeeds.jsonl")}
    dump = read_dumps(folder / "runs", misdeeds)
    trained = [number for step in journal for _, number in step["groups"]]
    trained_ids = [task_id for step in journal for task_id, _ in step["groups"]]
    faults: Counter[str] = sum((server.faults for server in chaos.servers), Counter())
    replies = sum(server.replies for server in chaos.servers)
    missing = {kind: f"{faults[kind]} of {share * replies:.0f}" for kind, share in REPLY_FAULTS.items()}
    rare = [k for k, share in REPLY_FAULTS.items() if faults[k] < 0.8 * share * replies - 3 * (share * replies) ** 0.5]
    states, repeated, others = state_lines(folder / "trainer.log")
    both = sorted([*journal, *rolled_back], key=lambda step: float(step["time"]))
    quiet = [tokens_per_s(both, chaos.windows[name]) for name in ("before", "after")]
    left_s = capacity_s(chaos)
    speed = tokens_per_s(both, chaos.windows["chaos"], left_s)
    lost_share = sum(dump["lost"].values()) / dump["episodes"]
    last_ids = {task_id for task_id in dump["groups"] if task_id >= summary["first_id"]}
    ratio = speed / (sum(quiet) / 2)
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
        "throughput >= 0.8 of the capacity left": args.smoke or ratio >= 0.8,
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
        "lost %": round(100 * lost_share, 4),
        "largest staleness": max(step["staleness"] for step in both),
        "tokens/s without faults, before and after": [round(value) for value in quiet],
        "tokens/s of the capacity left": round(speed),
        "throughput": round(ratio, 3),
        "capacity left": round(left_s / (chaos.windows["chaos"][1] - chaos.windows["chaos"][0]), 3),
        "faults that lasted": dict(chaos.faults),
        "faults of replies": missing,
        "503 and 429": {kind: faults[kind] for kind in ("503", "429")},
        "misdeeds of episodes": dict(Counter(misdeeds.values())),
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
    parser.add_argument("--keep", type=Path, help="folder for the dumps, the journal and the log")
    args = parser.parse_args()
    args.group_size, args.staleness = 4, 4
    args.batch, args.fault_s, args.timeout_s, args.grace_s, args.more = 96, 3.0, 30.0, 1.0, 1
    if args.smoke:
        args.episodes, args.servers, args.tokens_per_s = 800, 4, 3000.0
        args.batch, args.fault_s, args.timeout_s, args.grace_s, args.more = 16, 0.3, 20.0, 0.3, 5
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
    speed = "tokens/s of the capacity left"
    report_figures = [
        Figure("trained, with faults", figures[speed], "tokens/s", ratio=figures["throughput"]),
        Figure("episodes that ended", figures["episodes"], ""),
    ]
    write_figures(args.json, report_figures)
    if failed := [name for name, held in figures["checks"].items() if not held]:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
