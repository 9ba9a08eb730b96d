"""Adapters pushed alone to real servers: peft's log-probs, and every token of the version that sampled it."""

from __future__ import annotations
import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
import pytest
import torch
from peft import PeftModel
from areal_lite.api import InferenceEngineConfig, ModelResponse
from areal_lite.config.trainer_config import LoRAConfig
from areal_lite.errors import ServerError
from areal_lite.models.lora import adapter_shape
from areal_lite.models.policy_model import load_policy
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.weights.published_weights import WeightFolder
from areal_lite.servers.weights.weight_folder import publish_weights
from tests.real_servers.agent_contract import LONG_REGEX, is_letters, long_answer, under_way
from tests.real_servers.contract import EXACT, distance, generate
from tests.real_servers.launch import real_process
from tests.real_servers.real_server import SMOLLM2, Policy, RealServer, prompt

LORA = LoRAConfig(rank=8, alpha=16.0)
OPTIONS: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}


class Adapted(Policy):
    """One version of random adapters of a model, published alone, as peft computes it."""

    def __init__(self, model: Path, root: Path, version: int) -> None:
        super().__init__(model)
        adapted = load_policy(str(model), device=torch.device("cpu"), lora=LORA)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if ".lora_B" in name:
                    weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
        folder = publish_weights(adapted, root, version, adapters_only=True)
        self.published = WeightFolder(str(folder), version, adapter_shape(adapted))
        self.model = PeftModel.from_pretrained(self.model, str(folder)).eval()


class AdapterContract:
    backend: str

    @pytest.fixture(scope="class")
    def versions(self, tmp_path_factory: pytest.TempPathFactory) -> list[Adapted]:
        model = Path(os.environ.get("AREAL_LITE_SERVER_MODEL", SMOLLM2)).absolute()
        root = tmp_path_factory.mktemp("adapters")
        return [Adapted(model, root, version) for version in (1, 2)]

    @pytest.fixture(scope="class")
    def server(self, versions: list[Adapted], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
        model, shape = versions[0].path, versions[0].published.adapters
        with real_process(self.backend, model, tmp_path_factory.mktemp("server"), adapters=shape) as server:
            yield RealServer(self.backend, server.address.removeprefix("http://"), model)

    @pytest.fixture
    def engine(self, server: RealServer, tmp_path: Path) -> Iterator[RemoteInfEngine]:
        config: Any = {"backend": self.backend, "addresses": [server.address], "fileroot": str(tmp_path)}
        with RemoteInfEngine(InferenceEngineConfig(**config, tokenizer_path=str(server.model))) as engine:
            yield engine

    def test_log_probs_are_those_of_peft_and_only_the_newest_adapter_stays(
        self, engine: RemoteInfEngine, server: RealServer, versions: list[Adapted]
    ) -> None:
        ids = prompt(server.model)
        for adapted in versions:
            engine.update_weights(adapted.published)
            answer = generate(engine, ids, **OPTIONS)
            assert answer.output_versions == [adapted.published.version] * 24
            assert distance(answer, adapted.logprobs(answer)) < EXACT
        (one,) = engine._client.pool.servers
        assert adapters_of(engine) == [one.adapter]

    def test_an_answer_continues_on_the_next_adapter(
        self, engine: RemoteInfEngine, server: RealServer, versions: list[Adapted]
    ) -> None:
        answer = updated_within(engine, server, versions, ignore_eos=True, max_new_tokens=100)
        first_new = answer.output_versions.index(2)
        assert answer.output_versions == [1] * first_new + [2] * (100 - first_new)
        assert first_new > 0
        old, new = (adapted.logprobs(answer) for adapted in versions)
        assert distance(answer, torch.cat([old[:first_new], new[first_new:]])) < EXACT
        assert (old - new).abs().max() > 0.1

    def test_an_answer_that_stays_on_the_server_keeps_its_adapter(
        self, engine: RemoteInfEngine, server: RealServer, versions: list[Adapted]
    ) -> None:
        answer = updated_within(engine, server, versions, regex=LONG_REGEX)
        assert re.fullmatch(LONG_REGEX, versions[0].tokenizer.decode(answer.output_tokens, skip_special_tokens=True))
        assert set(answer.output_versions) == {1}
        assert distance(answer, versions[0].constrained_logprobs(answer, is_letters)) < EXACT
        engine.update_weights(replace(versions[1].published, version=3))
        (one,) = engine._client.pool.servers
        assert adapters_of(engine) == [one.adapter]

    def test_a_wrong_folder_leaves_the_server_on_its_adapter(
        self, engine: RemoteInfEngine, server: RealServer, versions: list[Adapted], tmp_path: Path
    ) -> None:
        engine.update_weights(versions[0].published)
        wrong = WeightFolder(str(tmp_path / "nothing"), 2, versions[0].published.adapters)
        with pytest.raises(ServerError, match="--enable-lora --max-lora-rank 8"):
            engine.update_weights(wrong)
        answer = generate(engine, prompt(server.model), **OPTIONS)
        assert answer.output_versions == [1] * 24
        assert distance(answer, versions[0].logprobs(answer)) < EXACT


def updated_within(
    engine: RemoteInfEngine, server: RealServer, versions: list[Adapted], **sampling: Any
) -> ModelResponse:
    """Return an answer that began under the first version and was running when the second came."""
    engine.update_weights(versions[0].published)
    request, _ = long_answer(server, streamed=False, **sampling)

    async def run() -> ModelResponse:
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(engine.agenerate(request))
            await under_way(server)
            await engine.aupdate_weights(versions[1].published)
        return call.result()

    return asyncio.run(run())


def adapters_of(engine: RemoteInfEngine) -> list[str]:
    """Return the names of the adapters that the only server has loaded."""
    client, loop = engine._client, engine._loop
    assert loop is not None
    return loop.call(client.requests.adapters(client.pool.servers[0]))


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSGLangAdapters(AdapterContract):
    backend = "sglang"


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestVLLMAdapters(AdapterContract):
    backend = "vllm"
