"""An agent that may call a tool before it answers."""

from openai import AsyncOpenAI
from my_agent.task import TOOLS, call_tool, reward


class Agent:
    async def run(self, data, **extra_kwargs):
        client = AsyncOpenAI(**extra_kwargs)  # connected to this episode
        messages = [{"role": "user", "content": data["question"]}]
        for _ in range(4):  # model calls per episode
            completion = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS)
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return reward(message.content, data["answer"])
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": call_tool(call.function)})
        return 0.0
