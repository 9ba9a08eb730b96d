"""Each episode has its own process-wide random state: interleaved episodes equal the same ones alone."""

from __future__ import annotations
import asyncio
import random
from typing import Any
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.environments import WrongAction
from areal_lite.environments.catalog import environment_maker, rows
from areal_lite.environments.environment import Observation
from areal_lite.environments.random_state import OwnRandom

ACTIONS = {
    "tests.environments.games.Dice": ["roll"],
    "reasoning-gym:chain_sum": ["1"],
    "gymnasium:FrozenLake-v1": ["left", "down", "right"],
    "gymnasium:Blackjack-v1": ["hit"],
    "gymnasium:MiniGrid-DoorKey-5x5-v0": ["left", "forward", "nonsense"],
    "textarena:2048-v0": ["[up]", "[left]", "[down]"],
    "textarena:KuhnPoker-v0": ["[check]", "[bet]", "[call]", "[fold]"],
    "textarena:Blackjack-v0": ["[hit]", "[stand]"],
    "textarena:Minesweeper-v0": ["[1 1]", "[2 5]"],
}
"""Environments, and what is played in turn; those of one library share its global state."""
PACKAGE = {"reasoning-gym": "reasoning_gym"}


class Play:
    """An episode that is played step by step; ``seen`` has all that a player could see."""

    def __init__(self, env: str, seed: int) -> None:
        self.own, self.seed, self.seen = OwnRandom(seed), seed, list[Any]()
        self.actions = ACTIONS[env]
        with self.own.in_place():
            self.environment = environment_maker(env, {})()
        prefix, colon, _ = env.partition(":")
        name = env if colon else f"env:{env}"
        self.row = rows(name, {"size": 1, "seed": seed})[0]
        self.done, self.turn = False, -1

    async def go_on(self) -> None:
        if self.done:
            return
        self.turn += 1
        if self.turn == 0:
            seen = await self.own.run(self.environment.reset(self.row, self.seed))
            self.seen.append(seen.messages if isinstance(seen, Observation) else seen)
            return
        try:
            step = await self.own.run(self.environment.step(self.actions[self.turn % len(self.actions)]))
        except WrongAction as error:
            self.seen.append(str(error))
            return
        self.done = step.done or step.truncated
        self.seen.append((step.messages, step.reward, step.player, step.done, step.truncated))


async def played(env: str, seeds: tuple[int, int], order: list[int]) -> list[Any]:
    """Return what two episodes see whose moves come in this order."""
    plays = [Play(env, seed) for seed in seeds]
    for which in order:
        await plays[which].go_on()
    for play in plays:
        await play.own.run(play.environment.close())
    return [play.seen for play in plays]


@pytest.mark.parametrize("env", ACTIONS)
def test_interleaved_episodes_equal_the_same_ones_alone(env: str) -> None:
    prefix, colon, name = env.partition(":")
    if colon:
        pytest.importorskip(PACKAGE.get(prefix, prefix))
    if "MiniGrid" in name:
        pytest.importorskip("minigrid")

    @settings(max_examples=8, deadline=None, database=None)
    @given(st.lists(st.integers(0, 1), min_size=6, max_size=12), st.integers(0, 2**31 - 1))
    def check(order: list[int], seed: int) -> None:
        outer = random.getstate(), np.random.get_state()[1].tolist()
        together = asyncio.run(played(env, (seed, seed ^ 1), order))
        alone = asyncio.run(played(env, (seed, seed ^ 1), sorted(order)))
        assert together == alone
        assert (random.getstate(), np.random.get_state()[1].tolist()) == outer

    check()


def test_episodes_that_wait_for_each_other_keep_their_states() -> None:
    async def both() -> list[Any]:
        plays = [Play("tests.environments.games.Dice", seed) for seed in (3, 3, 4)]

        async def whole(play: Play) -> list[Any]:
            for _ in range(4):
                await play.go_on()
            return play.seen

        return await asyncio.gather(*map(whole, plays))

    first, same, other = asyncio.run(both())
    assert first == same != other


def test_a_cancelled_wait_gives_the_state_back() -> None:
    async def waits() -> None:
        random.seed(5)
        try:
            await asyncio.Event().wait()
        finally:
            random.seed(6)

    async def run() -> None:
        task = asyncio.create_task(OwnRandom(1).run(waits()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    before = random.getstate()
    asyncio.run(run())
    assert random.getstate() == before


def test_what_a_wait_returns_or_raises_reaches_the_coroutine() -> None:
    async def waits(future: asyncio.Future[int]) -> int:
        try:
            return await future
        except KeyError:
            return -1

    async def run(set_it: Any) -> int:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(OwnRandom(1).run(waits(future)))
        await asyncio.sleep(0)
        set_it(future)
        return await task

    assert asyncio.run(run(lambda future: future.set_result(3))) == 3
    assert asyncio.run(run(lambda future: future.set_exception(KeyError()))) == -1
