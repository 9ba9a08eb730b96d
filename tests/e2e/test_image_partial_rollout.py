"""A conversation with images that is stopped, saved, and goes on after a weight update: server and trainer agree."""

from __future__ import annotations
import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.api import GenerationHyperparameters, InferenceEngine, InferenceEngineConfig, ModelRequest
from areal_lite.api.image_span import ImageSpan
from areal_lite.api.trajectory import TokenSequence
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.training_run import give_images
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.embedded.serving import serving
from tests.fixtures.tiny_vlm import IMAGE_ID, build_tiny_vlm, save_tiny_vlm
from tests.fixtures.vision_sequences import Pictures
from tests.rollout.scripted import tensors_of

LONG = 400


class ThreeTurns(RolloutWorkflow):
    """Shows a picture, then another, of whose long answer some tokens are awaited, then asks about both."""

    def __init__(self, images: list[ImageSpan], begun: threading.Event) -> None:
        self.images = images
        self.begun = begun

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor]:
        ids: list[int] = []
        spans: list[ImageSpan] = []
        responses = []
        for turn, count in enumerate((6, LONG, 8)):
            ids = [*ids, 30 + turn, 31, 32]
            if turn < len(self.images):
                spans.append(self.images[turn]._replace(offset=len(ids)))
                ids += [IMAGE_ID] * spans[-1].length
            gconfig = GenerationHyperparameters(
                max_new_tokens=count, ignore_eos=True, logit_bias={IMAGE_ID: -100.0}, temperature=1.0
            )
            req = ModelRequest(input_ids=[*ids, 33], images=tuple(spans), gconfig=gconfig, on_tokens=self.received)
            responses.append(await engine.agenerate(req))
            ids = responses[-1].input_tokens + responses[-1].output_tokens
        return tensors_of(*responses)

    def received(self, tokens: Any, logprobs: Any) -> None:
        self.count = getattr(self, "count", 0) + len(tokens)
        if self.count > 12:  # in the middle of the second answer
            self.begun.set()


def source() -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer([{"n": 1}], SourceSettings(n_samples_per_prompt=1))


def trainer_of(model: Path, run_dir: Path, *, deterministic: bool) -> PolicyTrainer:
    config = TrainerConfig(
        total_steps=1, learning_rate=1e-3, dtype="float32", num_threads=1, device="cpu", deterministic=deterministic
    )
    trainer = PolicyTrainer(config, model_path=str(model), seed=1)
    give_images(trainer, str(model), run_dir)
    return trainer


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_stopped_conversation_with_images_goes_on_after_an_update(tmp_path: Path, deterministic: bool) -> None:
    before = save_tiny_vlm(tmp_path / "before")
    after = save_tiny_vlm(tmp_path / "after")
    build_tiny_vlm(seed=1).save_pretrained(after)
    config = InferenceEngineConfig(
        backend="embedded",
        tokenizer_path=str(before),
        fileroot=str(tmp_path),
        consumer_batch_size=1,
        max_head_offpolicyness=1,
        max_concurrent_rollouts=1,
    )
    pictures = Pictures(before, ImageStore.of_run(config.run_dir).folder)
    made = [pictures.image(seed) for seed in (0, 1)]
    spans = [ImageSpan(0, pictures.processor.num_tokens(one.grid), one.sha256, one.grid) for one in made]

    def play(address: str) -> TokenSequence:
        with RemoteInfEngine(replace(config, addresses=[address])) as engine:
            first, begun = source(), threading.Event()
            with ThreadPoolExecutor() as thread:
                batch = thread.submit(engine.prepare_batch, first, ThreeTurns(spans, begun))
                assert begun.wait(60)
                engine.close_source(first)
                with pytest.raises(ConfigError, match="the source was closed"):
                    batch.result(60)
            first.save(1, tmp_path)
            engine.update_weights_from_disk(str(after), 1)
            second = source()
            second.load(1, tmp_path)
            ((kept,),) = second.buffer
            assert [span.offset for span in kept.images] == [3, 3 + 6 + 1 + 6 + 3]
            (group,) = engine.prepare_batch(second, ThreeTurns(spans, begun))
            (sequence,) = group.trajectories[0].sequences
            assert sequence.input_ids[: len(kept.tokens)].tolist() == list(kept.tokens)
            return sequence

    async def run() -> TokenSequence:
        async with serving(before, deterministic=deterministic) as client:
            return await asyncio.to_thread(play, client.address)

    try:
        sequence = asyncio.run(run())
        assert [span.sha256 for span in sequence.images] == [one.sha256 for one in made]
        assert sequence.versions is not None
        assert sequence.logprobs is not None
        trained = sequence.loss_mask
        versions = sequence.versions[trained]
        assert trained.sum() == 6 + LONG + 8
        assert 6 < (versions == 0).sum() < 6 + LONG
        assert (versions[6 : 6 + LONG] == 1).any()
        ours = np.stack(
            [
                trainer_of(model, config.run_dir, deterministic=deterministic).logprobs_of([sequence]).cpu().numpy()
                for model in (before, after)
            ]
        )
        expected = np.take_along_axis(ours, versions[None], 0)[0]
        difference = np.abs(expected - sequence.logprobs[trained])
        assert difference.max() <= (0.0 if deterministic else 1e-4)
    finally:
        torch.use_deterministic_algorithms(False)
