"""A model that reads images on real servers: their log-probs are those of the trainer."""

from __future__ import annotations
from pathlib import Path
from typing import Literal
import numpy as np
import pytest
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.data.vision.image_processor import load_image_processor
from areal_lite.data.vision.image_store import ImagePixels, ImageStore
from areal_lite.models.policy_model import load_policy
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.trainer.forward.logprobs import TokenScorer
from tests.agents.test_vision_agent import Looks
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.real_servers.contract import EXACT, distances
from tests.real_servers.launch import real_process
from tests.trainer.forward.test_packed_images import CPU, packed_logprobs


class ImagesContract:
    """What the engine promises of images on any server."""

    backend: Literal["sglang", "vllm", "embedded"]

    def test_turns_with_images_have_exact_log_probs_also_after_an_update(self, tmp_path: Path) -> None:
        old, new = (save_tiny_vlm(tmp_path / f"model{seed}", seed=seed, large=True) for seed in (0, 1))
        with real_process(self.backend, old, tmp_path / "server") as server:
            config = InferenceEngineConfig(
                backend=self.backend,
                addresses=[server.address],
                tokenizer_path=str(old),
                fileroot=str(tmp_path),
                dump_to_file=True,
                gconfig=GenerationHyperparameters(max_new_tokens=5),
            )
            red, green, blue = [200, 0, 0], [0, 200, 0], [0, 0, 200]
            # A random model may sample the placeholder of a video, which SGLang refuses in a prompt.
            rows = [{"colors": colors, "answer": "red"} for colors in ([red, green, red], [blue, green])]
            with RemoteInfEngine(config) as engine:
                for version, path in ((0, old), (1, new)):
                    if version:
                        engine.update_weights_from_disk(str(path), version)
                    scorer = TokenScorer(load_policy(str(path), device=CPU), temperature=1.0)
                    scorer.pixels = ImagePixels(ImageStore.of_run(config.run_dir), load_image_processor(str(path)))
                    for group in engine.rollout_batch(rows, workflow=Looks(), group_size=2):
                        assert group.rewards == [1.0, 1.0], group.error
                        sequences = list(group.sequences)
                        assert {len(one.images) for one in sequences} <= {1, 2, 3}
                        recorded = np.concatenate([one.logprobs[one.loss_mask] for one in sequences])
                        trained = packed_logprobs(scorer, sequences, 1000).detach().numpy()
                        distances.append(float(np.abs(recorded - trained).max()))
                        assert distances[-1] < EXACT, version


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestSGLangImages(ImagesContract):
    backend = "sglang"


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestVLLMImages(ImagesContract):
    backend = "vllm"


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestEmbeddedImages(ImagesContract):
    backend = "embedded"
