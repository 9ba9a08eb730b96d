"""Models with a sliding window are served over its border, up to the model's own context."""

from __future__ import annotations
import asyncio
from pathlib import Path
import pytest
import transformers
from areal_lite.embedded.model_runner import load_model
from areal_lite.errors import ConfigError
from tests.embedded.serving import reported, serving, worst
from tests.fixtures.tiny_model import build_tiny_model
from tests.fixtures.windowed_models import FAMILIES, SIZES, reference, windowed, windowed_folder

PROMPT = list(b"What is the capital of France, and which river runs through it?")
WINDOW = 24


def expected(family: str, prompt: list[int], output: list[int], window: int = WINDOW) -> list[float]:
    """Return transformers' log-probs of the output."""
    rows = reference(windowed(family, window), prompt + output)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, output, strict=True)]


def test_a_window_is_not_the_context(tmp_path: Path) -> None:
    windowed_folder(tmp_path, "gemma3", 64)

    async def run() -> None:
        async with serving(tmp_path) as client:
            assert (await client.call("/model_info"))[1]["context_length"] == SIZES["max_position_embeddings"]
            reply = await client.generate(PROMPT[:10], max_new_tokens=200, ignore_eos=True)
            assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 200}
            assert worst(reported(reply), expected("gemma3", PROMPT[:10], reply["output_ids"], 64)) < 2e-5

    asyncio.run(run())


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_share_less_and_more_than_a_window_equal_a_plain_forward(family: str, tmp_path: Path) -> None:
    """Half of them run at the same time, the rest find the others' prefixes in the slots of finished ones."""
    windowed_folder(tmp_path, family, WINDOW)
    prompts = [PROMPT[:shared] + list(b" fork"[: shared % 5 + 1]) for shared in (17, 22, 23, 24, 25, 40, 60)]

    async def run() -> None:
        async with serving(tmp_path, max_running_requests=4) as client:
            first = await client.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
            answers = [(PROMPT, first)]
            turn = PROMPT + first["output_ids"][:30] + list(b"and?")  # shares a part of what the slot holds
            for some in ([turn], prompts[::2], prompts[1::2]):
                calls = (client.generate(prompt, max_new_tokens=30, ignore_eos=True) for prompt in some)
                answers += zip(some, await asyncio.gather(*calls), strict=True)
            for prompt, reply in answers:
                assert len(reply["output_ids"]) >= 30
                assert worst(reported(reply), expected(family, prompt, reply["output_ids"])) < 2e-5
            cached = [reply["meta_info"]["cached_tokens"] for _, reply in answers[1:]]
            assert cached[0] >= len(PROMPT) + 30
            assert min(cached) >= 16

    asyncio.run(run())


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_stopped_answer_goes_on_over_the_border(family: str, mode: str, tmp_path: Path) -> None:
    windowed_folder(tmp_path, family, WINDOW)

    async def run() -> None:
        async with serving(tmp_path) as client:
            whole = await client.generate(PROMPT[:12], max_new_tokens=90, ignore_eos=True)
            async with client.stream(PROMPT[:12], rid="r", temperature=0, max_new_tokens=90, ignore_eos=True) as events:
                async for event in events:
                    if len(event["output_ids"]) >= 20 and not client.scheduler.paused:
                        await client.call("/pause_generation", {"mode": mode})
                        await client.call("/flush_cache")
                        await client.call("/continue_generation", {})
            ids, logprobs = event["output_ids"], reported(event)
            if mode == "abort" and len(ids) < 90:
                rest = await client.generate(PROMPT[:12] + ids, max_new_tokens=90 - len(ids), ignore_eos=True)
                ids, logprobs = ids + rest["output_ids"], logprobs + reported(rest)
            assert ids == whole["output_ids"]
            assert worst(logprobs, expected(family, PROMPT[:12], ids)) < 2e-5

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.Llama4TextConfig(), "is a llama4_text model with chunked_attention layers: .* Serve it with"),
        (
            transformers.Gemma3TextConfig(sliding_window=None),
            "is a gemma3_text model with sliding_attention layers and sliding_window None: .* Serve it with",
        ),
        (transformers.Qwen3NextConfig(), "is a qwen3_next model with linear_attention layers: .* Serve it with"),
    ],
    ids=["llama4", "no window", "linear"],
)
def test_other_attention_is_refused_by_name_before_weights_load(
    config: transformers.PretrainedConfig, said: str, tmp_path: Path
) -> None:
    build_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_model(tmp_path, dtype="float32", device="cpu")
