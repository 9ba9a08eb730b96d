"""Prompts with images: exact log-probs, KV shared only by equal pictures, weight updates, refusals."""

from __future__ import annotations
import asyncio
import base64
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from areal_lite.api.image_span import ImageSpan, plain_images
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.vision.canonical_image import CanonicalImage, canonical_image
from areal_lite.data.vision.image_processor import ImageProcessor, load_image_processor
from areal_lite.data.vision.image_store import ImagePixels, ImageStore
from areal_lite.embedded import model_runner
from areal_lite.embedded.decoder.lean_decoder_kernels import CompiledOperations, compiled_operations
from areal_lite.embedded.startup import resolve_model_path
from areal_lite.errors import ConfigError
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.embedded.serving import Client, reported, serving, worst
from tests.fixtures.tiny_vlm import IMAGE_ID, build_tiny_vlm, save_tiny_idefics3, save_tiny_vlm

EXACT = 2e-5


def load(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen2_5_vl": save_tiny_vlm(root / "qwen"),
        "qwen2_vl": save_tiny_vlm(root / "qwen2", family="qwen2_vl"),
        "idefics3": save_tiny_idefics3(root / "idefics"),
    }


@pytest.fixture
def qwen(folders: dict[str, Path]) -> Path:
    return folders["qwen2_5_vl"]


def picture(processor: ImageProcessor, seed: int, size: tuple[int, int] = (24, 16)) -> CanonicalImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return canonical_image(file.getvalue(), processor)


class Prompt:
    """Ids with images, and the body that has them."""

    def __init__(self, processor: ImageProcessor) -> None:
        self.processor = processor
        self.ids: list[int] = []
        self.images: list[ImageSpan] = []
        self.pngs: dict[str, bytes] = {}

    def add(self, *parts: int | list[int] | CanonicalImage) -> Prompt:
        for part in parts:
            if isinstance(part, CanonicalImage):
                length = self.processor.num_tokens(part.grid)
                self.images.append(ImageSpan(len(self.ids), length, part.sha256, part.grid))
                self.pngs[part.sha256] = part.png
                self.ids += [IMAGE_ID] * length
            else:
                self.ids += [part] if isinstance(part, int) else part
        return self

    def body(self, **sampling: Any) -> dict[str, Any]:
        files = {sha256: base64.b64encode(png).decode() for sha256, png in self.pngs.items()}
        own = {"images": plain_images(self.images), "image_files": files} if self.images else {}
        params = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 6, "sampling_seed": 3} | sampling
        return {"input_ids": list(self.ids), "return_logprob": True, "sampling_params": params, **own}

    @torch.inference_mode()
    def logprobs(self, model: Any, output: list[int]) -> list[float]:
        """Return those of one plain forward pass of transformers, which finds images by their ids."""
        ids = torch.tensor([self.ids + output])
        inputs: dict[str, Any] = {}
        if self.images:
            made = [self.processor.pixels(self.pngs[span.sha256]) for span in self.images]
            inputs = {name: torch.cat([one[name] for one in made]) for name in made[0]}
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int()
            else:
                inputs["pixel_values"] = inputs["pixel_values"][None]
        logits = model(ids, **inputs).logits[0, len(self.ids) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


async def ask(client: Client, prompt: Prompt, **sampling: Any) -> Any:
    status, reply = await client.call("/generate", prompt.body(logit_bias={str(IMAGE_ID): -100.0}, **sampling))
    assert status == 200, reply
    assert reply["meta_info"]["prompt_tokens"] == len(prompt.ids)
    return reply


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "idefics3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probs_are_those_of_transformers_over_turns_and_in_batches_with_text(
    folders: dict[str, Path], family: str, deterministic: bool
) -> None:
    model, processor = load(folders[family]), load_image_processor(str(folders[family]))

    async def play() -> None:
        async with serving(folders[family], deterministic=deterministic) as client:
            prompt = Prompt(processor).add(list(range(20, 40)), picture(processor, 0), 50)
            for turn in range(3):
                text = Prompt(processor).add([60 + turn] * 9)
                replies = await asyncio.gather(*(ask(client, one) for one in (prompt, text, prompt)))
                for one, reply in zip((prompt, text, prompt), replies, strict=True):
                    assert worst(reported(reply), one.logprobs(model, reply["output_ids"])) < EXACT
                if turn and not deterministic:
                    assert replies[0]["meta_info"]["cached_tokens"] >= 26
                prompt.add(replies[0]["output_ids"], 51, picture(processor, turn + 1, (16, 8)), 52, 53)

    asyncio.run(play())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "idefics3"])
