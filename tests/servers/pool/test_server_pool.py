"""Routing: the usable server with the fewest outstanding tokens, whatever happened before."""

from __future__ import annotations
import logging
import random
from collections import Counter
import pytest
from areal_lite.errors import ConfigError
from areal_lite.servers.pool import server_pool
from areal_lite.servers.pool.server_pool import Server, ServerPool


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
                pool.set_state(server, "behind", "old")
            elif event < 0.65 and not server.usable:
                pool.set_state(server, "trial")
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


def test_the_server_of_least_load_is_picked_after_every_change_of_loads() -> None:
    draw, pool = random.Random(2), ServerPool(["s:0", "s:1"])
    for _ in range(5000):
        loads = dict(zip(pool.servers, draw.sample(range(50, 150), 2), strict=True))
        for server, tokens in loads.items():
            pool.start(server, tokens, 0.0)
        assert pool.pick() is min(loads, key=lambda server: loads[server])
        first, second = draw.sample(pool.servers, 2)
        pool.end(first, loads[first])
        assert pool.pick() is first
        pool.end(second, loads[second])
        if draw.random() < 0.5:
            assert pool.pick(avoid=[first]) is second


def test_the_only_server_is_picked_while_it_takes_requests() -> None:
    pool = ServerPool(["s:0"])
    (server,) = pool.servers
    server.limit = server.capacity = 1
    for preferred in (None, server):
        assert pool.pick(preferred=preferred) is pool.pick(preferred=preferred, avoid=[server]) is server
        pool.start(server, 10, 0.0)
        assert pool.pick(preferred=preferred) is pool.pick(preferred=preferred, avoid=[server]) is None
        pool.end(server, 10)


def test_what_runs_on_a_server_is_what_was_started_and_has_not_ended() -> None:
    draw, pool = random.Random(3), ServerPool(["s:0", "s:1"])
    running: list[tuple[int, str | None, bool]] = []
    server, busy_since = pool.servers[0], 0.0
    assert (server.outstanding, server.load, server.staying) == (0, 0, 0)
    for now in range(1, 500):
        if running and draw.random() < 0.5:
            tokens, adapter, stays = running.pop(draw.randrange(len(running)))
            if stays or adapter:
                pool.end(server, tokens, adapter=adapter, stays=stays)
            else:
                pool.end(server, tokens)
        else:
            request = draw.randint(1, 9), draw.choice([None, "a", "b"]), draw.random() < 0.5
            busy_since = busy_since if running else now
            running.append(request)
            tokens, adapter, stays = request
            if stays or adapter:
                pool.start(server, tokens, now, adapter=adapter, stays=stays)
            else:
                pool.start(server, tokens, now)
        assert server.outstanding == len(running)
        assert server.load == sum(tokens for tokens, _, _ in running)
        assert server.staying == sum(stays for _, _, stays in running)
        assert server.adapters_in_use == Counter(adapter for _, adapter, _ in running if adapter)
        assert len(server.adapters_in_use) == len({adapter for _, adapter, _ in running if adapter})
        assert server.busy_since == busy_since


def test_a_server_gets_one_request_on_trial_none_while_it_rests_and_is_healthy_after_an_answer() -> None:
    """Over random histories; an answer that was sent before a failure changes nothing."""
    draw = random.Random(5)
    for _ in range(30):
        pool = ServerPool(["s:0", "s:1"])
        server = pool.servers[0]
        assert not server.unhealthy and server.state == "up"
        failures = 0
        for now in range(60):
            before, was = server.out, server.state
            event = draw.choice(["failed", "rest", "behind", "again", "slow", "answer", "wait", "429"])
            if event == "failed":
                at_once = draw.random() < 0.3
                failures += 1
                rests = was != "down" and (at_once or was == "trial" or failures >= server_pool.FAILURES_TO_OPEN)
                assert pool.failed(server, f"failure {now}", at_once=at_once) == rests
                assert server.last_failure == f"failure {now}" and server.unhealthy
            elif event == "rest":
                pool.rest(server, f"rest {now}")
                assert (server.reason, server.state, server.unhealthy) == (f"rest {now}", "down", True)
            elif event == "behind":
                pool.set_state(server, "behind", f"old {now}")
                assert server.reason == f"old {now}" and server.unhealthy
            elif event == "again" and before:
                pool.set_state(server, "trial")
                assert server.unhealthy and not server.reason and server.said == was
                assert server.capacity == (1 if not server.waits else 0)
            elif event == "slow" and was == "up":
                pool.set_state(server, "slow", "slow")
                assert server.unhealthy and server.said == "slow"
            elif event == "answer":
                pool.succeeded(server, 1, 0.1, now)
                assert server.heard == now
                assert server.unhealthy == before
                if not before:
                    assert (server.state, server.failures, server.rest_s) == ("up", 0, 0)
                    failures = 0
            elif event == "wait":
                pool.wait(server, 1)
                pool.wait(server, 1)
                pool.wait(server, -1)
                assert not server.usable
                pool.wait(server, -1)
            elif event == "429":
                limit = server.limit
                pool.throttled(server, f"429 {now}", sent=now, now=now)
                assert server.limit < limit or server.limit == 1
                assert server.unhealthy and server.last_failure == f"429 {now}"
            trial = server.state == "trial"
            assert server.capacity == (0 if server.out else 1 if trial else server.limit)
            assert server.state == "up" or server.unhealthy
            assert trial or server.said == server.state


