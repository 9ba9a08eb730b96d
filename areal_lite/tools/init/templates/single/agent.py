"""An agent that answers one question."""

from openai import AsyncOpenAI
from my_agent.task import reward


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)  # connected to this episode
        messages = [
            {"role": "system", "content": "Answer with a number."},
            {"role": "user", "content": data["question"]},
        ]
        completion = await client.chat.completions.create(model="default", messages=messages)
        return reward(completion.choices[0].message.content, data["answer"])
