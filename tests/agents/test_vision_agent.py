"""An agent that sends images, on the embedded server: tokens, log-probs, files and dumps."""

from __future__ import annotations
import asyncio
import base64
import io
from pathlib import Path
from typing import Any
import openai
import orjson
from PIL import Image
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.data.vision.image_processor import load_image_processor
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.embedded.serving import serving, worst
from tests.embedded.test_images import EXACT, Prompt, load
from tests.fixtures.tiny_vlm import save_tiny_vlm


class Looks:
    """Shows a picture, asks, and shows another one of the same size in the next turn."""

    async def run(self, data: dict[str, Any], **access: Any) -> float:
        client = openai.AsyncOpenAI(**access)
        messages: list[Any] = []
        for color in data["colors"]:
            file = io.BytesIO()
            Image.new("RGB", (24, 16), tuple(color)).save(file, "PNG")
            url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            part = {"type": "image_url", "image_url": {"url": url}}
            messages.append({"role": "user", "content": [part, {"type": "text", "text": "Which colour?"}]})
            answer = await client.chat.completions.create(model="m", messages=messages)
            text = data.get("answer", answer.choices[0].message.content)
            messages.append({"role": "assistant", "content": text})
        return 1.0


def test_an_agents_images_are_in_its_tokens_log_probs_and_dump(tmp_path: Path) -> None:
    path = save_tiny_vlm(tmp_path / "model")
    rows = [{"colors": [[200, 0, 0], [0, 200, 0], [200, 0, 0]]}]

    async def play() -> tuple[Any, Any]:
        async with serving(path) as client:
            config = InferenceEngineConfig(
                backend="embedded",
                addresses=[client.address],
                tokenizer_path=str(path),
                fileroot=str(tmp_path),
                dump_to_file=True,
                gconfig=GenerationHyperparameters(max_new_tokens=5),
            )

            def run() -> Any:
                with RemoteInfEngine(config) as engine:
                    return engine.rollout_batch(rows, workflow=Looks(), group_size=2)

            return config, await asyncio.to_thread(run)

    config, (group,) = asyncio.run(play())
    assert group.rewards == [1.0, 1.0], group.error
    store, processor, model = ImageStore.of_run(config.run_dir), load_image_processor(str(path)), load(path)
    assert len(list(store.folder.iterdir())) == 2
    for trajectory in group.trajectories:
        (sequence,) = trajectory.sequences
        first, second, third = sequence.images
        assert first.sha256 == third.sha256 != second.sha256
        for turn in trajectory.turns:
            if turn.role != "assistant":
                continue
            prompt = Prompt(processor)
            prompt.ids = sequence.input_ids[: turn.start].tolist()
            prompt.images = [span for span in sequence.images if span.end <= turn.start]
            prompt.pngs = {span.sha256: store.read(span.sha256) for span in prompt.images}
            assert turn.logprobs is not None
            assert worst(turn.logprobs.tolist(), prompt.logprobs(model, turn.ids.tolist())) < EXACT
    (dump,) = config.run_dir.glob("rollout/*/*.jsonl")
    turns = orjson.loads(dump.read_bytes().splitlines()[0])["turns"]
    assert [len(turn.get("images", [])) for turn in turns] == [1, 0, 1, 0, 1, 0]
