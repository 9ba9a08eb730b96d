"""Tests of the agent, with a scripted model in place of a server."""

from unittest import IsolatedAsyncioTestCase, mock

from openai.types.chat import ChatCompletion

from my_agent.agent import Agent
from my_agent.task import rows


class ScriptedModel:
    """Takes the place of ``AsyncOpenAI`` and gives these answers in turn."""

    def __init__(self, *answers):
        self.answers, self.prompts = list(answers), []
        self.chat = self.completions = self

    async def create(self, *, messages, **options):
        self.prompts.append(list(messages))
        answer = self.answers.pop(0)
        message = {"content": answer} if isinstance(answer, str) else {"tool_calls": [answer]}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant"} | message}
        return ChatCompletion.model_validate(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "default", "choices": [choice]}
        )


async def play(row, *answers):
    """Return the reward of one episode, and the prompts that the model got."""
    model = ScriptedModel(*answers)
    with mock.patch("my_agent.agent.AsyncOpenAI", return_value=model):
        return await Agent().run(row), model.prompts


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
