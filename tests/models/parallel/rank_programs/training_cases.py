"""What every number of ranks must compute alike; run as a program, it writes what came out."""

from __future__ import annotations
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from areal_lite.api.trajectory import Group
from areal_lite.config.trainer_config import CriticConfig, KLConfig, LoRAConfig, TrainerConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.data_proto_file import save_data_proto
from areal_lite.models.parallel.ranks import broadcast_batch, broadcast_json, gather_json, join_ranks
from areal_lite.processes.ports import free_ports
from areal_lite.servers.weights.broadcaster import WeightBroadcaster
from areal_lite.servers.weights.weight_folder import write_model
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.rl.policy_step import Batch
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from areal_lite.trainer.rl.token_facts import TokenFacts
from areal_lite.trainer.supervised.supervised_trainer import SupervisedTrainer
from tests.trainer.episode_data import Call, Episode, group_of, line
from tests.trainer.supervised_data import dpo_trainer, pairs, reward_trainer, sequences, sft_trainer
from tests.trainer.training_data import drawn_batch, training_batch

KL = KLConfig(coef=0.1)
CASES: dict[str, dict[str, Any]] = {
    "one_microbatch": {"kl": KL, "entropy_coef": 0.01},
    "many_microbatches": {
        "kl": KL,
        "max_tokens_per_microbatch": 25,
        "minibatches_per_step": 2,
        "gradient_checkpointing": True,
    },
    "one_sample": {"entropy_coef": 0.1},
    "clipped": {"max_tokens_per_microbatch": 1, "max_grad_norm": 1e-3, "weight_decay": 0.1},
    "critic": {
        "advantage": "gae",
        "critic": CriticConfig(learning_rate=1e-2, adam_eps=1e-3),
        "kl": KLConfig(coef=0.1, place="reward"),
        "minibatches_per_step": 2,
    },
    "forked": {"loss": "gspo", "entropy_coef": 0.01, "max_tokens_per_microbatch": 25},
    "forked_critic": {
        "advantage": "gae",
        "critic": CriticConfig(learning_rate=1e-2, adam_eps=1e-3),
        "max_tokens_per_microbatch": 12,
    },
    "adapters": {"lora": LoRAConfig(rank=8), "kl": KL, "gradient_checkpointing": True, "adam_eps": 1e-2},
    "bfloat16": {"dtype": "bfloat16", "kl": KL},
}
"""Changes to the config."""

# AdamW would turn rounding into whole steps where gradients are near 0, were its epsilon not far above it. An adapter's
# B begins at 0, and all of A's gradient comes from B's first step.
OPTIONS = {"learning_rate": 1e-2, "adam_eps": 1e-3, "max_grad_norm": 1e9}
SUPERVISED: dict[str, Any] = {
    "sft": (partial(sft_trainer, **OPTIONS), sequences),
    "dpo": (partial(dpo_trainer, **OPTIONS), pairs),
    "dpo_of_adapters": (partial(dpo_trainer, lora=LoRAConfig(rank=4), **OPTIONS), pairs),
    "reward_model": (partial(reward_trainer, **OPTIONS), pairs),
}
"""Trainer and items."""

SIZES = {2: [*CASES, *SUPERVISED], 4: ["one_microbatch", "one_sample", "critic"]}
"""Ranks, and the cases they run."""

PUBLISHED = ("one_microbatch", "adapters")
"""Cases whose weights are written."""

SHARD_BYTES = 40_000

RESUMED = ("critic", "adapters")
"""Cases that are saved and resumed, on 2 ranks."""


def make_trainer(name: str, model_path: Path) -> PolicyTrainer:
    given: dict[str, Any] = {
        "total_steps": 100,
        **OPTIONS,
        "dtype": "float32",
        "device": "cpu",
    }
    return PolicyTrainer(TrainerConfig(**given | CASES[name]), model_path=str(model_path), seed=1)


def run_case(name: str, model_path: Path) -> tuple[PolicyTrainer | SupervisedTrainer, dict[str, Tensor]]:
    """Train two steps; return what the last one computed, and the gradients and weights after it."""
    trainer: PolicyTrainer | SupervisedTrainer
    if name in SUPERVISED:
        make, items = SUPERVISED[name]
        trainer = make(model_path)
        trainer.train_step(items(0, 5))
        metrics, scored = trainer.train_step(items(1, 1)), {}
    else:
        trainer = make_trainer(name, model_path)
        shape = {"groups": 1, "group_size": 1} if name == "one_sample" else {}
        for number in range(2):
            forked = name.startswith("forked")
            batch = forked_groups(number) if forked else training_batch(drawn_batch(number, **shape))
            metrics, scored = policy_step(trainer, batch)
    found = scored | weights(trainer)
    for key, value in metrics.items():
        if not any(word in key for word in ("second", "ms_per_token", "mfu")):
            found[f"metric/{key}"] = torch.tensor(value)
    for role, learner in trainer.learners.items():
        for key, parameter in learner.module.named_parameters():
            if parameter.requires_grad:
                found[f"gradient/{role}/{key}"] = whole(parameter.grad)
    return trainer, found


