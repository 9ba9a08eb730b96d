"""Use the engine inside a running event loop: every blocking method has an async form.

python examples/08_async_engine.py [MODEL_FOLDER]
"""

from __future__ import annotations
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from openai import AsyncOpenAI
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer


class ShortAgent:
    """Reward: 1 for an answer below 40 characters."""

    async def run(self, data: dict[str, str], **extra_kwargs: object) -> float:
        completion = await AsyncOpenAI(**extra_kwargs).chat.completions.create(
            model="default", messages=[{"role": "user", "content": data["question"]}]
        )
        return float(len(completion.choices[0].message.content or "") < 40)


@asynccontextmanager
async def running(engine: RemoteInfEngine) -> AsyncIterator[RemoteInfEngine]:
    await asyncio.to_thread(engine.initialize)  # starting and stopping block, so they run in a thread
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.destroy)


async def ask(address: str, model_path: str) -> None:
    config = InferenceEngineConfig(
        addresses=[address], tokenizer_path=model_path, gconfig=GenerationHyperparameters(max_new_tokens=16)
    )
    questions = [[{"question": "Who are you?"}], [{"question": "What is rain?"}, {"question": "And snow?"}]]
    async with running(RemoteInfEngine(config)) as engine:
        async with asyncio.TaskGroup() as tasks:  # two batches at once; the loop stays free for other work
            batches = [tasks.create_task(engine.arollout_batch(rows, ShortAgent)) for rows in questions]
        for group in (group for batch in batches for group in batch.result()):
            print(f"{group.data['question']}: {group.status}, rewards {group.rewards}")
        await engine.asubmit({"question": "Why?"}, ShortAgent)
        (group,) = await engine.await_results(1, timeout=60)
        print(f"{group.data['question']}: {group.status}, rewards {group.rewards}")


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct") -> None:
    with EmbeddedServer(model_path=model_path) as server:
        asyncio.run(ask(server.address, model_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
