"""A hand-written training loop: roll out, train, publish the weights, load them into the servers.

OMP_WAIT_POLICY=PASSIVE python examples/06_own_training_loop.py [MODEL_FOLDER] [STEPS]
"""

from __future__ import annotations
import sys
import tempfile
from openai import AsyncOpenAI
from areal_lite.api import GenerationHyperparameters, InferenceEngineConfig
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data import RolloutDataSource, SourceSettings
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.programs.embedded_server import EmbeddedServer
from areal_lite.servers.weights.weight_folder import publish_weights
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer


class LowercaseAgent:
    """Reward: the share of lower-case letters in the answer."""

    async def run(self, data: dict[str, str], **extra_kwargs: object) -> float:
        completion = await AsyncOpenAI(**extra_kwargs).chat.completions.create(
            model="default", messages=[{"role": "user", "content": f"Tell me about {data['subject']}."}]
        )
        text = completion.choices[0].message.content or "?"
        return sum(letter.islower() for letter in text) / len(text)


def main(model_path: str = "runs/models/SmolLM2-135M-Instruct", steps: str = "3") -> None:
    rows = [{"subject": subject} for subject in ("cats", "rain", "the sea", "bread", "snow", "owls")]
    source = RolloutDataSource(rows, SourceSettings(n_samples_per_prompt=4, shuffle=True))
    learning = TrainerConfig(total_steps=int(steps), learning_rate=3e-5)
    with EmbeddedServer(model_path=model_path) as server, tempfile.TemporaryDirectory() as weights:
        config = InferenceEngineConfig(
            addresses=[server.address],
            tokenizer_path=model_path,
            gconfig=GenerationHyperparameters(max_new_tokens=16),
            group_size=4,
            consumer_batch_size=4,  # 4 rows x 4 episodes per step, on-policy
        )
        trainer = PolicyTrainer(learning, model_path=model_path, seed=1)
        with RemoteInfEngine(config) as engine:
            for step in range(1, int(steps) + 1):
                groups = engine.prepare_batch(source, LowercaseAgent)
                metrics = trainer.train_step(groups, version=step - 1)
                engine.update_weights_from_disk(str(publish_weights(trainer.model, weights, step)), step)
                print(f"step {step}: reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:+.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
