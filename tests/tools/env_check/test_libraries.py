"""areal-lite env-check of libraries: no false alarm, and the tasks whose own verifiers or answers are wrong."""

from __future__ import annotations
import asyncio
import pytest
from areal_lite.api.reward_api import AsyncRewardWrapper
from areal_lite.environments.catalog import rows
from areal_lite.tools.env_check.command import Report, check
from areal_lite.tools.env_check.play import Subject

pytestmark = [pytest.mark.environments, pytest.mark.timeout(600)]
SOUND = {
    "gymnasium": "FrozenLake-v1 Taxi-v4 CartPole-v1 Blackjack-v1 MiniGrid-DoorKey-5x5-v0",
    "textarena": "GuessTheNumber-v0 TicTacToe-v0 KuhnPoker-v0 2048-v0 Mastermind-v0",
    "scienceworld": "boil",
    "reasoning-gym": "ab advanced_geometry aiw arc_1d basic_arithmetic binary_matrix bitwise_arithmetic chain_sum "
    "coin_flip count_bits decimal_chain_sum family_relationships fraction_simplification gcd knights_knaves lcm "
    "leg_counting letter_counting maze needle_haystack number_format number_sorting palindrome_generation puzzle24 "
    "simple_equations spiral_matrix sudoku syllogism tower_of_hanoi word_sorting",
}
NO_ANSWER = "boxnet graph_color propositional_logic rubiks_cube rush_hour"
"""Their rows have None as answer."""
FOUND = {name: {"oracle", "empty", "raises"} for name in NO_ANSWER.split()} | {
    "game_of_life_halting": {"empty"},  # any text is True
    "prime_factorization": {"raises"},  # on what is no number
}


def report(env: str) -> Report:
    return asyncio.run(check(Subject({"env": env}, rows(env, {"size": 8, "seed": 0}))))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("areal_lite.environments.adapters.reasoning_gym")
    monkeypatch.setattr(module, "_scorer", lambda timeout_s: AsyncRewardWrapper(module.score, in_process=True))


@pytest.mark.parametrize("env", [f"{prefix}:{name}" for prefix, names in SOUND.items() for name in names.split()])
def test_there_is_no_false_alarm(env: str, in_process: None) -> None:
    pytest.importorskip(env.partition(":")[0].replace("-", "_"))
    found = report(env)
    assert (found.defects, found.not_run) == ([], {})


@pytest.mark.parametrize("name", FOUND)
def test_tasks_that_reward_wrongly_are_reported(name: str, in_process: None) -> None:
    found = {defect["check"] for defect in report(f"reasoning-gym:{name}").defects}
    assert found and found <= FOUND[name]


def test_rewards_from_worker_processes_leak_nothing() -> None:
    pytest.importorskip("reasoning_gym")
    assert report("reasoning-gym:chain_sum").defects == []