def test_deterministic_answers_have_the_bits_of_the_trainer(
    folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    processor = load_image_processor(str(folders[family]))
    prompt = Prompt(processor).add([20, 21], picture(processor, 0), [50] * 30, picture(processor, 1, (16, 8)), 51)

    async def play() -> Any:
        async with serving(folders[family], deterministic=True) as client:
            return await ask(client, prompt, max_new_tokens=20)

    reply = asyncio.run(play())
    config = TrainerConfig(
        total_steps=1, learning_rate=1e-3, dtype="float32", num_threads=1, device="cpu", deterministic=True
    )
    try:
        trainer = PolicyTrainer(config, model_path=str(folders[family]), seed=1)
        store = ImageStore(tmp_path)
        for png in prompt.pngs.values():
            store.put(png)
        trainer.learner.module.pixels = ImagePixels(store, processor)
        ids = np.array(prompt.ids + reply["output_ids"])
        trained = np.arange(len(ids)) >= len(prompt.ids)
        sequence = TokenSequence(input_ids=ids, loss_mask=trained, images=tuple(prompt.images))
        assert trainer.logprobs_of([sequence]).tolist() == reported(reply)
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_pictures_with_equal_ids_share_kv_up_to_them(qwen: Path) -> None:
    model, processor = load(qwen), load_image_processor(str(qwen))
    prompts = [Prompt(processor).add(list(range(20, 44)), picture(processor, seed), [50] * 30) for seed in (0, 1, 0)]

    async def play() -> None:
        async with serving(qwen) as client:
            replies = [await ask(client, prompt) for prompt in prompts]
            assert len({tuple(prompt.ids) for prompt in prompts}) == 1
            assert [reply["meta_info"]["cached_tokens"] for reply in replies] == [0, 24, len(prompts[0].ids) - 1]
            together = await asyncio.gather(*(ask(client, prompt, sampling_seed=9) for prompt in prompts))
            for prompt, reply in zip(prompts * 2, [*replies, *together], strict=True):
                assert worst(reported(reply), prompt.logprobs(model, reply["output_ids"])) < EXACT
            assert together[0]["output_ids"] == together[2]["output_ids"]
            first, second, _ = map(reported, together)
            assert worst(first[:1], second[:1]) > 1e-3

    asyncio.run(play())


def test_the_model_sees_the_picture(qwen: Path) -> None:
    model, processor = load(qwen), load_image_processor(str(qwen))
    one, other = (Prompt(processor).add([20, 21], picture(processor, seed), 50) for seed in (0, 1))
    assert worst(one.logprobs(model, [60]), other.logprobs(model, [60])) > 1e-2


@pytest.mark.parametrize("has_tower", [True, False])
def test_new_weights_are_those_of_the_tower_too_if_it_is_sent(qwen: Path, tmp_path: Path, has_tower: bool) -> None:
    processor = load_image_processor(str(qwen))
    new = build_tiny_vlm(seed=1)
    if not has_tower:
        new.model.visual = load(qwen).model.visual
    new.save_pretrained(tmp_path)
    expected = load(tmp_path)
    if not has_tower:
        stored = load_file(tmp_path / "model.safetensors")
        text = {name: tensor for name, tensor in stored.items() if not name.startswith("visual.")}
        assert len(text) < len(stored)
        save_file(text, tmp_path / "model.safetensors")
    prompt = Prompt(processor).add(list(range(20, 40)), picture(processor, 0), 50)

    async def play() -> Any:
        async with serving(qwen) as client:
            await ask(client, prompt)
            update = {"model_path": str(tmp_path), "weight_version": "1", "flush_cache": True}
            status, answer = await client.call("/update_weights_from_disk", update)
            assert (status, answer["success"]) == (200, True), answer
            return await ask(client, prompt)

    reply = asyncio.run(play())
    assert worst(reported(reply), prompt.logprobs(expected, reply["output_ids"])) < EXACT


def test_compiled_kernels_compute_the_same(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = load(qwen), load_image_processor(str(qwen))
    operations = compiled_operations(load(qwen))
    if not isinstance(operations, CompiledOperations):
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(model_runner, "lean_decoder_operations", compiled_operations)
    prompt = Prompt(processor).add([20, 21], picture(processor, 0), [50] * 8, picture(processor, 1), 51)

    async def play() -> Any:
        async with serving(qwen) as client:
            assert not client.scheduler.runner.pads
            return await asyncio.gather(ask(client, prompt), ask(client, Prompt(processor).add([7, 8, 9])))

    reply, _ = asyncio.run(play())
    assert worst(reported(reply), prompt.logprobs(model, reply["output_ids"])) < EXACT


Change = Callable[[dict[str, Any]], Any]


def other_grid(body: dict[str, Any]) -> None:
    body["images"][0]["grid"] = [1, 6, 4]


def other_length(body: dict[str, Any]) -> None:
    body["images"][0]["length"] = 5


def other_file(body: dict[str, Any]) -> None:
    body["image_files"] = {name: base64.b64encode(b"x").decode() for name in body["image_files"]}


def not_canonical(body: dict[str, Any]) -> None:
    file = io.BytesIO()
    Image.new("RGB", (25, 16)).save(file, "PNG")
    sha256 = hashlib.sha256(file.getvalue()).hexdigest()
    body["images"][0]["sha256"] = sha256
    body["image_files"] = {sha256: base64.b64encode(file.getvalue()).decode()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (other_grid, "image 0 has grid [1, 6, 4] and 6 tokens"),
        (other_length, "and 5 tokens; with the processor of the served model it has [1, 4, 6] and 6"),
        (other_file, "its digest differs"),
        (not_canonical, "its size 25 x 16 is not one that the processor leaves as it is"),
        (lambda body: body.pop("image_files"), "send its PNG in base64"),
        (lambda body: body.update(images={}, image_data=["x"]), "image_data is not supported"),
        (lambda body: body.update(images=[{"offset": 0}]), "is no image"),
        (lambda body: body["images"][0].update(offset=30), "spans must be sorted"),
        (lambda body: body["images"][0].update(sha256="../x"), "is no sha256"),
        (lambda body: body["images"][0].update(grid=[1, 4]), "three sizes are whole numbers"),
    ],
)
def test_images_that_are_not_what_their_spans_say_are_refused(qwen: Path, change: Change, problem: str) -> None:
    from areal_lite.embedded.bad_request import BadRequest
    from areal_lite.embedded.generate_body import parse_generate

    processor = load_image_processor(str(qwen))
    prompt = Prompt(processor).add(list(range(20, 40)), picture(processor, 0), 50)
    runner: Any = SimpleNamespace(context_length=64, vocab_size=263, image_processor=processor)
    body = prompt.body()
    parse_generate(body, grammar=lambda params: None, runner=runner, draw=None)  # type: ignore[arg-type]
    change(body)
    with pytest.raises(BadRequest) as raised:
        parse_generate(body, grammar=lambda params: None, runner=runner, draw=None)  # type: ignore[arg-type]
    assert raised.value.status == 400
    assert problem in str(raised.value)


def test_a_model_that_is_not_on_the_list_is_refused_by_name(qwen: Path, tmp_path: Path) -> None:
    for file in qwen.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (qwen / "config.json").read_text().replace('"qwen2_5_vl"', '"gemma3"')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="is a gemma3 model, whose images are not computed here"):
        resolve_model_path(str(tmp_path))
