"""Training again from the dumps of a run: equal weights, or one sentence that says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lite.api.config_loader import load_config
from areal_lite.launch.replay import plan_replay, run_replay, same_weights
from areal_lite.launch.run import run_training


def replayed(run: Path, *overrides: str) -> Path:
    return run_replay(plan_replay(run, overrides)).run_dir


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["trainer.advantage=gae", "trainer.critic={learning_rate: 0.01}"],
        ["trainer.advantage=remax", "trainer.lora={rank: 4}", "trainer.kl={coef: 0.01}"],
        [
            "workflow=tests.replay.agents.RewardedTurns",
            "trainer.advantage=turn_grpo",
            "rollout.max_head_offpolicyness=1",
            "trainer.minibatches_per_step=2",
        ],
    ],
    ids=["grpo", "ppo", "remax-lora", "async-turns"],
)
def test_an_unchanged_replay_ends_with_the_runs_weights(
    run_yaml: Path, plain_run: Path, overrides: list[str], request: pytest.FixtureRequest
) -> None:
    run = plain_run
    if overrides:
        name = request.node.callspec.id
        run = run_training(load_config(run_yaml, [f"trial_name={name}", *overrides])).run_dir
    plan = plan_replay(run)
    assert plan.is_same
    copy = run_replay(plan).run_dir
    assert copy.name == f"{run.name}-replay"
    assert same_weights(run, copy) is True
