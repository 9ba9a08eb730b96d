"""Adapters on the embedded server: peft's log-probs, exact versions, and the weights below them as they were."""

from __future__ import annotations
import asyncio
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from areal_lite.api import ModelRequest
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.trainer_config import LoRAConfig
from areal_lite.models.lora import adapter_shape
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.published_weights import WeightFolder
from areal_lite.servers.weights.weight_folder import publish_weights
from tests.embedded.serving import Client, engine_client, load, logprobs_of, reported, serving, worst

PROMPT = list(b"Tell me a story about a dog.")


class Published:
    """One version of random adapters of a model, published alone and merged."""

    def __init__(self, base: Path, root: Path, version: int) -> None:
        model = load_policy(str(base), device=torch.device("cpu"), lora=LoRAConfig(rank=4, alpha=6.0))
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".lora_" in name:
                    weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
        self.version = version
        self.shape = adapter_shape(model)
        self.folder = publish_weights(model, root, version, adapters_only=True)
        self.merged = publish_weights(model, root / "merged", version, dtype=torch.float32)
        self.peft: Any = PeftModel.from_pretrained(load(base), str(self.folder)).eval()

    @property
    def for_engine(self) -> WeightFolder:
        return WeightFolder(str(self.folder), self.version, self.shape)


@pytest.fixture(scope="module")
def first(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tiny, tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture(scope="module")
def second(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return Published(tiny, tmp_path_factory.mktemp("adapters"), 2)


async def loaded(client: Client, published: Published, name: str) -> None:
    body = {"lora_name": name, "lora_path": str(published.folder), "weight_version": str(published.version)}
    status, reply = await client.call("/load_lora_adapter", body)
    assert (status, reply["success"]) == (200, True), reply


def versions(reply: Any) -> list[tuple[str, int, int]]:
    return [(one["version"], one["start"], one["end"]) for one in reply["meta_info"]["weight_versions"]]


def test_log_probs_are_those_of_peft_and_of_the_merged_model(tiny: Path, first: Published, second: Published) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            base = await client.generate(PROMPT, max_new_tokens=24, ignore_eos=True, temperature=1.0)
            for published in (first, second):
                await loaded(client, published, f"v{published.version}")
                several = [
                    client.generate(PROMPT[i:], max_new_tokens=24, ignore_eos=True, temperature=1.0) for i in range(4)
                ]
                for i, reply in enumerate(await asyncio.gather(*several)):
                    for model in (published.peft, load(published.merged)):
                        expected = logprobs_of(model, PROMPT[i:], reply["output_ids"])
                        assert worst(reported(reply), expected) < 1e-5
                    plain = logprobs_of(load(tiny), PROMPT[i:], reply["output_ids"])
                    assert worst(reported(reply), plain) > 0.1
                    assert versions(reply) == [(str(published.version), 0, 24)]
            status, _ = await client.call("/unload_lora_adapter", {"lora_name": "v2", "weight_version": "0"})
            again = await client.generate(base["output_ids"], max_new_tokens=24, ignore_eos=True)
            assert status == 200
            expected = logprobs_of(load(tiny), base["output_ids"], again["output_ids"])
            assert worst(reported(again), expected) < 1e-5  # the base was kept
            assert versions(again) == [("0", 0, 24)]

    asyncio.run(run())


def test_only_the_loaded_adapter_can_be_named(tiny: Path, first: Published, second: Published) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            await loaded(client, first, "one")
            await loaded(client, second, "two")
            _, models = await client.call("/v1/models")
            assert [model["id"] for model in models["data"]] == [str(tiny), "two"]
            for name, expected in (("two", 200), ("one", 400)):
                body = {"input_ids": PROMPT, "lora_path": name, "sampling_params": {"max_new_tokens": 1}}
                status, reply = await client.call("/generate", body)
                assert status == expected, reply
            assert "'one' is not loaded" in reply["error"]["message"]
            assert (await client.call("/unload_lora_adapter", {"lora_name": "one"}))[0] == 400
            await client.call("/update_weights_from_disk", {"model_path": str(first.merged), "weight_version": "3"})
            reply = await client.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
            assert worst(reported(reply), logprobs_of(load(first.merged), PROMPT, reply["output_ids"])) < 1e-5
            _, models = await client.call("/v1/models")
            assert len(models["data"]) == 1  # whole weights take the adapter's place

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["missing", "cut", "layer", "shape", "dora", "extra"])
def test_adapters_that_do_not_fit_are_refused_and_nothing_changes(
    tiny: Path, first: Published, tmp_path: Path, fault: str
) -> None:
    config = json.loads((first.folder / "adapter_config.json").read_text())
    weights = load_file(first.folder / "adapter_model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.lora_A.weight"))
    if fault == "layer":
        weights = {key.replace("q_proj", "x_proj"): value for key, value in weights.items()}
    elif fault == "shape":
        weights[name] = weights[name][:, 1:].contiguous()
    elif fault == "extra":
        weights["base_model.model.lm_head.weight"] = torch.zeros(2)
    config["use_dora"] = fault == "dora"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    if fault != "missing":
        save_file(weights, tmp_path / "adapter_model.safetensors")
    if fault == "cut":
        with (tmp_path / "adapter_model.safetensors").open("r+b") as file:
            file.truncate(1000)

    async def run() -> None:
        async with serving(tiny) as client:
            status, reply = await client.call("/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path)})
            assert (status, reply["success"]) == (400, False)
            assert str(tmp_path) in reply["error_message"]
            reply = await client.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
            assert worst(reported(reply), logprobs_of(load(tiny), PROMPT, reply["output_ids"])) < 1e-5
            assert versions(reply) == [("0", 0, 8)]

    asyncio.run(run())


@pytest.mark.parametrize("pause", ["abort", "keep"])
def test_an_answer_continues_on_the_next_adapter_and_each_token_has_its_version(
    tiny: Path, first: Published, second: Published, pause: str
) -> None:
    async def run() -> None:
        async with serving(tiny) as client, engine_client(client, weight_update_pause=pause) as engine:
            started = asyncio.Event()
            await engine.update_weights(first.for_engine)
            request = ModelRequest(
                input_ids=PROMPT,
                gconfig=GenerationHyperparameters(max_new_tokens=200, ignore_eos=True),
                on_tokens=lambda *_: started.set(),
            )
            answering = asyncio.create_task(engine.generate(request))
            await started.wait()
            await engine.update_weights(second.for_engine)
            answer = await answering
            assert (answer.attempts == 1) == (pause == "keep")
            cut = answer.output_versions.index(2)
            assert answer.output_versions == [1] * cut + [2] * (200 - cut)
            assert cut > 0
            old, new = (logprobs_of(one.peft, PROMPT, answer.output_tokens) for one in (first, second))
            assert worst(answer.output_logprobs, old[:cut] + new[cut:]) < 1e-4
            assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1

    asyncio.run(run())


def test_a_server_that_restarts_gets_the_newest_adapter_before_requests(tiny: Path, first: Published) -> None:
    async def run() -> None:
        async with serving(tiny) as client, engine_client(client) as engine:
            await engine.update_weights(first.for_engine)
            name = engine.pool.servers[0].adapter
            await client.call("/unload_lora_adapter", {"lora_name": name, "weight_version": "0"})  # as a restart would
            request = ModelRequest(
                input_ids=PROMPT, gconfig=GenerationHyperparameters(max_new_tokens=16, ignore_eos=True)
            )
            answer = await engine.generate(request)
            assert answer.output_versions == [1] * 16
            expected = logprobs_of(first.peft, PROMPT, answer.output_tokens)
            assert worst(answer.output_logprobs, expected) < 1e-5
            assert engine.pool.servers[0].adapter != name

    asyncio.run(run())
