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
        message = {"content": self.answers.pop(0)}
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
    async def test_each_retry_costs_reward(self):
        (row,) = rows(size=1, seed=0)
        right = row["answer"]
        for answers, expected in [([right], 1.0), (["0", right], 0.8), (["0", "1000", "no idea"], 0.0)]:
            reward, prompts = await play(row, *answers)
            self.assertAlmostEqual(reward, expected)
            self.assertEqual([len(prompt) for prompt in prompts], [1, 3, 5][: len(answers)])
