"""An agent that plays in an environment until it is done."""

from openai import AsyncOpenAI

from my_agent.task import Environment


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)  # connected to this episode
        environment = Environment(**data)
        observation, messages = environment.reset(), []
        while not environment.done:
            messages.append({"role": "user", "content": observation})
            completion = await client.chat.completions.create(model="default", messages=messages)
            messages.append(completion.choices[0].message)
            observation = environment.step(messages[-1].content or "")
        return environment.reward
