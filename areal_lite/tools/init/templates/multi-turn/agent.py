"""An agent that may try again after a wrong answer."""

from openai import AsyncOpenAI
from my_agent.task import reward


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)  # connected to this episode
        messages = [{"role": "user", "content": f"{data['question']} Reply with a number only."}]
        for turn in range(3):
            completion = await client.chat.completions.create(model="default", messages=messages)
            answer = completion.choices[0].message
            if reward(answer.content, data["answer"]):
                return 0.8**turn  # an early answer is worth more
            messages += [answer, {"role": "user", "content": "That is wrong. Try again, with a number only."}]
        return 0.0
