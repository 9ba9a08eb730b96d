"""What every mesh of ranks must compute like one process; run as a program, it writes what came out."""

from __future__ import annotations
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from areal_lite.config.trainer_config import KLConfig, TrainerConfig
from areal_lite.errors import StorageError
from areal_lite.models.parallel.ranks import gather_json, join_ranks
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.models.parallel.rank_programs.training_cases import make_trainer, run_case, start_ranks, whole
from tests.trainer.training_data import VOCABULARY, drawn_batch, training_batch


class Mesh(NamedTuple):
    size: int
    sp: int
    tp: int
    cases: tuple[str, ...]
    steps: int = 20


LLAMA, QWEN2, QWEN3, ONE_KEY, GEMMA3 = "llama", "qwen2", "qwen3", "qwen3 with one head of keys", "gemma3_text"
FAMILIES: dict[str, dict[str, Any]] = {
    LLAMA: {"num_key_value_heads": 2},
    QWEN2: {"num_key_value_heads": 2, "tie_word_embeddings": True},
    QWEN3: {"num_key_value_heads": 2, "head_dim": 8},
    ONE_KEY: {"num_key_value_heads": 1, "tie_word_embeddings": True, "head_dim": 8},  # fewer than sp ranks
    GEMMA3: {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True},
}
RESUMED = "critic"

MESHES = {
    "sp2": Mesh(2, 2, 1, (LLAMA, ONE_KEY, "one_sample", "critic", "adapters", "forked", "sft", "dpo"), steps=6),
    "tp2": Mesh(2, 1, 2, (QWEN3, "adapters", "forked"), steps=6),
    "tp2, others": Mesh(2, 1, 2, (LLAMA, QWEN2, GEMMA3, "one_sample", "critic", "sft", "dpo")),
    "dp2 sp2": Mesh(4, 2, 1, (LLAMA, ONE_KEY, GEMMA3, "many_microbatches", "forked_critic", "dpo", "reward_model")),
    "dp2 tp2": Mesh(4, 1, 2, (LLAMA, QWEN2, QWEN3, "many_microbatches", "critic", "adapters", "sft", "reward_model")),
    "sp2 tp2": Mesh(4, 2, 2, (LLAMA, QWEN3, GEMMA3, "one_sample", "forked_critic", "bfloat16")),
    "sp4": Mesh(4, 4, 1, (LLAMA, ONE_KEY, GEMMA3, "one_sample", "one_microbatch", "bfloat16")),
}
"""Meshes, and the cases that they run: a family of models, with its number of updates, or one of ``training_cases``."""


def build(family: str, folder: Path) -> Path:
    """Write a random model of a family and return its folder."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(family.split()[0], **small | options | FAMILIES[family])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def run_family(model_path: Path, steps: int) -> dict[str, Tensor]:
    """Return each gradient of the first update, clipped, and each weight and metric after ``steps`` updates of
    AdamW."""
    config = TrainerConfig(
        total_steps=steps, learning_rate=1e-2, adam_eps=1e-3, max_grad_norm=0.5, dtype="float32", device="cpu",
        kl=KLConfig(coef=0.1), entropy_coef=0.01, loss_aggregation="seq-mean-token-mean",
    )  # fmt: skip
    trainer, found = PolicyTrainer(config, model_path=str(model_path), seed=1), {}
    for step in range(steps):
        metrics = trainer.train_step(training_batch(drawn_batch(step, groups=2)), version=3)
        if step == 0:
            parameters = trainer.model.named_parameters()
            found |= {f"gradient/{name}": whole(parameter.grad) for name, parameter in parameters}
    found |= {f"weight/{name}": whole(parameter) for name, parameter in trainer.model.named_parameters()}
    return found | {f"metric/{name}": torch.tensor(metrics[name]) for name in ("loss", "grad_norm", "kl", "entropy")}


def results(case: str, steps: int, models: Path) -> dict[str, Tensor]:
    """Return what a case computes; ``models`` holds those of the families and, as ``tiny``, that of other cases."""
    return run_family(models / case, steps) if case in FAMILIES else run_case(case, models / "tiny")[1]


def resume_and_save(rank: int, models: Path, out: Path) -> None:
    """Resume from the checkpoint of one process and save it again; then let the write of one rank fail."""
    trainer = make_trainer(RESUMED, models / "tiny")
    restore(trainer, models / "alone" / "step_00000002")
    with CheckpointWriter(out / "checkpoints", keep=2) as writer:
        writer.save(2, snapshot(trainer), {"note": b"of the first rank"} if rank == 0 else {})
    writer = CheckpointWriter(out / "checkpoints", keep=2)
    gather_json("all have removed leftovers")
    if rank == 1:
        (out / "checkpoints/.areal-lite-part-00001").write_text("in the way")
    writer.save(3, snapshot(trainer), {})
    try:
        writer.wait()
    except StorageError as error:
        (out / f"failed_{rank}.txt").write_text(str(error))


def held(model_path: Path) -> tuple[int, int]:
    """Return how many numbers of weights and optimizer a rank keeps, and how many there are."""
    config = TrainerConfig(total_steps=1, learning_rate=1e-2, dtype="float32", device="cpu")
    trainer = PolicyTrainer(config, model_path=str(model_path), seed=1)
    trainer.train_step(training_batch(drawn_batch(0)), version=3)
    states = [value for state in trainer.learner.optimizer.state.values() for value in state.values() if value.ndim]
    tensors = [*trainer.model.parameters(), *states]
    local = sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in tensors)
    return local, sum(one.numel() for one in tensors)


def run_rank(mesh: Mesh, out: Path, models: Path) -> None:
    """Run the cases of a mesh as one rank; the first writes what came out."""
    with join_ranks(torch.device("cpu"), sp_size=mesh.sp, tp_size=mesh.tp) as ranks:
        for case in mesh.cases:
            found = results(case, mesh.steps, models)
            if ranks.rank == 0:
                save_file(found, out / f"{case}.safetensors")
        (out / f"held_{ranks.rank}.json").write_text(json.dumps(held(models / LLAMA)))
        resume_and_save(ranks.rank, models, out)


if __name__ == "__main__":
    chosen = MESHES[sys.argv[1]]
    start_ranks(chosen.size, run_rank, chosen, *map(Path, sys.argv[2:]))
