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
    async def test_the_closest_guess_is_the_reward(self):
        for answers, expected in [(["25"], 1.0), (["15", "none", "50", "20"], 0.9), (["none"] * 4, 0.0)]:
            reward, prompts = await play({"number": 25}, *answers)
            self.assertAlmostEqual(reward, expected)
            self.assertEqual(len(prompts), len(answers))

    async def test_the_model_reads_where_to_look(self):
        _, prompts = await play({"number": 25}, "15", "30", "25")
        self.assertEqual(
            [prompt[-1]["content"] for prompt in prompts[1:]], ["My number is higher.", "My number is lower."]
        )

    def test_rows_are_games(self):
        self.assertTrue(all(1 <= row["number"] <= 50 for row in rows(size=20, seed=0)))
