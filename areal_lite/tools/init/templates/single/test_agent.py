"""Tests of the agent, with a scripted model in place of a server."""

from unittest import IsolatedAsyncioTestCase
from my_agent.scripted_model import play
from my_agent.task import rows


class AgentTest(IsolatedAsyncioTestCase):
    async def test_only_the_right_answer_is_rewarded(self):
        (row,) = rows(size=1, seed=0)
        for answer, expected in [(row["answer"], 1.0), ("0", 0.0), ("no idea", 0.0)]:
            reward, prompts = await play(row, answer)
            self.assertEqual(reward, expected)
            self.assertIn(row["question"], prompts[0][-1]["content"])
