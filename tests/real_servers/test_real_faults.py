"""Two real servers of a tiny model, and what the engine does when one dies or comes back with old weights."""

from __future__ import annotations
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal
import psutil
import pytest
import torch
from areal_lite.api import EpisodeStatus, GenerationHyperparameters, InferenceEngineConfig
from areal_lite.api.trajectory import Group
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.fixtures.tiny_model import build_tiny_model
from tests.real_servers.contract import AGENT, EXACT, ROW, answers_of, distance
from tests.real_servers.launch import real_process
from tests.real_servers.real_server import Policy

EPISODES = 16
TOKENS = 800
SOAK_S = float(os.environ.get("AREAL_LITE_SOAK_S", "1200"))
GROWTH_MB = 60.0
"""What the run's process may gain after the first quarter of the soak."""


class Pair:
    """Two servers, either of which can be killed and started again on its port."""

    def __init__(self, backend: Literal["sglang", "vllm", "embedded"], folder: Path) -> None:
        self.backend = backend
        self.old, self.new = (
            Policy(build_tiny_model(folder / f"v{seed}", seed=seed, hidden_size=128, context=2048)) for seed in (0, 1)
        )
        self.servers = [real_process(backend, self.old.path, folder / str(index)) for index in (0, 1)]

    def kill(self, index: int) -> None:
        """Kill a server as `kill -9` does."""
        self.signal(index, signal.SIGKILL)
        self.servers[index].wait()

    def signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a server and all its processes."""
        pid = self.servers[index].pid
        assert pid is not None
        os.killpg(pid, number)

    def engine(self) -> RemoteInfEngine:
        gconfig = GenerationHyperparameters(max_new_tokens=TOKENS, ignore_eos=True)
        addresses = [server.address for server in self.servers]
        return RemoteInfEngine(
            InferenceEngineConfig(
                backend=self.backend, addresses=addresses, tokenizer_path=str(self.old.path), gconfig=gconfig
            )
        )


@pytest.fixture(scope="class")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(request.cls.backend, tmp_path_factory.mktemp("pair"))
    with ExitStack() as stack:
        for server in pair.servers:
            stack.enter_context(server)
        yield pair


def check(groups: list[Group], policies: dict[int, Policy]) -> set[int]:
    """Check that every episode ended well, with the log-probs of the version that its tokens name; return these."""
    named: set[int] = set()
    for group in groups:
        assert group.status is EpisodeStatus.ACCEPTED, group.error
        (answer,) = answers_of(group.trajectories[0])
        assert answer.output_len == TOKENS
        expected = {version: policies[version].logprobs(answer) for version in set(answer.output_versions)}
        rows = [expected[version][place] for place, version in enumerate(answer.output_versions)]
        assert distance(answer, torch.stack(rows)) < EXACT
        named |= set(answer.output_versions)
    return named


class PairContract:
    """What the engine keeps while servers die and come back."""

    def test_a_killed_server_loses_no_episode(self, pair: Pair) -> None:
        with pair.engine() as engine, ThreadPoolExecutor() as pool:
            servers = engine._client.pool.servers
            while not servers[0].failed_requests:  # on a busy machine its answers may end before it is killed
                groups = pool.submit(run, engine)
                while not all(server.outstanding for server in servers):
                    time.sleep(0.1)
                time.sleep(0.5)
                pair.kill(0)
                check(groups.result(), {0: pair.old})
                pair.servers[0].start()

    def test_a_server_that_returns_with_old_weights_labels_its_tokens_with_their_version(self, pair: Pair) -> None:
        policies = {0: pair.old, 1: pair.new, 2: pair.new}
        with pair.engine() as engine:
            engine.update_weights_from_disk(str(pair.new.path), 1)
            assert check(run(engine), policies) == {1}
            pair.kill(0)
            pair.servers[0].start()
            check(run(engine), policies)
            engine.update_weights_from_disk(str(pair.new.path), 2)
            assert check(run(engine), policies) == {2}

    def test_minutes_of_faults_lose_no_episode_and_leave_memory_flat(self, pair: Pair) -> None:
        """T7: servers are killed and return with old weights, hang, and get new weights, while episodes run."""
        chance, memory, end = random.Random(5), [], time.monotonic() + SOAK_S
        version, groups = 3, 0  # above those of the tests before
        policies = {version: pair.old}
        own = psutil.Process()
        with pair.engine() as engine, ThreadPoolExecutor() as pool:
            engine.update_weights_from_disk(str(pair.old.path), version)
            while time.monotonic() < end:
                running = pool.submit(run, engine)
                index, kind = chance.randrange(2), chance.choice(("kill", "hang", "update", "nothing"))
                time.sleep(chance.random() * 3)
                if kind == "kill":
                    pair.kill(index)
                    pair.servers[index].start()
                elif kind == "hang":
                    pair.signal(index, signal.SIGSTOP)
                    time.sleep(chance.random() * 8)
                    pair.signal(index, signal.SIGCONT)
                elif kind == "update":
                    version += 1
                    policies[version] = (pair.old, pair.new)[version % 2]
                    engine.update_weights_from_disk(str(policies[version].path), version)
                check(running.result(), policies)
                groups += EPISODES
                memory.append(own.memory_info().rss / 1e6)
        assert groups > SOAK_S / 10
        settled = memory[len(memory) // 4 :]
        assert max(settled[-5:]) - min(settled) < GROWTH_MB, memory


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
class TestSGLangPair(PairContract):
    backend = "sglang"


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
class TestVLLMPair(PairContract):
    backend = "vllm"


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 900)
class TestEmbeddedPair(PairContract):
    backend = "embedded"


def run(engine: RemoteInfEngine) -> list[Group]:
    """Run all episodes at once."""
    return engine.rollout_batch([ROW] * EPISODES, AGENT, group_size=1)
