"""The tiny model and its YAML of the end-to-end tests, and an SFT run without servers."""

import json
from pathlib import Path
import pytest
from tests.e2e.conftest import run_yaml as run_yaml
from tests.e2e.conftest import served_yaml as served_yaml


@pytest.fixture
def sft_yaml(tmp_path: Path, tiny_model: Path) -> Path:
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}] for n in range(1, 9)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    path = tmp_path / "sft.yaml"
    path.write_text(
        f"{{kind: sft, experiment_name: s, fileroot: {tmp_path}/runs, model_path: {tiny_model}, "
        f"train_dataset: {{path: {rows}, max_length: 64}}, "
        "trainer: {batch_size: 2, epochs: 50, learning_rate: 1.0e-4, device: cpu, num_threads: 1}}"
    )
    return path
