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
    async def test_only_the_right_answer_is_rewarded(self):
        (row,) = rows(size=1, seed=0)
        for answer, expected in [(row["answer"], 1.0), ("0", 0.0), ("no idea", 0.0)]:
            reward, prompts = await play(row, answer)
            self.assertEqual(reward, expected)
            self.assertIn(row["question"], prompts[0][-1]["content"])
