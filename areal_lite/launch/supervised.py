"""The supervised runs: fine-tuning on answers, preference pairs, reward models. One loop, which reads as it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from areal_lite.api.config import RowsConfig
from areal_lite.api.config_loader import dump_config
from areal_lite.api.supervised_config import (
    ConversationsConfig,
    DPOConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedConfig,
)
from areal_lite.data.chat.tokenizer import load_tokenizer, tokenizer_files
from areal_lite.data.rows.load_rows import load_rows
from areal_lite.data.rows.loader import ResumableLoader
from areal_lite.data.supervised.preference_dataset import PreferenceDataset
from areal_lite.data.supervised.sft_dataset import SFTDataset
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, Item
from areal_lite.embedded.settings import check_model_path
from areal_lite.errors import TrainingError
from areal_lite.launch.resuming import CHECKPOINTS, checkpoint_to_resume, is_evaluated, way_back
from areal_lite.launch.run import OnStep
from areal_lite.launch.run_directory import run_directory, run_directory_path
from areal_lite.launch.skipped_updates import note_skipped
from areal_lite.launch.stopping import Stopped, finishing, interruptible, stop_together
from areal_lite.trainer.broadcast import broadcast_json
from areal_lite.trainer.checkpoint import CONFIG_FILE, load_checkpoint
from areal_lite.trainer.checkpoint_writer import CheckpointWriter
from areal_lite.trainer.metrics import MetricsWriter
from areal_lite.trainer.policy_model import resolve_device
from areal_lite.trainer.preference_trainer import DPOTrainer, RewardModelTrainer
from areal_lite.trainer.ranks import join_ranks
from areal_lite.trainer.sft_trainer import SFTTrainer
from areal_lite.trainer.snapshot import snapshot
from areal_lite.trainer.supervised_trainer import SupervisedTrainer
from areal_lite.trainer.tracking import start_tracking
from areal_lite.trainer.weights import save_model

_LOADER_FILE = "loader.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedSummary:
    """What a run came to."""

    run_dir: Path
    steps: int
    seconds: float
    before: dict[str, float] | None
    """Metrics on the held-out rows at step 0; None for a resumed run."""
    after: dict[str, float] | None
    model_dir: Path | None


_MAKES: dict[type[SupervisedConfig], tuple[type[BaseDataset[Any]], type[SupervisedTrainer[Any]]]] = {
    SFTConfig: (SFTDataset, SFTTrainer),
    DPOConfig: (PreferenceDataset, DPOTrainer),
    RewardModelConfig: (PreferenceDataset, RewardModelTrainer),
}
"""What makes items of rows, and what trains on them."""


def run_supervised(
    config: SFTConfig | DPOConfig | RewardModelConfig, *, on_step: OnStep | None = None
) -> SupervisedSummary:
    """Train what ``config`` is of; ``on_step`` sees every record of metrics.jsonl.

    Raises:
        ConfigError: Before a model is loaded, for whatever in the config or the rows cannot work.
        ArealLiteError: With its exit code, for whatever goes wrong later.
        Stopped: On SIGINT or SIGTERM, after the update under way and its checkpoint where the run makes any.
    """
    began = time.monotonic()
    check_model_path(config.model_path)
    make_dataset, make_trainer = _MAKES[type(config)]
    train = _dataset(make_dataset, config, config.train_dataset)
    held_out = _dataset(make_dataset, config, config.eval_dataset) if config.eval_dataset else None
    loader = ResumableLoader(
        train,
        batch_size=config.trainer.batch_size,
        shuffle=config.train_dataset.shuffle,
        seed=config.seed,
        collate_fn=train.collate_fn,
    )
    total_steps = loader.total_training_steps(config.trainer.epochs, override=config.trainer.total_steps)
    checkpoint, first_step = checkpoint_to_resume(config, total_steps)
    # Asked before the ranks meet: the first of them writes once they have.
    evaluated = checkpoint is not None and is_evaluated(run_directory_path(config), first_step)
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(resolve_device(config.trainer.device)))
        run_dir, writer = run_directory_path(config), None
        if ranks.rank == 0:
            stack.enter_context(run_directory(config, fresh=checkpoint is None))
            tracking = stack.enter_context(start_tracking(config, run_dir, last_step=first_step))
            writer = stack.enter_context(MetricsWriter(run_dir, last_step=first_step, tracking=tracking))

        def record(step: int, metrics: dict[str, float]) -> None:
            if writer is not None:
                writer.write(step, metrics)
                if on_step is not None:
                    on_step(step, metrics)

        run = SupervisedFit(
            config=config,
            run_dir=run_dir,
            trainer=make_trainer(
                config.trainer,
                model_path=config.model_path,
                seed=config.seed,
                total_steps=total_steps,
                on_skip=note_skipped(run_dir) if ranks.rank == 0 else None,
            ),
            loader=loader,
            held_out=[held_out[number] for number in range(len(held_out))] if held_out else [],
            checkpoints=stack.enter_context(
                CheckpointWriter(run_dir / CHECKPOINTS, keep=config.checkpoint.keep)
            ),
            record=record,
            total_steps=total_steps,
            step=first_step,
            saved_step=first_step,
            evaluated=evaluated,
        )
        if checkpoint is not None:
            load_checkpoint(run.trainer, checkpoint)
            loader.load_state_dict(json.loads((checkpoint / _LOADER_FILE).read_bytes()))
        model_dir = None
        with finishing():
            run.fit()
            if config.save_model:
                tokenizer, dtype = load_tokenizer(config.model_path), getattr(torch, config.trainer.dtype)
                model_dir = save_model(run.trainer.model, tokenizer, run_dir / "model", dtype=dtype)
    return SupervisedSummary(
        run_dir=run_dir,
        steps=total_steps - first_step,
        seconds=time.monotonic() - began,
        before=run.evaluations[0] if run.evaluations and first_step == 0 else None,
        after=run.evaluations[-1] if run.evaluations else None,
        model_dir=model_dir,
    )


def _dataset(
    make: Callable[..., BaseDataset[Any]], config: SupervisedConfig, rows: ConversationsConfig
) -> BaseDataset[Any]:
    """Return the items of ``rows``; what its record has beyond any rows' are arguments of the same name."""
    names = {field.name for field in fields(rows)} - {field.name for field in fields(RowsConfig)}
    options = {name: getattr(rows, name) for name in names}
    options["template_kwargs"] = options.pop("apply_chat_template_kwargs")
    return make(load_rows(rows, seed=config.seed), load_tokenizer(config.model_path), **options)


