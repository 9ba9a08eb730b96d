"""Weight updates over process groups, on real servers of the embedded kind: `rollout.weight_update: broadcast`."""

from __future__ import annotations
import asyncio
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
import pytest
import torch
from transformers import AutoModelForCausalLM
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig, ModelRequest, ModelResponse
from areal_lite.errors import ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.pool import reconciler, server_pool
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.servers.weights import broadcaster as weight_broadcast
from areal_lite.servers.weights.broadcaster import BroadcastGroup, WeightBroadcaster
from areal_lite.servers.weights.published_weights import WeightBroadcast, WeightBucket
from tests.fixtures.tiny_model import build_tiny_model

EXACT = 1e-5
PROMPT = [5, 9, 14, 3, 27]
LONG = 600
"""Tokens of an answer that a busy machine does not finish before its first ones arrive."""


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def distance(answer: ModelResponse, model: Any, start: int = 0, end: int | None = None) -> float:
    """Return the largest gap between log-probs of an answer and the model's own, from token ``start`` to ``end``."""
    logits = model(torch.tensor([answer.input_tokens + answer.output_tokens])).logits[0, answer.input_len - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.output_tokens)[:, None])[:, 0]
    return float((expected - torch.tensor(answer.output_logprobs))[start:end].abs().max())


def generate(engine: RemoteInfEngine, max_new_tokens: int = 8) -> ModelResponse:
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, ignore_eos=True)
    return asyncio.run(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=1024)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of other weights; its embeddings are tied, as the served ones."""
    return load(build_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1, context=1024))


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(server_pool, "FIRST_REST_S", 0.05)
    monkeypatch.setattr(reconciler, "WATCH_S", 0.05)
    with ExitStack() as stack:
        yield stack


def serve(stack: ExitStack, model: Path) -> EmbeddedServer:
    return stack.enter_context(EmbeddedServer(model_path=str(model), dtype="float32", num_threads=1, device="cpu"))


def connect(stack: ExitStack, *servers: EmbeddedServer, **settings: Any) -> RemoteInfEngine:
    config = InferenceEngineConfig(addresses=[server.address for server in servers], **settings)
    return stack.enter_context(RemoteInfEngine(config))


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[EmbeddedServer]:
    """For tests that leave it running."""
    with ExitStack() as stack:
        yield serve(stack, tiny)


@pytest.fixture
def engine(stack: ExitStack, server: EmbeddedServer, tiny: Path) -> RemoteInfEngine:
    """An engine on it, which has its first weights."""
    engine = connect(stack, server)
    engine.update_weights_from_disk(str(tiny), 0)
    return engine


class Broadcaster(WeightBroadcaster):
    """Remembers the groups that it opened."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, dtype=torch.float32)
        self.groups: list[BroadcastGroup] = []

    def open_group(self, host: str, *, num_ranks: int, device: str | None) -> BroadcastGroup:
        self.groups.append(super().open_group(host, num_ranks=num_ranks, device=device))
        return self.groups[-1]


