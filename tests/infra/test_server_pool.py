"""Routing: the usable server with the fewest outstanding tokens, whatever happened before."""

from __future__ import annotations

import random

import pytest

from areal_lite.infra import server_pool
from areal_lite.infra.server_pool import Server, ServerPool


def test_every_pick_has_the_fewest_outstanding_tokens_of_all_usable_servers() -> None:
    """Against a search through all servers, over random histories."""
    draw = random.Random(7)
    for _ in range(20):
        pool = ServerPool([f"s:{i}" for i in range(draw.randint(2, 12))])
        running: list[tuple[Server, int]] = []
        for now in range(400):
            event = draw.random()
            server = draw.choice(pool.servers)
            if event < 0.4 and running:
                server, tokens = running.pop(draw.randrange(len(running)))
                pool.end(server, tokens)
                if draw.random() < 0.5:
                    pool.succeeded(server, tokens, 0.1, now)
            elif event < 0.45:
                pool.failed(server, "reset")
            elif event < 0.5:
                pool.throttled(server, "429", sent=now, now=now)
            elif event < 0.55:
                pool.set_behind(server, "old")
            elif event < 0.65 and not server.usable:
                pool.try_again(server)
            else:
                avoid = draw.sample(pool.servers, draw.choice([0, 0, 1, 2]))
                preferred = draw.choice([None, None, server])
                picked = pool.pick(preferred=preferred, avoid=avoid)
                usable = [s for s in pool.servers if s.usable]
                if not usable:
                    assert picked is None
                    continue
                assert picked is not None
                assert picked.usable
                if preferred is not None and preferred.usable and preferred not in avoid:
                    assert picked is preferred
                else:
                    choice = [s for s in usable if s not in avoid] or usable
                    assert picked.load == min(s.load for s in choice)
                tokens = draw.randint(1, 1000)
                pool.start(picked, tokens, now)
                running.append((picked, tokens))


@pytest.mark.parametrize("count", [2, 50])
def test_equal_requests_are_spread_evenly(count: int) -> None:
    pool = ServerPool([f"s:{i}" for i in range(count)])
    for number in range(count * 20):
        server = pool.pick()
        assert server is not None
        pool.start(server, 100, 0.0)
        if number % 3 == 0:
            pool.end(server, 100)
    requests = [server.requests for server in pool.servers]
    assert max(requests) - min(requests) <= 20 * 0.05 * 20


def test_the_heap_does_not_grow_with_requests() -> None:
    pool = ServerPool([f"s:{i}" for i in range(10)])
    for _ in range(5000):
        server = pool.pick(preferred=pool.servers[0])
        assert server is not None
        pool.start(server, 10, 0.0)
        pool.end(server, 10)
    assert len(pool._heap) < 200


def test_each_rest_in_a_row_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_REST_S", 1.0)
    pool = ServerPool(["s:0"])
    server, rests = pool.servers[0], []
    for _ in range(9):
        pool.rest(server, "down")
        rests.append(server.rest_s)
        pool.try_again(server)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, *[server_pool.MAX_REST_S] * 4]
    pool.recovered(server)
    pool.rest(server, "down")
    assert server.rest_s == 1.0


def test_the_figures_of_a_server_count_every_request() -> None:
    pool = ServerPool(["s:0"])
    server = pool.servers[0]
    for latency_s in (0.5, 0.1, 0.3):
        pool.start(server, 10, 0.0)
        pool.succeeded(server, 4, latency_s, 1.0)
        pool.end(server, 10)
    pool.start(server, 10, 2.0)
    assert not pool.failed(server, "reset") and not pool.failed(server, "reset")
    assert server.metrics() == {
        "up": 1.0, "version": -1.0, "requests": 4.0, "tokens": 12.0, "failures": 2.0, "bad_replies": 0.0,
        "outstanding": 1.0, "latency_p50_s": 0.3, "latency_p95_s": 0.5,
    }  # fmt: skip