def forked_groups(seed: int) -> list[Group]:
    """Return two groups; an episode of the first forks after its first call and after its second."""
    fork = [*line(3), Call(1, [30], [31, 32, 33]), Call(0, [34], [35]), Call(4, [36], [37, 38])]
    return [
        group_of(f"g{seed}", [5 + seed, 6], [Episode(fork, 1.0), Episode(line(1), 0.0)]),
        group_of(f"h{seed}", [7 + seed], [Episode(line(2, joins=True), 0.25), Episode(line(4), -0.5)]),
    ]


def policy_step(trainer: PolicyTrainer, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the metrics of a step, what its scoring passes found, and its facts."""
    step = trainer.begin(batch, version=5)
    trainer.score_proximal(step)
    trainer.score_reference(step)
    trainer.score_values(step)
    trainer.penalize_kl(step)
    trainer.correct(step)
    trainer.estimate_advantages(step)
    scored = {f"scored/{key}": getattr(step.tokens, key).clone() for key in ("reference", "values", "advantages")}
    trainer.update_critic(step)
    trainer.update_policy(step)
    found: list[TokenFacts] = []
    trainer._on_facts = found.append
    metrics = trainer.finish(step)
    scored |= {f"fact/{name}": torch.from_numpy(values) for name, values in found[0].columns.items()}
    return metrics, scored


def weights(trainer: PolicyTrainer | SupervisedTrainer) -> dict[str, Tensor]:
    return {
        f"weight/{role}/{key}": whole(parameter)
        for role, learner in trainer.learners.items()
        for key, parameter in learner.module.named_parameters()
    }


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run_rank(out: Path, model_path: Path) -> None:
    """Run all cases as one rank; the first writes what came out."""
    with join_ranks(torch.device("cpu")) as ranks:
        for name in SIZES[ranks.size]:
            trainer, found = run_case(name, model_path)
            if ranks.rank == 0:
                save_file(found, out / f"{name}.safetensors")
            if name == "one_microbatch":
                (out / f"held_{ranks.rank}.json").write_text(json.dumps(held(trainer)))
            if name in PUBLISHED:
                folder = out / f"{name}_weights"
                folder.mkdir(exist_ok=True)
                write_model(trainer.model, folder, torch.float32, max_shard_bytes=SHARD_BYTES)
                buckets = WeightBroadcaster(trainer.model, dtype=torch.float32).publish(1).buckets
                assert len(buckets) == (ranks.rank == 0)
                for bucket in buckets:
                    save_file(dict(bucket.tensors), out / f"{name}_broadcast.safetensors")
            if name in RESUMED and ranks.size == 2:
                with CheckpointWriter(out / f"{name}_checkpoints", keep=1) as writer:
                    writer.save(2, snapshot(trainer), {})
                folder = out / f"{name}_checkpoints/step_00000002"
                resumed = make_trainer(name, model_path)
                restore(resumed, folder)
                save_file(weights(resumed), out / f"{name}_resumed_{ranks.rank}.safetensors")
        batch = broadcast_batch(generated_rows() if ranks.rank == 0 else None)
        save_data_proto(batch, out / f"broadcast_{ranks.rank}")
        received = [broadcast_json({"stop": ranks.rank == 0}), gather_json([ranks.rank, "é"])]
        (out / f"decision_{ranks.rank}.json").write_text(json.dumps(received))


def held(trainer: PolicyTrainer) -> list[int]:
    """Return how many numbers of weights and of optimizer state this rank holds, how many weights there are, and in
    how many parts they are gathered."""
    parameters = list(trainer.model.parameters())
    state = [value for values in trainer.learner.optimizer.state.values() for value in values.values()]
    counts = [
        sum(tensor.to_local().numel() for tensor in tensors if isinstance(tensor, DTensor))
        for tensors in (parameters, state)
    ]
    gathered = sum(isinstance(part, FSDPModule) for part in trainer.learner.module.modules())
    return [*counts, sum(parameter.numel() for parameter in parameters), gathered]


def generated_rows() -> DataProto:
    """Return what rank 0 generated."""
    return training_batch(drawn_batch(3, groups=3, group_size=2))


def start_ranks(size: int, target: Callable[..., None], *arguments: Any) -> None:
    """Call ``target`` as each of ``size`` ranks, forked from this process so that torch and peft are imported once."""
    import peft  # noqa: F401

    fork = multiprocessing.get_context("fork")
    (port,) = free_ports("127.0.0.1", 1)
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(size):
        os.environ["RANK"] = str(rank)
        processes.append(fork.Process(target=target, args=arguments))
        processes[-1].start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)


def main(out: Path, model_path: Path) -> None:
    """Run the cases on each number of ranks."""
    for size in SIZES:
        (out / str(size)).mkdir()
        start_ranks(size, run_rank, out / str(size), model_path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