def post(server: EmbeddedServer, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_broadcast_weights_are_served_bit_for_bit_and_training_on_does_not_change_them(
    stack: ExitStack, server: EmbeddedServer, tiny: Path, other: Any, backend: str
) -> None:
    engine = connect(stack, server, backend=backend)  # SGLang's is paused while it receives
    model = load(tiny)
    sender = Broadcaster(model)
    for version, source in ((1, other), (2, load(tiny)), (3, other)):
        model.load_state_dict(source.state_dict())
        weights = sender.publish(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        engine.update_weights(weights)
        answer = generate(engine)
        assert set(answer.output_versions) == {version}
        assert distance(answer, source) < EXACT
    assert len(sender.groups) == 1  # one group serves all updates


class SlowGroup:
    """Wraps a group: sends all but the last tensor, and that once it is released."""

    def __init__(self, group: BroadcastGroup, released: threading.Event) -> None:
        self.group = group
        self.arrived, self.released = threading.Event(), released

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, bucket: WeightBucket) -> None:
        names = list(bucket.tensors)
        self.group.send(WeightBucket({name: bucket.tensors[name] for name in names[:-1]}))
        self.arrived.set()
        self.released.wait(30)
        self.group.send(WeightBucket({names[-1]: bucket.tensors[names[-1]]}))


class SlowSender:
    """Opens slow groups."""

    def __init__(self, sender: WeightBroadcaster) -> None:
        self.sender = sender
        self.groups: list[SlowGroup] = []
        self.released = threading.Event()

    def open_group(self, host: str, *, num_ranks: int, device: str | None) -> Any:
        group = self.sender.open_group(host, num_ranks=num_ranks, device=device)
        self.groups.append(SlowGroup(group, self.released))
        return self.groups[-1]

    def until_arrived(self, count: int) -> None:
        until(lambda: len(self.groups) == count and all(group.arrived.is_set() for group in self.groups))


def begin_slow_update(engine: RemoteInfEngine, sender: WeightBroadcaster) -> tuple[threading.Thread, SlowSender]:
    slow = SlowSender(sender)
    weights = WeightBroadcast(1, sender.publish(1).buckets, slow)
    update = threading.Thread(target=engine.update_weights, args=(weights,))
    update.start()
    return update, slow


@pytest.mark.parametrize("pause", ["abort", "keep"])
def test_a_running_answer_goes_on_under_the_new_weights_and_its_versions_say_from_where(
    stack: ExitStack, server: EmbeddedServer, tiny: Path, other: Any, pause: str
) -> None:
    engine = connect(stack, server, weight_update_pause=pause)
    engine.update_weights_from_disk(str(tiny), 0)
    update, sender = begin_slow_update(engine, Broadcaster(other))
    sender.until_arrived(1)

    def receive(new: Sequence[int], logprobs: Sequence[float]) -> None:
        if not sender.released.is_set():
            post(server, "/pause_generation", {"mode": "retract"})  # or the answer might end before the update does
            sender.released.set()

    gconfig = GenerationHyperparameters(max_new_tokens=LONG, ignore_eos=True)
    answer = asyncio.run(engine.agenerate(ModelRequest(input_ids=PROMPT, gconfig=gconfig, on_tokens=receive)))
    update.join()
    switch = answer.output_versions.index(1)
    assert answer.output_versions == [0] * switch + [1] * (LONG - switch)
    assert 0 < switch < LONG
    assert answer.attempts == (1 if pause == "keep" else 2)
    assert distance(answer, load(tiny), 0, switch) < EXACT
    assert distance(answer, other, switch) < EXACT


def test_a_server_generates_while_it_receives(
    stack: ExitStack, engine: RemoteInfEngine, tiny: Path, other: Any
) -> None:
    update, sender = begin_slow_update(engine, Broadcaster(other))
    sender.until_arrived(1)
    assert [one.daemon for one in threading.enumerate() if one.name == "weight broadcast"] == [True]  # it may hang
    answer = generate(engine)
    assert set(answer.output_versions) == {0}
    assert distance(answer, load(tiny)) < EXACT
    sender.released.set()
    update.join()
    assert distance(generate(engine), other) < EXACT


def test_a_server_killed_in_mid_broadcast_delays_no_other_and_catches_up_when_it_is_back(
    stack: ExitStack, server: EmbeddedServer, tiny: Path, other: Any
) -> None:
    victim = serve(stack, tiny)
    engine = connect(stack, server, victim)
    engine.update_weights_from_disk(str(tiny), 0)
    update, sender = begin_slow_update(engine, Broadcaster(other))
    sender.until_arrived(2)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait(10)
    sender.released.set()
    update.join(20)
    assert not update.is_alive()
    assert engine.get_version() == 1
    servers = engine._client.pool.servers
    assert [one.usable for one in servers] == [True, False]
    assert distance(generate(engine), other) < EXACT

    victim.launch()
    victim.wait_until_ready()  # with the first weights, as version 0, in no process group
    until(lambda: all(one.usable for one in servers))
    for _ in range(4):
        answer = generate(engine)
        assert set(answer.output_versions) == {1}
        assert distance(answer, other) < EXACT
    first, second = [logprobs for _, _, logprobs in engine.probe(PROMPT, 8)]
    assert first == pytest.approx(second, abs=EXACT)


def test_a_server_that_lost_its_group_gets_the_next_update_over_a_new_one(
    stack: ExitStack, server: EmbeddedServer, engine: RemoteInfEngine, other: Any
) -> None:
    sender = Broadcaster(other)
    engine.update_weights(sender.publish(1))
    (group,) = sender.groups
    assert post(server, "/destroy_weights_update_group", {"group_name": group.name})["success"]
    engine.update_weights(sender.publish(2))
    answer = generate(engine)
    assert set(answer.output_versions) == {2}
    assert distance(answer, other) < EXACT


def test_weights_that_a_server_refuses_change_nothing(stack: ExitStack, engine: RemoteInfEngine, other: Any) -> None:
    sender = Broadcaster(other)
    engine.update_weights(sender.publish(1))
    complete = sender.publish(2)
    (bucket,) = complete.buckets
    lacking = WeightBucket({name: bucket.tensors[name] for name in list(bucket.tensors)[:-1]})
    with pytest.raises(ServerError, match="no server took policy version 2 by broadcast: .*lacks 'model"):
        engine.update_weights(WeightBroadcast(2, [lacking], sender))
    assert all(group.closed for group in sender.groups)
    assert engine.get_version() == 1
    answer = generate(engine)
    assert set(answer.output_versions) == {1}
    assert distance(answer, other) < EXACT
    engine.update_weights(complete)
    assert set(generate(engine).output_versions) == {2}


def test_a_hung_server_keeps_the_old_weights_and_the_update_can_be_left_at_once(
    stack: ExitStack, server: EmbeddedServer, engine: RemoteInfEngine, other: Any
) -> None:
    sender = Broadcaster(other)
    engine.update_weights(sender.publish(1))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await engine.aupdate_weights(sender.publish(2))

        began = time.monotonic()
        asyncio.run(leave())
        assert time.monotonic() - began < 3.0
        until(lambda: not [thread for thread in threading.enumerate() if thread.name == "weight broadcast"])
        assert time.monotonic() - began < 12.0
    finally:
        os.kill(server.pid, signal.SIGCONT)
    answer = generate(engine)
    assert set(answer.output_versions) == {1}
    engine.update_weights(sender.publish(3))
    assert set(generate(engine).output_versions) == {3}


def test_large_models_are_sent_in_buckets(
    stack: ExitStack, engine: RemoteInfEngine, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "MAX_BUCKET_BYTES", 10_000)
    weights = Broadcaster(other).publish(1)
    assert len(weights.buckets) > 2
    engine.update_weights(weights)
    assert distance(generate(engine), other) < EXACT
