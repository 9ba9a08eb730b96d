"""What a process keeps of the pictures of its episodes: spans, and each picture once on disk."""

from __future__ import annotations
import asyncio
import base64
import gc
import io
import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np
import openai
import orjson
from aiohttp import web_request
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from areal_lite.api import GenerationHyperparameters
from areal_lite.data.vision.image_processor import load_image_processor
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests import stub_server
from tests.fixtures.engines import MakeEngine
from tests.fixtures.tiny_vlm import CHAT_TEMPLATE, build_tiny_processor
from tests.stub_server import StubThread


def noise(seed: int, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


class Watches:
    """Sends a new picture in every turn of a conversation, and all before it."""

    def __init__(self, turns: int, picture: Callable[[int], bytes]) -> None:
        self.turns = turns
        self.picture = picture

    async def run(self, data: dict[str, Any], **access: Any) -> float:
        client = openai.AsyncOpenAI(**access)
        messages: list[Any] = []
        for turn in range(self.turns):
            png = await asyncio.to_thread(self.picture, data["first"] + turn)
            url = {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}
            messages.append({"role": "user", "content": [{"type": "image_url", "image_url": url}]})
            answer = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return 1.0


def model_folder(folder: Path) -> Path:
    """Save what an engine needs of a Qwen2.5-VL with the image processor of the published ones."""
    processor = build_tiny_processor()
    processor.tokenizer.chat_template = CHAT_TEMPLATE
    processor.tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=12845056).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return folder


def watch(
    engine: RemoteInfEngine, stub: StubThread, episodes: int, turns: int, picture: Callable[[int], bytes], first: int
) -> list[Any]:
    """Return the groups of as many episodes, whose pictures are all different."""
    processor = load_image_processor(engine.config.tokenizer_path or "")
    with Image.open(io.BytesIO(picture(0))) as image:
        size = processor.size(image.height, image.width)
    stub.server.image_tokens = processor.num_tokens(processor.grid(*size))
    stub.server.requests = deque(maxlen=1)  # type: ignore[assignment] # bodies have pictures
    rows = [{"first": first + episode * turns} for episode in range(episodes)]
    groups = engine.rollout_batch(rows, workflow=Watches(turns, picture), group_size=1)
    assert all(group.rewards == [1.0] for group in groups), groups[0].error
    return groups


def test_episodes_keep_no_pictures_and_each_is_stored_once(
    start_stub: Callable[..., StubThread], start_engine: MakeEngine, tmp_path: Path
) -> None:
    stub = start_stub()
    stub.server.told["context_length"] = 1 << 16
    gconfig = GenerationHyperparameters(max_new_tokens=4, max_tokens=1 << 16)
    engine = start_engine(stub, tokenizer_path=str(model_folder(tmp_path)), gconfig=gconfig, dump_to_file=True)
    images = engine._client._images
    images._max_bytes = 2 * 150_000  # of two pictures, as 64 MB are of a hundred screenshots

    def picture(seed: int) -> bytes:
        return noise(seed, (224, 168))

    watch(engine, stub, 2, 2, picture, first=1000)  # what is loaded once
    tracemalloc.start()
    try:
        groups = watch(engine, stub, 8, 4, picture, first=0)
        gc.collect()
        of_server = [tracemalloc.Filter(False, file) for file in (stub_server.__file__, web_request.__file__)]
        traces = tracemalloc.take_snapshot().filter_traces(of_server).traces  # without the server's last bodies
        grown = sum(trace.size for trace in traces)
    finally:
        tracemalloc.stop()
    store = ImageStore.of_run(engine.config.run_dir)
    files = list(store.folder.iterdir())
    assert len(files) == 4 + 8 * 4
    stored = sum(path.stat().st_size for path in files)
    assert stored > 32 * 100_000
    assert grown < stored / 5
    spans = [span for group in groups for span in group.trajectories[0].sequences[0].images]
    assert len({span.sha256 for span in spans}) == len(spans) == 32
    engine.flush_dumps()
    dumps = list(engine.config.run_dir.glob("rollout/*/*.jsonl"))
    assert sum(path.stat().st_size for path in dumps) < stored / 5
    assert orjson.loads(dumps[0].read_bytes().splitlines()[0])["turns"][0]["images"]