@dataclass(kw_only=True)
class SupervisedFit:
    """A run; :meth:`fit` is the algorithm. Every rank has one, and the first of them writes."""

    config: SupervisedConfig
    run_dir: Path
    trainer: SupervisedTrainer[Any]
    loader: ResumableLoader
    held_out: list[Item]
    checkpoints: CheckpointWriter
    record: Callable[[int, dict[str, float]], None]
    total_steps: int
    step: int
    """Updates done."""
    saved_step: int
    evaluated: bool
    """Whether the records have the held-out rows' metrics at the step it begins with."""
    evaluations: list[dict[str, float]] = field(default_factory=list)

    def fit(self) -> None:
        """Train up to ``total_steps``; to be called in :func:`finishing`.

        Raises:
            Stopped: On SIGINT or SIGTERM, after the same update on every rank and, where the run makes checkpoints, one
                of it.
            TrainingError: With the last good checkpoint in a note.
        """
        batches = _endless(self.loader)
        saves, evaluates = self.config.checkpoint.every_steps, self.config.evaluation.every_steps
        try:
            if not self.evaluated and self.is_due(evaluates or self.total_steps):
                self.evaluate()
            while self.step < self.total_steps:
                metrics = self.trainer.train_step(next(batches))
                self.step += 1
                self.record(self.step, _named("train", metrics))
                if self.is_due(saves):
                    self.save()
                stop_together()
                if self.is_due(evaluates or self.total_steps):
                    self.evaluate()
        except Stopped:
            if saves is not None:
                self.save()
            self.checkpoints.wait()
            broadcast_json()  # a launcher that sees one rank leave ends the others, which may be writing
            raise
        except TrainingError as error:
            self.checkpoints.wait()
            error.add_note(way_back(self.run_dir))
            raise

    def evaluate(self) -> None:
        """Record the metrics of the held-out rows, where there are any."""
        if self.held_out:
            alone = self.trainer.learner.ranks.size == 1
            with interruptible() if alone else nullcontext():
                self.evaluations.append(self.trainer.evaluate(self.held_out))
            stop_together()
            self.record(self.step, _named("eval", self.evaluations[-1]))

    def save(self) -> None:
        """Begin to write a checkpoint of the moment, unless there is one."""
        if self.saved_step < self.step:
            self.checkpoints.wait()  # for the memory of the one before
            tokenizer = tokenizer_files(self.config.model_path)
            files = {
                **{f"policy/model/{name}": content for name, content in tokenizer.items()},
                _LOADER_FILE: json.dumps(self.loader.state_dict()).encode(),
                CONFIG_FILE: dump_config(self.config).encode(),
            }
            self.checkpoints.save(self.step, snapshot(self.trainer), files)
            self.saved_step = self.step

    def is_due(self, every_steps: int | None) -> bool:
        """Return whether something is done after this update: every so many, and after the last."""
        last = self.step == self.total_steps
        return every_steps is not None and (last or self.step % every_steps == 0)


def progress_line(step: int, metrics: Mapping[str, float]) -> str:
    """Return one record of metrics.jsonl as a line for people."""
    scope = "eval" if "eval/loss" in metrics else "train"
    shown = {"loss": ".4f", "accuracy": ".3f", "margin": "+.3f", "learning_rate": ".2e", "grad_norm": ".2f"}
    shown["tokens_per_second"] = ".0f"
    values = [
        f"{name.replace('_', ' ')} {metrics[f'{scope}/{name}']:{form}}"
        for name, form in shown.items()
        if f"{scope}/{name}" in metrics
    ]
    return f"step {step:>5}  {'held-out ' * (scope == 'eval')}{'  '.join(values)}"


def _named(scope: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{scope}/{name}": value for name, value in metrics.items()}


def _endless(loader: ResumableLoader) -> Iterator[list[Item]]:
    while True:
        yield from loader
