"""The training loop: what a step is made of, in order, and what surrounds it.

Guarantees that a checkpoint is of a moment between two steps, data and weights alike, also when the run is
stopped in the middle of one. Under several ranks one leads: it owns engine, data source and files, and the
others get its batches, and stop where it does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from areal_lite.api.config import RunConfig
from areal_lite.api.config_loader import dump_config
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.source.data_source_state import state_bytes, state_path
from areal_lite.launch.evaluation import Evaluation
from areal_lite.launch.generating_side import GeneratingSide
from areal_lite.launch.profiling import StepProfiler
from areal_lite.launch.stopping import Stopped, finishing, interruptible, stop_together
from areal_lite.trainer.broadcast import broadcast_batch, broadcast_json
from areal_lite.trainer.checkpoint import CONFIG_FILE
from areal_lite.trainer.checkpoint_writer import CheckpointWriter
from areal_lite.trainer.expiry import expires_soon
from areal_lite.trainer.policy_trainer import PolicyTrainer
from areal_lite.trainer.snapshot import snapshot
from areal_lite.trainer.weights import publish_weights

Record = Callable[[int, dict[str, float]], None]
"""Takes a step and its metrics."""

T = TypeVar("T")


@dataclass(kw_only=True)
class Fit:
    """A training run; :meth:`fit` is the algorithm, the other methods are its stages."""

    config: RunConfig
    run_dir: Path
    trainer: PolicyTrainer
    lead: GeneratingSide | None
    """None on the ranks that only train."""
    record: Record
    checkpoints: CheckpointWriter
    profiler: StepProfiler
    step: int = 0
    """Steps done, which is the policy version as well."""
    evaluations: list[Evaluation] = field(default_factory=list)
    saved_step: int = 0
    saved_at: float | None = None
    longest_step_s: float = 0.0

    def fit(self) -> None:
        """Train up to ``trainer.total_steps``; to be called in :func:`finishing`.

        Raises:
            Stopped: On SIGINT or SIGTERM, between the same two steps on every rank.
        """
        trainer = self.trainer
        if self.step == 0 and self.config.evaluation.at_start:
            self.validate()
        while self.step < self.config.trainer.total_steps:
            with self.profiler(self.step + 1):
                began = time.monotonic()
                batch = self.generate()
                generated = time.monotonic()
                step = trainer.begin(batch, version=self.step)
                trainer.score_proximal(step)
                trainer.score_reference(step)
                trainer.score_values(step)
                trainer.penalize_kl(step)
                trainer.correct(step)
                trainer.estimate_advantages(step)
                trainer.update_critic(step)
                trainer.update_policy(step)
                self.step += 1
                self.settle(batch)
                trained = time.monotonic()
                self.publish()
                self.log(trainer.finish(step), began, generated, trained)
                if self.is_due(self.config.checkpoint.every_steps) or self.machine_goes():
                    self.save()
            if self.is_due(self.config.evaluation.every_steps or self.config.trainer.total_steps):
                self.validate()

    def go_on_from(self, step: int) -> None:
        """Begin after ``step`` steps, with the trainer's weights on the servers."""
        self.step = self.saved_step = step
        self.publish()

    @property
    def served_dtype(self) -> torch.dtype:
        """What the weights are written in for servers."""
        dtype: torch.dtype = getattr(torch, self.config.server.dtype)
        return dtype

    def generate(self) -> DataProto:
        """Return the next batch, the same on every rank; rewards are there, and advantages are not."""
        return broadcast_batch(self.led(lambda lead: lead.batch(self.step + 1)))

    def settle(self, batch: DataProto) -> None:
        """Let the data know that the step's batch was trained."""
        if self.lead is not None:
            self.lead.trained(self.step, batch)

    def publish(self) -> None:
        """Write the weights as policy version ``step`` and have the servers load them."""
        folder = publish_weights(
            self.trainer.model, self.run_dir / "weights", self.step, dtype=self.served_dtype
        )
        if self.lead is not None:
            self.lead.engine.update_weights_from_disk(str(folder.resolve()), self.step)

    def log(self, learned: dict[str, float], began: float, generated: float, trained: float) -> None:
        """Record the metrics of the step; moments are of the monotonic clock."""
        if self.lead is not None:
            now = time.monotonic()
            self.longest_step_s = max(self.longest_step_s, now - began)
            metrics = {
                **{f"train/{name}": value for name, value in learned.items()},
                "timing/rollout_wait_s": generated - began,
                "timing/weight_update_s": now - trained,
                "timing/step_s": now - began,
                **self.lead.metrics(),
            }
            self.record(self.step, metrics)

    def validate(self) -> None:
        """Run the held-out rows and record their rewards."""
        if (found := self.led(GeneratingSide.evaluate)) is not None:
            self.evaluations.append(found)
            self.record(self.step, found.metrics())

    def led(self, work: Callable[[GeneratingSide], T]) -> T | None:
        """Return what ``work`` gives on the leading rank; the others wait for it, and get None.

        Raises:
            Stopped: On every rank, if one was asked to stop; ``work`` is broken off.
        """
        found = None
        with suppress(Stopped):
            if self.lead is not None:
                with interruptible():
                    found = work(self.lead)
        stop_together()
        return found

    @finishing()
    def save_stopped(self) -> None:
        """Save the last whole step, if the run makes checkpoints."""
        if self.config.checkpoint.every_steps is not None:
            self.save()
        self.checkpoints.wait()
        broadcast_json()  # a launcher that sees one rank leave ends the others, which may be writing

    def save(self) -> None:
        """Begin to write a checkpoint of the moment, unless there is one."""
        if self.saved_step == self.step:
            return
        self.checkpoints.wait()  # for the memory of the one before
        files: dict[str, bytes] = {}
        if self.lead is not None:
            files |= {f"policy/model/{name}": content for name, content in self.lead.tokenizer_files.items()}
            files[CONFIG_FILE] = dump_config(self.config).encode()
            files[str(state_path("", self.step))] = state_bytes(self.lead.data.source.state_dict())
        self.checkpoints.save(self.step, snapshot(self.trainer), files)
        self.saved_step, self.saved_at = self.step, time.time()

    def is_due(self, every_steps: int | None) -> bool:
        """Return whether something is done after this step: every so many steps, and after the last."""
        last = self.step == self.config.trainer.total_steps
        return every_steps is not None and (last or self.step % every_steps == 0)

    def machine_goes(self) -> bool:
        """Return whether the platform takes the machine back before another step would end."""
        soon = expires_soon(
            os.environ,
            time.time(),
            margin_s=self.config.checkpoint.expiry_margin_s,
            longest_step_s=self.longest_step_s,
            saved_at=self.saved_at,
        )
        return self.config.checkpoint.every_steps is not None and bool(broadcast_json(soon))