def test_a_limit_begins_with_the_first_429_and_never_falls_below_one_request() -> None:
    pool = ServerPool(["s:0"])
    (server,) = pool.servers
    for _ in range(4):
        pool.start(server, 1, 0.0)
    pool.throttled(server, "429", sent=0.0, now=0.0)
    assert server.limit == 2 and not server.usable
    for now in (1.0, 2.0, 3.0):
        pool.throttled(server, "429", sent=now, now=now)
    assert server.limit == 1


def test_a_change_of_state_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    pool = ServerPool(["s:0"])
    (server,) = pool.servers
    with caplog.at_level(logging.WARNING):
        pool.wait(server, 1)
        pool.wait(server, -1)
        pool.set_state(server, "slow", "silent")
        pool.set_state(server, "slow", "silent")
        pool.rest(server, "reset")
        pool.rest(server, "reset")
        pool.set_state(server, "trial")
        pool.recovered(server)
        pool.set_state(server, "behind", "old")
        pool.set_state(server, "up", "it has version 3")
    said = ["slow: silent", "down: reset", "back: it answers again", "behind: old", "back: it has version 3"]
    assert caplog.messages == [f"server http://s:0 is {line}" for line in said]


def test_the_first_failure_of_each_form_is_logged_once_and_needs_no_change_of_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = ServerPool(["s:0", "s:1"])
    server, other = pool.servers
    first = [
        "said HTTP 500: broken 7", "said HTTP 503: broken 7", "sent 4 tokens for 3", "sent the answer to 'a', not 'b'",
    ]  # fmt: skip
    with caplog.at_level(logging.INFO):
        for reason in (*first, "said HTTP 500: broken 8", "sent 9 tokens for 33", "sent the answer to 'c', not 'd'"):
            pool.failed(server, reason)
            pool.recovered(server)
        pool.failed(other, first[0])
        for now in (1.0, 2.0):
            pool.throttled(other, f"said HTTP 429: busy {now}", sent=now, now=now)
        for number in range(100):
            other.say_once("a" * number)
    said = [f"server http://s:0 {reason}; such requests are sent again" for reason in first]
    said += [f"server http://s:1 {first[0]}; such requests are sent again"]
    said += ["server http://s:1 said HTTP 429: busy 1.0; it gets fewer requests"]
    assert caplog.messages[: len(said)] == said
    assert len(caplog.messages) == len(said) + server_pool.MAX_REPORTED - 2
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize("address", ["localhost", ":30000", "host:port", "http://host", "http://:30000/", ""])
def test_an_address_needs_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=f"the.addresses holds '{address}': write host:port"):
        ServerPool([address], key="the.addresses")
    with pytest.raises(ConfigError, match="rollout.addresses is empty"):
        ServerPool([])
    urls = [server.url for server in ServerPool(["host:1", "https://host:2/", "[::1]:3"]).servers]
    assert urls == ["http://host:1", "https://host:2", "http://[::1]:3"]


def test_each_rest_in_a_row_is_longer_and_at_most_a_quarter_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_REST_S", 1.0)
    pool = ServerPool(["s:0"])
    server, rests = pool.servers[0], [0.0]
    for _ in range(20):
        pool.rest(server, "down")
        assert rests[-1] < server.rest_s <= 1.0 + sum(rests) / 4 or server.rest_s == server_pool.MAX_REST_S
        rests.append(server.rest_s)
        pool.set_state(server, "trial")
    assert rests[-1] == server_pool.MAX_REST_S
    pool.recovered(server)
    pool.rest(server, "down")
    assert server.rest_s == 1.0


def test_the_figures_of_a_server_count_every_request() -> None:
    pool = ServerPool(["s:0"])
    server = pool.servers[0]
    assert {name: figure for name, figure in server.metrics().items() if figure} == {"up": 1.0, "version": -1.0}
    for latency_s in (0.5, 0.1, 0.3, 0.4, 0.2):
        pool.start(server, 10, 0.0)
        pool.succeeded(server, 4, latency_s, 1.0)
        pool.end(server, 10)
    pool.start(server, 10, 2.0)
    assert not pool.failed(server, "reset") and not pool.failed(server, "reset")
    server.version = 3
    assert server.metrics() == {
        "up": 1.0, "version": 3.0, "requests": 6.0, "tokens": 20.0, "failures": 2.0, "bad_replies": 0.0,
        "outstanding": 1.0, "latency_p50_s": 0.3, "latency_p95_s": 0.5,
    }  # fmt: skip
