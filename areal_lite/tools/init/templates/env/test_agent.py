"""Tests of the environment; no model is needed."""

from unittest import IsolatedAsyncioTestCase
from areal_lite.environments import WrongAction
from my_agent.task import GuessNumber


async def play(*actions, seed=7):
    """Return the hidden number and the steps of one game."""
    game = GuessNumber()
    await game.reset({}, seed)
    number = game.number
    return number, [await game.step(action.format(number=number, near=number - 1)) for action in actions]


class GuessNumberTest(IsolatedAsyncioTestCase):
    async def test_the_rewards_sum_up_to_the_closest_guess(self):
        _, steps = await play("{near}", "0", "{number}")
        self.assertAlmostEqual(steps[0].reward, 0.98)
        self.assertAlmostEqual(sum(step.reward for step in steps), 1.0)
        self.assertEqual([step.done for step in steps], [False, False, True])

    async def test_the_model_reads_where_to_look(self):
        _, steps = await play("{near}", "51")
        self.assertEqual([step.messages for step in steps], ["My number is higher.", "My number is lower."])

    async def test_a_game_ends_and_text_without_a_number_is_no_guess(self):
        _, steps = await play("0", "0", "0", "0")
        self.assertEqual([step.done for step in steps], [False, False, False, True])
        with self.assertRaises(WrongAction):
            await play("none")

    async def test_episodes_of_a_row_have_one_number(self):
        self.assertEqual((await play(seed=3))[0], (await play(seed=3))[0])
