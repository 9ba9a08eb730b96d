"""Several ranks load, train and save a model; each writes how much memory that took."""

from __future__ import annotations
import json
import sys
from pathlib import Path
import torch
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.models.parallel.ranks import join_ranks
from areal_lite.models.parallel.sharding import shard
from areal_lite.models.policy_model import load_policy
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter
from areal_lite.trainer.checkpoint.snapshot import snapshot
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer
from tests.models.parallel.rank_programs.training_cases import start_ranks
from tests.trainer.training_data import drawn_batch, training_batch


def resident(peak: bool = False) -> int:
    """Return the resident bytes of this process, or their peak since the last call without ``peak``."""
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def run_rank(model: Path, out: Path) -> None:
    cpu = torch.device("cpu")
    with join_ranks(cpu) as ranks:
        load_policy(str(model), device=cpu)  # imports what loading needs
        before = resident()
        scorer = TokenScorer(load_policy(str(model), device=cpu), temperature=1.0)
        scorer.examine = lambda: None  # type: ignore[method-assign]  # which gathers layers, as each step does
        shard(scorer)
        loaded = resident(peak=True) - before
        config = TrainerConfig(total_steps=2, learning_rate=1e-3, dtype="float32", device="cpu")
        trainer = PolicyTrainer(config, model_path=str(model), seed=1)
        trainer.train_step(training_batch(drawn_batch(0)), version=0)
        before = resident()
        with CheckpointWriter(out / "checkpoints", keep=1) as writer:
            taken = snapshot(trainer)
            writer.save(1, taken, {})
        own = taken.learners["policy"]
        copied = sum(tensor.nbytes for tensor in (*own.weights.values(), *own.optimizer.values()))
        found = {"loaded": loaded, "copied": copied, "saved": resident(peak=True) - before}
        (out / f"memory_{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    start_ranks(int(sys.argv[1]), run_rank, *map(Path, sys.argv[2:]))
