"""A loop that chooses its rows itself: submit rows, wait for their groups, train, publish; no data source.

OMP_WAIT_POLICY=PASSIVE python examples/09_submit_and_wait.py [MODEL_FOLDER] [STEPS]
"""

from __future__ import annotations
import sys
import tempfile
from openai import AsyncOpenAI
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.servers.weights.weight_folder import publish_weights
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer


class LowercaseAgent:
    """Reward: the share of lower-case letters in the answer."""

    async def run(self, data: dict[str, str], **extra_kwargs: object) -> float:
        completion = await AsyncOpenAI(**extra_kwargs).chat.completions.create(
            model="default", messages=[{"role": "user", "content": data["question"]}]
        )
        text = completion.choices[0].message.content or "?"
        return sum(letter.islower() for letter in text) / len(text)


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct", steps: str = "2") -> None:
    questions = ["What is rain?", "And snow?"]
    learning = TrainerConfig(total_steps=int(steps), learning_rate=3e-5)
    with EmbeddedServer(model_path=model_path) as server, tempfile.TemporaryDirectory() as weights:
        config = InferenceEngineConfig(
            addresses=[server.address],
            tokenizer_path=model_path,
            gconfig=GenerationHyperparameters(max_new_tokens=16),
            consumer_batch_size=2,  # groups per step: with bound 0, as many start before the next weights
        )
        trainer = PolicyTrainer(learning, model_path=model_path, seed=1)
        with RemoteInfEngine(config) as engine:
            for step in range(1, int(steps) + 1):
                for question in questions:
                    engine.submit({"question": question}, LowercaseAgent, group_size=4)
                groups = engine.wait(count=2, timeout=300)  # in the order in which they ended
                metrics = trainer.train_step(
                    [group for group in groups if group.status == "accepted"], version=step - 1
                )
                engine.update_weights_from_disk(str(publish_weights(trainer.model, weights, step)), step)
                best = max(groups, key=lambda group: max(group.rewards, default=0.0))
                questions[0] = f"Say it again: {best.data['question']}"  # the next rows depend on what came back
                print(f"step {step}: reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:+.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
