"""The shape of AReaL's vision workflow, with its imports renamed, on the embedded server."""

from __future__ import annotations
import asyncio
import uuid
from pathlib import Path
from typing import Any
import orjson
import pytest
import torch
from areal_lite.api.cli_args import GenerationHyperparameters  # type: ignore[import-not-found]
from areal_lite.utils.image import image2base64  # type: ignore[import-not-found]
from PIL import Image
from areal_lite.api import (
    InferenceEngine,
    InferenceEngineConfig,
    ModelRequest,
    RolloutWorkflow,
)
from areal_lite.data.vision.canonical_image import CanonicalImage
from areal_lite.data.vision.image_encoder import ImageEncoder, image_encoder
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.tools.replay.dump_reader import read_group
from tests.embedded.serving import serving
from tests.fixtures.tiny_vlm import IMAGE_ID, build_tiny_processor, save_tiny_vlm


class VisionRLVRWorkflow(RolloutWorkflow):
    def __init__(self, gconfig: Any) -> None:
        self.processor = build_tiny_processor()
        self.gconfig = gconfig

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any]:
        images = [Image.new("RGB", tuple(size), "red") for size in data["sizes"]]
        processed = self.processor(images=images, text=[data["text"]], return_tensors="pt")
        input_ids = processed["input_ids"].tolist()[0]
        tokenizer = self.processor.tokenizer
        req = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=input_ids,
            image_data=image2base64(images),
            vision_msg_vllm=[[{"role": "user", "content": data["text"]}]],
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=tokenizer,
            processor=self.processor,
        )
        resp = await engine.agenerate(req)
        reward = float(resp.input_tokens.count(IMAGE_ID))
        seq = resp.input_tokens + resp.output_tokens
        pixels = {name: processed[name] for name in ("pixel_values", "image_grid_thw")}
        columns = {
            "input_ids": torch.tensor(seq),
            "mm_token_type_ids": torch.tensor([int(token == IMAGE_ID) for token in seq]),
            "loss_mask": torch.tensor([0] * resp.input_len + [1] * resp.output_len),
            "logprobs": torch.tensor([0.0] * resp.input_len + resp.output_logprobs),
            "versions": torch.tensor([-1] * resp.input_len + resp.output_versions),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
            "rewards": torch.tensor(reward),
        }
        return {name: value.unsqueeze(0) for name, value in columns.items()} | {"multi_modal_input": [pixels]}


def test_areals_vision_workflow_generates_dumps_and_leaves_spans(tmp_path: Path) -> None:
    model = save_tiny_vlm(tmp_path / "model")
    row = {"text": "a<|image_pad|>b<|image_pad|>?", "sizes": [[24, 16], [16, 8]]}
    gconfig = GenerationHyperparameters(max_new_tokens=4, ignore_eos=True)
    settings: dict[str, Any] = {"tokenizer_path": str(model), "fileroot": str(tmp_path), "dump_to_file": True}

    async def play() -> tuple[Any, Any]:
        async with serving(model) as client:
            config = InferenceEngineConfig(backend="embedded", addresses=[client.address], **settings)

            def run() -> Any:
                with RemoteInfEngine(config) as engine:
                    return engine.rollout_batch(
                        [row], workflow=VisionRLVRWorkflow, workflow_kwargs={"gconfig": gconfig}, group_size=2
                    )

            return config, await asyncio.to_thread(run)

    config, (group,) = asyncio.run(play())
    assert group.rewards == [8.0, 8.0], group.error
    for trajectory in group.trajectories:
        (sequence,) = trajectory.sequences
        assert [(span.offset, span.length, span.grid) for span in sequence.images] == [
            (1, 6, (1, 4, 6)),
            (8, 2, (1, 2, 4)),
        ]
        assert "multi_modal_input" not in trajectory.extras
        assert trajectory.turns[0].images == sequence.images
    store = ImageStore.of_run(config.run_dir)
    assert len(list(store.folder.iterdir())) == 2
    (dump,) = config.run_dir.glob("rollout/*/*.jsonl")
    for line in map(orjson.loads, dump.read_bytes().splitlines()):
        assert [store.read(span["sha256"])[:4] for span in line["turns"][0]["images"]] == [b"\x89PNG"] * 2
    assert [sequence.images for sequence in read_group(dump).sequences] == [sequence.images] * 2


def test_images_that_their_tokens_do_not_fit_are_refused(tmp_path: Path) -> None:
    build_tiny_processor().image_processor.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    encoder = image_encoder(str(tmp_path), build_tiny_processor().tokenizer, tmp_path)
    assert isinstance(encoder, ImageEncoder)
    six, two = CanonicalImage(b"", "a" * 64, (1, 4, 6)), CanonicalImage(b"", "b" * 64, (1, 2, 4))
    ids = [1, *[IMAGE_ID] * 6, *[IMAGE_ID] * 2, 3]
    assert [span.offset for span in encoder.located(ids, [six, two])] == [1, 7]
    for images in ([six], [six, two, two], [two, two], []):
        with pytest.raises(ConfigError, match="8 placeholders of images"):
            encoder.located(ids, images)
    with pytest.raises(ConfigError, match="8 placeholders of images"):
        encoder.located([1, *[IMAGE_ID] * 3, 2, *[IMAGE_ID] * 5], [six, two])
