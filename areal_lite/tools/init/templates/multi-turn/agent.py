"""An agent that may try again after a wrong answer."""

from openai import AsyncOpenAI

from my_agent.task import is_right


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)  # connected to this episode
        messages = [{"role": "user", "content": data["question"]}]
        for turn in range(3):
            completion = await client.chat.completions.create(model="default", messages=messages)
            answer = completion.choices[0].message
            if is_right(answer.content, data["answer"]):
                return 0.8**turn  # an early answer is worth more
            messages += [answer, {"role": "user", "content": "That is wrong. Try again, with a number only."}]
        return 0.0
