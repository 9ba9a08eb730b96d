"""Tests of the agent, with a scripted model in place of a server."""

from unittest import IsolatedAsyncioTestCase
from my_agent.scripted_model import play
from my_agent.task import rows


class AgentTest(IsolatedAsyncioTestCase):
    async def test_each_retry_costs_reward(self):
        (row,) = rows(size=1, seed=0)
        right = row["answer"]
        for answers, expected in [([right], 1.0), (["0", right], 0.8), (["0", "1000", "no idea"], 0.0)]:
            reward, prompts = await play(row, *answers)
            self.assertAlmostEqual(reward, expected)
            self.assertEqual([len(prompt) for prompt in prompts], [1, 3, 5][: len(answers)])
