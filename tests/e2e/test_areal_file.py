"""A workflow file in AReaL's style, named in a YAML: its tokenizer is loaded and its numbers are metrics."""

from __future__ import annotations
import json
from pathlib import Path
import pytest
from areal_lite.config.loader import load_config
from areal_lite.runs.entry_points import run_evaluation, run_training

FILE = """
from areal_lite import workflow_context
from areal_lite.api import AsyncRewardWrapper, RolloutWorkflow
from areal_lite.experimental.openai import ArealOpenAI
from areal_lite.utils import stats_tracker
from transformers import PreTrainedTokenizerFast

def letters(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(c.islower() for c in completions) / 8

class Letters(RolloutWorkflow):
    def __init__(self, reward_fn, gconfig, tokenizer: PreTrainedTokenizerFast, tokenizer_path: str):
        assert isinstance(tokenizer, PreTrainedTokenizerFast) and isinstance(tokenizer_path, str)
        self.gconfig, self.tokenizer = gconfig, tokenizer
        self.reward = AsyncRewardWrapper(reward_fn)

    async def arun_episode(self, engine, data):
        client = ArealOpenAI(engine, self.tokenizer, self.gconfig)
        messages = [{"role": "user", "content": data["question"]}]
        made = await client.chat.completions.create(messages=messages)
        resp = client.get_interaction(made.id).model_response
        text = made.choices[0].message.content
        reward = await self.reward(data["question"], text, resp.input_tokens, resp.output_tokens, **data)
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward, answer_len=resp.output_len)
        stats_tracker.get("rollout").scalar(lead_groups=1e9)
        client.set_last_reward(reward)
        return client.export_interactions()
"""


def test_its_numbers_reach_the_metrics_of_each_step_and_evaluation(
    served_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "areal_letters.py").write_text(FILE)
    overrides = [
        "workflow=areal_letters.Letters",
        "workflow_kwargs={reward_fn: areal_letters.letters}",
        "trainer.total_steps=2",
    ]
    summary = run_training(load_config(served_yaml, overrides))
    lines = [json.loads(line) for line in (summary.run_dir / "metrics.jsonl").read_bytes().splitlines()]
    steps = [line for line in lines if "eval/reward" not in line]
    evaluations = [line for line in lines if "eval/reward" in line]
    assert (len(steps), len(evaluations)) == (2, 2)
    for step in steps:  # on-policy, so the episodes of the step are those of its batch
        assert step["rollout/reward"] == pytest.approx(step["train/reward_mean"])
        assert 1 <= step["rollout/answer_len"] <= 8
        assert step["rollout/lead_groups"] < 1e6
        assert "eval-rollout/reward" not in step
    for evaluation in evaluations:
        assert evaluation["eval-rollout/reward"] == pytest.approx(evaluation["eval/reward"])
        assert "rollout/reward" not in evaluation
    assert "episodes recorded rollout/lead_groups, which are metrics of the run" in caplog.text

    alone = run_evaluation(load_config(served_yaml, overrides))
    assert alone.metrics()["eval-rollout/reward"] == pytest.approx(alone.reward)
