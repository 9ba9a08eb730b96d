"""The log-prob probe tells the trainer's own model from another one, through a real server."""

from __future__ import annotations
from pathlib import Path
import pytest
from areal_lite.api import InferenceEngineConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.server_probe import NUM_TOKENS, USUAL_DIFFERENCE, compare_logprobs, probe_prompt
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.trainer.rl.policy_trainer import EngineSampling, PolicyTrainer
from tests.fixtures.tiny_model import build_tiny_model


def test_a_probe_measures_how_far_a_server_is_from_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = build_tiny_model(tmp_path / "ours"), build_tiny_model(tmp_path / "other", seed=1)
    config = TrainerConfig(total_steps=1, learning_rate=1e-3, dtype="float32", device="cpu", num_threads=1)
    trainer = PolicyTrainer(config, model_path=str(ours), seed=1, sampling=EngineSampling(temperature=0.7))
    prompt = probe_prompt(load_tokenizer(str(ours)))
    with (
        EmbeddedServer(model_path=str(ours), dtype="float32", num_threads=1, device="cpu") as server,
        RemoteInfEngine(InferenceEngineConfig(addresses=[server.address]), model_path=str(ours)) as engine,
    ):
        answers = engine.probe(prompt, NUM_TOKENS)
        assert [len(tokens) for _, tokens, _ in answers] == [NUM_TOKENS]
        (figure,) = compare_logprobs(trainer, prompt, answers).values()
        assert figure < 1e-4
        engine.update_weights_from_disk(str(other), 1)
        answers = engine.probe(prompt, NUM_TOKENS)
        caplog.clear()
        (figure,) = compare_logprobs(trainer, prompt, answers, warn_above=USUAL_DIFFERENCE["float32"]).values()
        assert figure > 0.25
        assert f"log-probs of server {server.address} differ from the trainer's by {figure:.4f} nats" in caplog.text
        with pytest.raises(ConfigError, match=rf"log-probs of {server.address} \(\d.* nats\) differ from"):
            compare_logprobs(trainer, prompt, answers)
    assert trainer._policy.temperature == 0.7
