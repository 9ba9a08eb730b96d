"""Episodes of the agent with a scripted model in place of a server."""

from unittest import mock
from openai.types.chat import ChatCompletion
from my_agent.agent import Agent


class ScriptedModel:
    """Takes the place of ``AsyncOpenAI`` and gives these answers in turn: texts, or calls of tools."""

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
