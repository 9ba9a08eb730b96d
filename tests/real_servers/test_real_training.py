"""Twenty training steps on each real server, with the weights of every step loaded into it."""

from __future__ import annotations
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar
import pytest
import yaml
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training
from tests.fixtures.tiny_model import build_tiny_model
from tests.real_servers.launch import real_process

CONFIG = """
experiment_name: servers
workflow: tests.e2e.agents.LetterAgent
train_dataset: {path: tests.e2e.agents.rows}
rollout:
  group_size: 4
  consumer_batch_size: 8
  max_head_offpolicyness: 0
  dump_to_file: true
  gconfig: {max_new_tokens: 8}
server: {dtype: float32}
trainer: {total_steps: 20, learning_rate: 5.0e-3, dtype: float32, num_threads: 1, device: cpu}
save_model: false
"""


class TrainingContract:
    backend: ClassVar[str]

    def test_an_agent_learns_and_every_token_is_of_the_newest_weights(
        self, tmp_path: Path, record_property: Callable[[str, object], None]
    ) -> None:
        model = build_tiny_model(tmp_path / "tiny", hidden_size=128)
        with real_process(self.backend, model, tmp_path) as server:
            config = yaml.safe_load(CONFIG) | {"model_path": str(model), "fileroot": str(tmp_path / "runs")}
            config["rollout"] |= {"backend": self.backend, "addresses": [server.address]}
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
            begin = time.monotonic()
            summary = run_training(load_config(tmp_path / "run.yaml"))
            seconds = time.monotonic() - begin
        steps = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_bytes().splitlines()]
        assert [step["step"] for step in steps] == list(range(1, 21))
        assert {step["train/staleness_max"] for step in steps} == {0}
        name = "train/engine_mismatch/log_prob_diff_max"  # not in steps whose groups have equal rewards throughout
        mismatches = [step[name] for step in steps if name in step]
        assert len(mismatches) >= 4
        assert max(mismatches) < 1e-3
        rewards = [step["train/reward_mean"] for step in steps]
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        assert last > first + 0.2
        record_property("20 training steps: seconds", f"{seconds:.0f}")
        record_property("20 training steps: largest difference of log-probs", f"{max(mismatches):.0e}")
        record_property("20 training steps: mean reward of the first and the last 5", f"{first:.2f}, {last:.2f}")


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestSGLangTraining(TrainingContract):
    backend = "sglang"


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestVLLMTraining(TrainingContract):
    backend = "vllm"
