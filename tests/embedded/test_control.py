"""Abort, pause and new weights: requests end once, and every token carries the version that computed it."""

from __future__ import annotations
import asyncio
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.embedded.serving import Client, load, logprobs_of, reported, serving, worst
from tests.fixtures.tiny_model import build_tiny_model

PROMPT = list(b"Tell me a story about a dog.")
LONG = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 200}


async def in_flight(client: Client, rid: str, **params: Any) -> asyncio.Task[Any]:
    """Start a long request and return its task after the first token; the result is its last event."""
    started = asyncio.Event()

    async def run() -> Any:
        async with client.stream(PROMPT, rid=rid, **LONG | params) as events:
            async for event in events:
                started.set()
                reply = event
        return reply

    task = asyncio.create_task(run())
    await started.wait()
    return task


def is_aborted(reply: Any) -> bool:
    """Return whether the reply is an aborted one in SGLang's format, with its tokens so far."""
    reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    count = len(reply["output_ids"])
    assert len(reported(reply)) == reply["meta_info"]["completion_tokens"] == count
    return bool(reply["meta_info"]["finish_reason"] == reason and 0 < count < 200)


def test_abort_ends_only_the_named_request_and_returns_its_tokens_so_far(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            client.pace()
            first, second = await in_flight(client, "ep-1"), await in_flight(client, "ep-10")
            for nothing in ({}, {"rid": "nope"}, {"rid": "ep"}):
                assert (await client.call("/abort_request", nothing))[0] == 200
            assert await client.call("/abort_request", {"rid": "ep-1"}) == (200, "")
            reply = await first
            assert is_aborted(reply)
            assert worst(reported(reply), logprobs_of(load(tiny), PROMPT, reply["output_ids"])) < 1e-4
            assert (await second)["meta_info"]["finish_reason"]["type"] == "length"

    asyncio.run(run())


def test_abort_ends_a_request_running_or_waiting(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny, max_running_requests=2) as client:
            client.pace()
            some = [asyncio.create_task(client.generate(PROMPT, rid=rid, **LONG)) for rid in ("nn", "mm")]
            running = await client.call("/v1/loads")
            while running[1]["loads"][0]["num_running_reqs"] < 2:
                running = await client.call("/v1/loads")
            status, reply = await client.call("/generate", {"input_ids": PROMPT, "rid": "nn"})
            assert (status, "Duplicate request ID" in reply["error"]["message"]) == (400, True)
            waiting = asyncio.create_task(client.generate(PROMPT, rid="ww", **LONG))
            while (await client.call("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] < 1:
                pass
            await client.call("/abort_request", {"rid": "ww"})
            assert (await waiting)["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
            await client.call("/abort_request", {"rid": "nn"})
            await client.call("/abort_request", {"abort_all": True})
            assert [is_aborted(await one) for one in some] == [True, True]
            await client.generate(PROMPT, rid="nn", max_new_tokens=1)  # the rid is free again

    asyncio.run(run())


def test_a_disconnected_client_aborts_its_request(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            client.pace()
            for stream in (True, False):
                body = {"input_ids": PROMPT, "rid": "gone", "stream": stream, "sampling_params": LONG}
                call = asyncio.create_task(client.call("/generate", body))
                while (await client.call("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0:
                    pass
                before = client.scheduler.generated_tokens
                call.cancel()
                while (await client.call("/v1/loads"))[1]["loads"][0]["num_running_reqs"]:
                    pass
                assert client.scheduler.generated_tokens - before < 199
                await client.generate(PROMPT, rid="gone", max_new_tokens=1)

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_update_while_paused_keeps_earlier_tokens_and_versions(tiny: Path, other: Path, mode: str) -> None:
    """Tokens before the pause come from the first checkpoint, later ones from the second; versions say so."""

    async def run() -> None:
        async with serving(tiny) as client:
            running = await in_flight(client, "r")
            status, answer = await client.call("/pause_generation", {"mode": mode})
            assert (status, answer["status"]) == (200, "ok")
            fresh = asyncio.create_task(client.generate(PROMPT, rid="fresh", **LONG))
            while (await client.call("/v1/loads"))[1]["loads"][0]["num_waiting_reqs"] < 1 + (mode == "retract"):
                pass
            assert [await client.call(path) for path in ("/health", "/health_generate")] == [(200, "")] * 2
            frozen = client.scheduler.generated_tokens
            update = {"model_path": str(other), "weight_version": "1"}
            status, answer = await client.call("/update_weights_from_disk", update)
            assert (status, answer["success"]) == (200, True)
            info = (await client.call("/model_info"))[1]
            assert (await client.call("/get_model_info"))[1].keys() == info.keys()
            assert (info["weight_version"], info["model_path"]) == ("1", str(other))
            assert client.scheduler.generated_tokens == frozen
            await client.call("/continue_generation", {})
            reply, afterwards = await running, await fresh

        old, new = load(tiny), load(other)
        assert afterwards["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 200}]
        assert worst(reported(afterwards), logprobs_of(new, PROMPT, afterwards["output_ids"])) < 1e-4
        ids, meta = reply["output_ids"], reply["meta_info"]
        switch = meta["weight_versions"][0]["end"]
        assert 0 < switch < 200
        by_old, by_new = logprobs_of(old, PROMPT, ids), logprobs_of(new, PROMPT, ids)
        assert worst(reported(reply)[:switch], by_old[:switch]) < 1e-4
        assert worst(reported(reply)[:switch], by_new[:switch]) > 0.1
        if mode == "abort":
            assert is_aborted(reply)
            return
        spans = [{"version": "0", "start": 0, "end": switch}, {"version": "1", "start": switch, "end": 200}]
        assert meta["weight_versions"] == spans
        assert meta["num_retractions"] == (mode == "retract")
        after = by_new[switch:] if mode == "retract" else on_old_kv(old, new, PROMPT, ids, switch)
        assert worst(reported(reply)[switch:], after) < 1e-4
        assert worst(reported(reply)[switch:], by_old[switch:]) > 0.1

    asyncio.run(run())


@torch.inference_mode()
def on_old_kv(old: Any, new: Any, prompt: list[int], ids: list[int], switch: int) -> list[float]:
    """Return the log-probs of ``ids[switch:]`` with new weights on the old weights' KV."""
    known = len(prompt) + switch - 1
    tokens = torch.tensor([prompt + ids])
    cache = old(tokens[:, :known]).past_key_values
    logits = new(tokens[:, known:-1], past_key_values=cache).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[switch:])[:, None])[:, 0].tolist()


def test_an_update_without_a_pause_recomputes_the_running_requests(tiny: Path, other: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            client.pace()
            running = await in_flight(client, "r")
            update = {"model_path": str(other), "weight_version": "1"}
            assert (await client.call("/update_weights_from_disk", update))[0] == 200
            reply = await running
            ids, switch = reply["output_ids"], reply["meta_info"]["weight_versions"][0]["end"]
            assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["0", "1"]
            expected = logprobs_of(load(tiny), PROMPT, ids)[:switch] + logprobs_of(load(other), PROMPT, ids)[switch:]
            assert worst(reported(reply), expected) < 1e-4

            running = await in_flight(client, "s")
            back = {"model_path": str(tiny), "weight_version": 2, "abort_all_requests": True}
            assert (await client.call("/update_weights_from_disk", back))[0] == 200
            assert is_aborted(await running)
            restored = await client.generate(PROMPT, max_new_tokens=20)
            assert restored["meta_info"]["cached_tokens"] == 0
            assert restored["meta_info"]["weight_version"] == "2"
            assert worst(reported(restored), logprobs_of(load(tiny), PROMPT, restored["output_ids"])) < 1e-4

    asyncio.run(run())


def broken_checkpoints(good: Path, folder: Path) -> dict[str, Path]:
    """Return copies of a checkpoint, each with one fault."""
    weights = load_file(good / "model.safetensors")
    made: dict[str, Path] = {"missing": folder / "missing"}
    name = "model.layers.0.mlp.up_proj.weight"

    def variant(title: str, tensors: dict[str, torch.Tensor]) -> Path:
        made[title] = folder / title
        shutil.copytree(good, made[title])
        save_file(tensors, made[title] / "model.safetensors")
        return made[title]

    variant("empty", weights).joinpath("model.safetensors").unlink()
    variant("lacks", {key: value for key, value in weights.items() if key != name})
    variant("unknown", weights | {"model.extra": torch.zeros(2)})
    variant("shape", weights | {name: torch.zeros(3, 4)})
    variant("untied", weights | {"lm_head.weight": torch.zeros_like(weights["model.embed_tokens.weight"])})
    file = variant("cut", weights) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    (variant("noise", weights) / "model.safetensors").write_bytes(b"\xff" * 100)
    sizes = {"model.safetensors": {"size": 5, "sha256": "0" * 64}}
    (variant("size", weights) / "manifest.json").write_text(json.dumps({"files": sizes}))
    size = (made["size"] / "model.safetensors").stat().st_size
    hashes = {"model.safetensors": {"size": size, "sha256": "0" * 64}}
    (variant("hash", weights) / "manifest.json").write_text(json.dumps({"files": hashes}))
    (variant("manifest", weights) / "manifest.json").write_text("[]")
    return made


def test_an_invalid_checkpoint_is_rejected_and_the_server_keeps_its_weights(
    tiny: Path, other: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            before = await client.generate(PROMPT, max_new_tokens=10)
            for title, path in broken_checkpoints(other, tmp_path).items():
                update = {"model_path": str(path), "weight_version": "bad"}
                status, answer = await client.call("/update_weights_from_disk", update)
                assert (status, answer["success"]) == (400, False), title
                assert str(path) in answer["message"], title
            assert (await client.call("/model_info"))[1]["weight_version"] == "0"
            await client.call("/flush_cache")
            assert (await client.generate(PROMPT, max_new_tokens=10))["output_ids"] == before["output_ids"]

            good = tmp_path / "good"
            shutil.copytree(other, good)
            weights = load_file(good / "model.safetensors")
            save_file(
                weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()},
                good / "w.safetensors",
            )
            (good / "model.safetensors").unlink()
            data = (good / "w.safetensors").read_bytes()
            entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (good / "manifest.json").write_text(json.dumps({"files": {"w.safetensors": entry}}))
            assert (await client.call("/update_weights_from_disk", {"model_path": str(good)}))[0] == 200
            reply = await client.generate(PROMPT, max_new_tokens=10)
            assert reply["meta_info"]["weight_version"] == "0"  # none was given
            assert worst(reported(reply), logprobs_of(load(other), PROMPT, reply["output_ids"])) < 1e-4

    asyncio.run(run())


def test_a_model_with_untied_embeddings(tmp_path: Path) -> None:
    first = build_tiny_model(tmp_path / "first", tied=False)
    second = build_tiny_model(tmp_path / "second", tied=False, seed=1)
    tied = build_tiny_model(tmp_path / "tied")

    async def run() -> None:
        async with serving(first) as client:
            assert (await client.call("/update_weights_from_disk", {"model_path": str(tied)}))[0] == 400
            assert (await client.call("/update_weights_from_disk", {"model_path": str(second)}))[0] == 200
            reply = await client.generate(PROMPT, max_new_tokens=10)
            assert worst(reported(reply), logprobs_of(load(second), PROMPT, reply["output_ids"])) < 1e-4

    asyncio.run(run())


def test_the_version_can_change_without_new_weights(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            client.pace()
            running = await in_flight(client, "r")
            keep = {"new_version": "5", "abort_all_requests": False}
            status, answer = await client.call("/update_weight_version", keep)
            assert (status, answer["new_version"]) == (200, "5")
            reply = await running
            assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["0", "5"]

    asyncio.run(run())


def test_a_failed_step_answers_500_and_the_server_continues(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            forward = client.scheduler.runner.forward
            client.scheduler.runner.forward = None  # type: ignore[assignment, method-assign]
            status, reply = await client.call("/generate", {"input_ids": PROMPT})
            assert (status, "TypeError" in reply["error"]["message"]) == (500, True)
            client.scheduler.runner.forward = forward  # type: ignore[method-assign]
            await client.generate(PROMPT, max_new_tokens=1)

    asyncio.run(run())
