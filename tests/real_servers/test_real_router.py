"""A real sglang-router over embedded servers, which speak SGLang's protocol, and over real ones in a run."""

from __future__ import annotations
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
import pytest
import yaml
from areal_lite.api import InferenceEngineConfig, ModelRequest, RolloutWorkflow
from areal_lite.config.loader import load_config
from areal_lite.config.server_config import ServerConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.entry_points import run_training
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.servers.programs.server_program import RouterProgram
from tests.fixtures.tiny_model import build_tiny_model
from tests.real_servers.contract import generate
from tests.real_servers.launch import SETTINGS, server_settings
from tests.rollout.scripted import until

PROMPT = list(b"Tell me a story.")


def python_with_router() -> str:
    """Return the Python of SGLang's environment; skip the test if it has no router."""
    python = os.environ.get("AREAL_LITE_SGLANG_PYTHON")
    if python is None or subprocess.run([python, "-c", "import sglang_router"], capture_output=True).returncode:
        pytest.skip("needs sglang-router: run `make test-servers`, or set AREAL_LITE_SGLANG_PYTHON")
    return str(Path(python).absolute())


class Conversation(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        for turn in range(3):
            await engine.agenerate(ModelRequest(input_ids=[data["row"], turn]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "tiny", seed=0)


@pytest.fixture
def servers(model: Path) -> Iterator[list[EmbeddedServer]]:
    with ExitStack() as stack:
        settings: Any = {"dtype": "float32", "num_threads": 1, "device": "cpu"}
        yield [stack.enter_context(EmbeddedServer(model_path=str(model), **settings)) for _ in range(2)]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[str]:
    env = SETTINGS["sglang"]["env"]  # the router imports SGLang where it can
    config = ServerConfig(backend="sglang", router=True, python=python_with_router(), env=env)
    with RouterProgram(config, log_path=tmp_path / "router.log") as program:
        yield program.address


@pytest.fixture
def engine(servers: list[EmbeddedServer], router: str) -> Iterator[RemoteInfEngine]:
    settings: Any = {"backend": "sglang", "addresses": [server.address for server in servers], "router": router}
    with RemoteInfEngine(InferenceEngineConfig(**settings, faults={"outage_patience_s": 60})) as engine:
        yield engine


def served(server: EmbeddedServer) -> float:
    with urllib.request.urlopen(f"{server.address}/v1/loads") as reply:
        return float(json.load(reply)["loads"][0]["generated_tokens"])


def listed(router: str) -> list[str]:
    with urllib.request.urlopen(f"{router}/workers") as reply:
        return [worker["url"] for worker in json.load(reply)["workers"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_address_of_a_real_router_stands_for_the_servers_behind_it(
    servers: list[EmbeddedServer], router: str, model: Path
) -> None:
    for server in servers:
        body = json.dumps({"url": server.address}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{router}/workers", body, headers)).close()
    until(lambda: len(listed(router)) == 2, timeout_s=60)
    with RemoteInfEngine(InferenceEngineConfig(backend="sglang", addresses=[router])) as engine:
        assert sorted(server.url for server in engine.servers) == sorted(server.address for server in servers)
        engine.update_weights_from_disk(str(model), 1)
        engine.rollout_batch([{"row": row} for row in range(8)], Conversation)
        assert all(served(server) > 0 for server in servers)
        assert generate(engine, PROMPT, max_new_tokens=8).output_versions[0] == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_router_balances_keeps_episodes_and_serves_only_the_newest_weights(
    engine: RemoteInfEngine, servers: list[EmbeddedServer], model: Path
) -> None:
    engine.rollout_batch([{"row": row} for row in range(8)], Conversation)
    assert all(served(server) > 0 for server in servers)
    engine.update_weights_from_disk(str(model), 1)
    tokens: list[int] = []
    for _ in range(4):
        answer = generate(engine, PROMPT, max_new_tokens=8, ignore_eos=True, min_p=0.01)
        assert answer.output_versions == [1] * 8
        tokens += answer.output_tokens
    servers[0].stop()
    for _ in range(4):
        assert generate(engine, PROMPT, max_new_tokens=8).output_versions[0] == 1
    figures = engine.server_metrics()
    assert (figures["0/up"], figures["1/up"]) == (0, 1)
    servers[0].start()
    until(lambda: engine.server_metrics()["0/up"] == 1, timeout_s=60)
    before = served(servers[0])
    until(lambda: generate(engine, PROMPT, max_new_tokens=8) and served(servers[0]) > before, timeout_s=60)
    engine.update_weights_from_disk(str(model), 2)
    assert generate(engine, PROMPT, max_new_tokens=8).output_versions[0] == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_starts_real_servers_and_their_router(tmp_path: Path) -> None:
    python_with_router()
    model = build_tiny_model(tmp_path / "tiny", hidden_size=128)
    config = {
        "experiment_name": "e2e",
        "fileroot": str(tmp_path / "runs"),
        "model_path": str(model),
        "workflow": "tests.e2e.agents.LetterAgent",
        "train_dataset": {"path": "tests.e2e.agents.rows"},
        "rollout": {"group_size": 4, "consumer_batch_size": 4, "gconfig": {"max_new_tokens": 8}},
        "server": {**server_settings("sglang", model), "router": True},
        "trainer": {"total_steps": 3, "learning_rate": 1e-3, "dtype": "float32", "num_threads": 1, "device": "cpu"},
        "save_model": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    summary = run_training(load_config(path))
    steps = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    assert {step["train/staleness_max"] for step in steps} == {0}
    assert steps[-1]["servers/router/requests"] >= 48
    assert steps[-1]["episodes/failed"] == 0
