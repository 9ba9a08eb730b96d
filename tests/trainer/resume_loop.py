"""A short training run to be killed and resumed: as a function, and as a server that forks a process for each run.

The server imports torch once, then says "ready". Each line on its stdin, ``{"run_dir", "model", "environment",
"kill_after_s"}``, is a run in a process of its own; the line it answers with is that process's exit code, below 0
for a signal.
"""

from __future__ import annotations
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from areal_lite.api.trajectory import TokenSequence
from areal_lite.config.trainer_config import TrainerConfig
from areal_lite.data.source.rollout_data_source import RolloutDataSource, state_bytes, state_path
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.models.policy_model import load_policy
from areal_lite.servers.weights.weight_folder import publish_weights, save_model
from areal_lite.trainer.checkpoint.checkpoint import CheckpointWriter, checkpoint_step, find_checkpoint
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.microbatches import Block
from areal_lite.trainer.forward.packed_model import PackedSequences, pack
from areal_lite.trainer.learner import Learner
from areal_lite.trainer.metrics import MetricsWriter
from areal_lite.trainer.seeding import seed_process

CPU = torch.device("cpu")
STEPS = 6
ROWS = 4
BATCH = 2
IN_FLIGHT = 3
"""Groups drawn and not trained yet; more than a batch, so that some are always owed."""


class LoopTrainer:
    """Raises the log-probs of given tokens, by as much as each generator draws."""

    def __init__(self, model: Path, *, deterministic: bool = False, **config: Any) -> None:
        settings = {
            "learning_rate": 1e-2,
            "lr_schedule": "cosine",
            "dtype": "float32",
            "device": "cpu",
        } | config
        self.config = TrainerConfig(total_steps=STEPS, **settings)  # type: ignore[arg-type]
        seed_process(1, num_threads=1, deterministic=deterministic)
        policy = TokenScorer(load_policy(str(model), device=CPU, lora=self.config.lora), temperature=1.0)
        self.learners = {"policy": Learner(policy, self.config, self.config, total_steps=STEPS)}
        self.draws = 0

    @property
    def model(self) -> Any:
        return self.learners["policy"].module.model

    def counters(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_counters(self, counters: dict[str, Any]) -> None:
        self.draws = counters["draws"]

    def train_step(self, sequences: list[list[int]]) -> dict[str, float]:
        learner = self.learners["policy"]
        drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
        samples = [_sample(ids) for ids in sequences]
        rate = learner.learning_rate

        def cut(max_tokens: int) -> Iterator[PackedSequences]:
            for number, sample in enumerate(samples):
                yield pack(samples, [Block((number,), (0,), length=len(sample.input_ids) - 1)], device=CPU)

        def loss_of(packed: PackedSequences) -> Tensor:
            logprobs: Tensor = learner.module(packed).logprobs
            return -drawn * logprobs.mean()

        update = learner.update(cut, loss_of)
        learner.steps_done += 1
        self.draws += 1
        return {
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "rate": rate,
            "drawn": drawn,
            "draws": self.draws,
        }


def _sample(ids: list[int]) -> TokenSequence:
    mask = np.arange(len(ids)) >= 2
    return TokenSequence(input_ids=np.array(ids), loss_mask=mask, reward=0.0, group_id="")


def train(run_dir: Path, model: Path) -> None:
    """Train ``STEPS`` steps, resuming from the newest checkpoint."""
    trainer = LoopTrainer(model, deterministic=True)
    rows = [{"prompt": "", "ids": [5 + row, 9, *range(20, 24 + row)]} for row in range(ROWS)]
    source = RolloutDataSource(rows, SourceSettings(seed=3, shuffle=True))
    done = 0
    if (checkpoint := find_checkpoint(run_dir / "checkpoints", "auto")) is not None:
        done = checkpoint_step(checkpoint)
        restore(trainer, checkpoint)
        source.load(done, checkpoint)
    waiting: deque[Any] = deque()
    metrics = MetricsWriter(run_dir, last_step=done)
    with CheckpointWriter(run_dir / "checkpoints", keep=2) as writer:
        for step in range(done + 1, STEPS + 1):
            waiting.extend(source.get_samples(IN_FLIGHT - len(waiting)))
            groups = [waiting.popleft() for _ in range(BATCH)]
            learned = trainer.train_step([group[0].row["ids"] for group in groups])
            source.mark_trained(groups)
            publish_weights(trainer.model, run_dir / "weights", step, dtype=torch.float32)
            trained = {f"row_{place}": float(group[0].position) for place, group in enumerate(groups)}
            metrics.write(step, learned | trained)
            state = {str(state_path("", step)): state_bytes(source.state_dict())}
            writer.save(step, snapshot(trainer), state)
    save_model(trainer.model, PreTrainedTokenizerFast.from_pretrained(model), run_dir / "model", dtype=torch.float32)


def serve() -> None:
    disable_progress_bar()  # type: ignore[no-untyped-call]
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.environ.update(order["environment"])
            try:
                train(Path(order["run_dir"]), Path(order["model"]))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        killer = None
        if order["kill_after_s"] is not None:
            killer = threading.Timer(order["kill_after_s"], os.kill, (child, signal.SIGKILL))
            killer.start()
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # unreaped, its number is nobody else's
        if killer is not None:
            killer.cancel()
            killer.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
