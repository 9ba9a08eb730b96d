"""Real SGLang and vLLM servers that a training run starts, on this machine's CPU; see `make test-servers`."""

from __future__ import annotations
import json
import os
from pathlib import Path
import psutil
import pytest
import yaml
from tests.e2e.test_stopping import start, until_step
from tests.real_servers.launch import server_settings
from tests.real_servers.real_server import SMOLLM2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("weight_update", ["disk", "adapter"])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_a_run_starts_a_real_server_and_outlives_its_death(tmp_path: Path, backend: str, weight_update: str) -> None:
    model = Path(os.environ.get("AREAL_LITE_SERVER_MODEL", SMOLLM2)).absolute()
    config = {
        "experiment_name": "e2e",
        "trial_name": "t",
        "fileroot": str(tmp_path / "runs"),
        "model_path": str(model),
        "workflow": "tests.e2e.agents.LetterAgent",  # its rewards differ, so there are log-probs to compare
        "train_dataset": {"path": "tests.e2e.agents.rows"},
        "rollout": {"group_size": 4, "consumer_batch_size": 2, "gconfig": {"max_new_tokens": 8, "temperature": 0.7}},
        "server": server_settings(backend, model),
        "trainer": {"total_steps": 3, "learning_rate": 1e-4, "dtype": "float32", "num_threads": 1, "device": "cpu"},
        "save_model": False,
    }
    config["rollout"]["weight_update"] = weight_update
    if weight_update == "adapter":
        config["trainer"] |= {"lora": {"rank": 4}, "learning_rate": 2e-3}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    process = start(path, "trainer.total_steps=3")
    until_step(process, 2)
    (server,) = psutil.Process(process.pid).children()
    started = [server, *server.children(recursive=True)]
    server.kill()
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert not psutil.wait_procs(started, timeout=5)[1]
    assert errors.count(f"server {backend}-0 is up again at") == 1
    run_dir = tmp_path / "runs/e2e/t"
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["train/engine_mismatch/log_prob_diff_max"] for record in steps) < 1e-3
    assert max(record["train/staleness_max"] for record in steps) == 0
    assert steps[-1]["episodes/failed"] == 0
    assert (run_dir / f"servers/{backend}-0.log").is_file()
