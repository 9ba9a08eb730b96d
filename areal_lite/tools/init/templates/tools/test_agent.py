"""Tests of the agent, with a scripted model in place of a server."""

from unittest import IsolatedAsyncioTestCase
from my_agent.scripted_model import play
from my_agent.task import rows


class AgentTest(IsolatedAsyncioTestCase):
    async def test_the_model_reads_the_result_of_its_call(self):
        (row,) = rows(size=1, seed=0)
        call = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}
        reward, prompts = await play(row, call, row["answer"])
        self.assertEqual(reward, 1.0)
        self.assertEqual(prompts[1][-1], {"role": "tool", "tool_call_id": "c", "content": "42"})

    async def test_a_wrong_call_is_an_error_for_the_model_to_read(self):
        (row,) = rows(size=1, seed=0)
        call = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": "six"}}
        reward, prompts = await play(row, call, "0")
        self.assertEqual(reward, 0.0)
        self.assertIn("error", prompts[1][-1]["content"])
