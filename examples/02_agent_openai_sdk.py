"""An agent is any class with `async def run()`: two calls with the plain OpenAI SDK, one trajectory.

    python examples/02_agent_openai_sdk.py [MODEL_FOLDER]

Tokens are recorded exactly as sampled. The second call extends the first, so both form one sequence.
"""

from __future__ import annotations
import sys
from typing import Any
from openai import AsyncOpenAI
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer


class ThinkAgainAgent:
    """Ask, then ask for a shorter answer; reward 1 if it is shorter."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = AsyncOpenAI(**extra_kwargs)  # base_url, api_key and http_client of this episode
        messages: list[Any] = [{"role": "user", "content": data["question"]}]
        answers = []
        for _ in range(2):
            completion = await client.chat.completions.create(model="default", messages=messages)
            answer = completion.choices[0].message
            answers.append(answer.content or "")
            messages += [answer, {"role": "user", "content": "Say it in fewer words."}]
        return float(len(answers[1]) < len(answers[0]))


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct") -> None:
    rows = [{"question": "Why is the sky blue?"}, {"question": "What is a prime number?"}]
    with EmbeddedServer(model_path=model_path) as server:
        config = InferenceEngineConfig(
            addresses=[server.address],
            tokenizer_path=model_path,  # turns an agent's messages into tokens
            gconfig=GenerationHyperparameters(max_new_tokens=24),
        )
        with RemoteInfEngine(config) as engine:
            for group in engine.rollout_batch(rows, ThinkAgainAgent, group_size=4):
                assert group.failure is None, group.error
                trained = [sequence.num_trained_tokens for sequence in group.sequences]
                print(f"{group.data['question']}  rewards {group.rewards}  trained tokens {trained}")


if __name__ == "__main__":
    main(*sys.argv[1:])
