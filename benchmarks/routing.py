"""Time and fairness of choosing a server among a thousand, without any network.

Simulates requests over servers of equal speed: each is sent to the server that the pool picks, and ends after a time
that its size decides. Sizes are log-normal, 256 tokens at least. With session affinity the four turns of an episode
stay on their server, so that its load depends on which episodes it has.

    python benchmarks/routing.py [--servers 1000] [--requests 400000] [--per-server 64]

Bars: at most 20 us per request, all bookkeeping included; without affinity, the outstanding tokens of the fullest and
the emptiest tenth of the servers within 5 % of the mean.
"""

from __future__ import annotations
import heapq
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from areal_lite.servers.pool.server_pool import Server, ServerPool
from benchmarks.report import Figure, make_parser, write_figures


def simulate(servers: int, requests: int, in_flight: int, turns: int) -> tuple[float, list[int], float]:
    """Return microseconds per request, tokens sent to each server, and the worst spread of outstanding tokens."""
    draw = random.Random(1)
    pool = ServerPool([f"10.0.{i // 250}.{i % 250}:30000" for i in range(servers)])
    sent = [0] * servers
    running: list[tuple[float, int, Server, int, int]] = []
    spent, spread, clock = 0.0, 0.0, 0.0
    for number in range(requests):
        preferred, left = None, turns - 1
        if len(running) >= in_flight:
            clock, _, ended, tokens, left = heapq.heappop(running)
            began = time.thread_time()
            pool.end(ended, tokens)
            spent += time.thread_time() - began
            if left:
                preferred, left = ended, left - 1
            else:
                left = turns - 1
        tokens = 256 + int(draw.lognormvariate(6, 0.8))
        began = time.thread_time()
        server = pool.pick(preferred=preferred)
        assert server is not None
        pool.start(server, tokens, clock)
        spent += time.thread_time() - began
        sent[server.index] += tokens
        heapq.heappush(running, (clock + tokens * draw.uniform(0.8, 1.2), number, server, tokens, left))
        if number > in_flight and number % (requests // 80) == 0:
            loads = sorted(one.load for one in pool.servers)
            tenth, mean = max(1, servers // 10), statistics.mean(loads)
            spread = max(spread, 1 - statistics.mean(loads[:tenth]) / mean, statistics.mean(loads[-tenth:]) / mean - 1)
    return spent / requests * 1e6, sent, spread


def main() -> None:
    """Run and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--per-server", type=int, default=64, help="requests in flight")
    args = parser.parse_args()
    if args.smoke:
        args.servers, args.requests, args.per_server = 20, 2000, 8
    figures = []
    for name, turns in (("one turn", 1), ("four turns with affinity", 4)):
        cost, sent, spread = simulate(args.servers, args.requests, args.per_server * args.servers, turns)
        mean = statistics.mean(sent)
        print(
            f"{name:25} {cost:5.1f} us per request; tokens per server: mean {mean:.0f}, standard deviation "
            f"{statistics.pstdev(sent) / mean:.1%}; outstanding tokens, worst tenth: {spread:.1%} off the mean"
        )
        figures += [Figure(f"{name}: CPU per request", cost, "us")]
        figures += [Figure(f"{name}: worst tenth, off the mean", 100 * spread, "%")]
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
