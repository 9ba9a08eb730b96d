"""A game against an older version of the policy: whose tokens are whose, what trains, and what a resume restores."""

from __future__ import annotations
import json
from functools import partial
from pathlib import Path
from typing import Any
import pytest
import yaml
from openai import AsyncOpenAI
from areal_lite.api.engine_api import OLDER_POLICY
from areal_lite.config.loader import load_config
from areal_lite.errors import ConfigError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.entry_points import run_training
from areal_lite.servers.client.engine_client import EngineClient
from areal_lite.tools.verify.verify import check_run

EVERY = 2


class Judged:
    """Answers, and has the older policy read the answer; longer judgements are better."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Return the length of the judgement."""
        async with AsyncOpenAI(**extra_kwargs) as client:
            ask = partial(client.chat.completions.create, model="default", max_completion_tokens=4)
            answer = (await ask(messages=[{"role": "user", "content": "Answer."}])).choices[0].message.content
            question = [{"role": "user", "content": f"How good is {answer}?"}]
            judgement = await ask(messages=question, metadata={"agent": OLDER_POLICY})
        assert judgement.usage is not None
        return float(judgement.usage.completion_tokens)


class Crash(Exception):
    """Stops a run from within."""


@pytest.fixture
def game_yaml(run_yaml: Path) -> Path:
    values = yaml.safe_load(run_yaml.read_text())
    del values["workflow"], values["train_dataset"], values["eval_dataset"]
    values |= {"env": "tests.environments.games.Kuhn", "workflow_kwargs": {"opponent": "older"}, "eval_dataset": None}
    values["rollout"]["gconfig"] = {"max_new_tokens": 1}
    values["trainer"]["total_steps"] = 5
    values |= {"older_policy": {"every_steps": EVERY}, "checkpoint": {"every_steps": 1}, "save_model": False}
    run_yaml.write_text(yaml.safe_dump(values))
    return run_yaml


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, tuple[int, ...]]]:
    """Return the policy's version and those of the tokens, of each answer of the older policy."""
    found, ask = set(), RemoteInfEngine._ask_older

    async def noted(self: RemoteInfEngine, req: Any) -> Any:
        version, response = self.get_version(), await ask(self, req)
        found.add((version, tuple(response.output_versions)))
        return response

    monkeypatch.setattr(RemoteInfEngine, "_ask_older", noted)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_the_older_version_stays_behind_never_trains_and_is_there_after_a_resume(
    game_yaml: Path, asked: set[tuple[int, tuple[int, ...]]], workers: int
) -> None:
    config = load_config(game_yaml, [f"rollout.workers={workers}"])

    def crash(step: int, metrics: Any) -> None:
        if step == 3 and "train/loss" in metrics:
            raise Crash

    with pytest.raises(Crash):
        run_training(config, on_step=crash)
    assert asked - {(3, (2,))} == {(0, (0,)), (1, (0,)), (2, (2,))}
    asked.clear()
    run_training(config)  # from the checkpoint of step 2 or 3
    assert asked - {(2, (2,))} == {(3, (2,)), (4, (4,))}
    lines = [
        json.loads(line) for path in config.run_dir.glob("rollout/*/*.jsonl") for line in path.read_bytes().splitlines()
    ]
    turns = [(line, turn) for line in lines for turn in line["turns"] if turn["role"] == "assistant"]
    assert {turn["agent"] for _, turn in turns if any(turn["loss_mask"])} == {"seat-0", "seat-1"}
    older = [(line, turn) for line, turn in turns if turn["agent"] == OLDER_POLICY and line["status"] != "cancelled"]
    assert {line["start_version"] for line, _ in older} == {0, 1, 2, 3, 4}
    for line, turn in older:
        assert {*turn["versions"]} == {line["start_version"] - line["start_version"] % EVERY}
        assert (line["status"], line["reward"], {*turn["loss_mask"]}) == ("untrained", None, {0})
    assert check_run(config.run_dir).findings == []


def test_a_judge_keeps_the_first_weights_and_its_share_of_requests(
    run_yaml: Path, asked: set[tuple[int, tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, []
    generate = EngineClient.generate

    async def counted(self: EngineClient, req: Any) -> Any:
        nonlocal running
        is_judge = req.metadata.get("agent") == OLDER_POLICY
        running += is_judge
        most.append(running)
        try:
            return await generate(self, req)
        finally:
            running -= is_judge

    monkeypatch.setattr(EngineClient, "generate", counted)
    own = ["workflow=tests.e2e.test_self_play.Judged", "workflow_kwargs={}", "eval_dataset=null", "save_model=false"]
    judge = ["older_policy.every_steps=null", "older_policy.max_concurrent_requests=1"]
    config = load_config(run_yaml, [*own, *judge, "trainer.total_steps=3", "checkpoint.every_steps=1"])

    def crash(step: int, metrics: Any) -> None:
        if step == 2 and "train/loss" in metrics:
            raise Crash

    with pytest.raises(Crash):
        run_training(config, on_step=crash)
    run_training(config)
    assert {versions for _, tokens in asked for versions in tokens} == {0}
    assert {version for version, _ in asked} == {0, 1, 2} and max(most) == 1
    assert check_run(config.run_dir).findings == []


def test_an_older_opponent_without_a_server_for_it_is_refused_before_the_start(game_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"opponent is older, and older_policy is null: set older_policy.every_steps"):
        run_training(load_config(game_yaml, ["older_policy=null"]))
