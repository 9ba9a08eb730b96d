"""Supervised runs: fine-tuning on answers, preference pairs, reward models; :meth:`SupervisedRun.fit` is the loop."""

import itertools
import json
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
import torch
from areal_lite.config.supervised_config import DPOConfig, RewardModelConfig, SFTConfig, SupervisedConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.rows.loader import ResumableLoader
from areal_lite.data.supervised.preference_dataset import PreferenceDataset
from areal_lite.data.supervised.sft_dataset import SFTDataset
from areal_lite.data.supervised.tokenized_dataset import BaseDataset
from areal_lite.data.vision.image_encoder import image_encoder
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_image_model, check_model_path
from areal_lite.models.parallel.ranks import join_ranks
from areal_lite.models.policy_model import check_mesh, check_scorable, resolve_device
from areal_lite.runs import training_run
from areal_lite.runs.folder.resuming import find_start
from areal_lite.runs.stopping import interruptible, stop_together
from areal_lite.trainer.metrics import OnStep
from areal_lite.trainer.seeding import trainer_threads
from areal_lite.trainer.supervised.preference_trainer import DPOTrainer, RewardModelTrainer
from areal_lite.trainer.supervised.supervised_trainer import SFTTrainer, SupervisedTrainer

logger = logging.getLogger(__name__)
_LOADER_FILE = "loader.json"
_CLASSES: dict[type[SupervisedConfig], tuple[type[BaseDataset], type[SupervisedTrainer[Any]]]] = {
    SFTConfig: (SFTDataset, SFTTrainer),
    DPOConfig: (PreferenceDataset, DPOTrainer),
    RewardModelConfig: (PreferenceDataset, RewardModelTrainer),
}


@dataclass(kw_only=True)
class SupervisedRun(training_run.TrainingRun[dict[str, float]]):
    trainer: SupervisedTrainer[Any]
    loader: ResumableLoader
    held_out: BaseDataset | None

    def fit(self) -> None:
        batches = itertools.chain.from_iterable(itertools.repeat(self.loader))
        while self.step < self.total_steps:
            began, self.under_way = time.monotonic(), self.step + 1
            metrics = self.trainer.train_step(next(batches))
            self.step += 1
            self.record_step(training_run.with_prefix("train", metrics), began=began)
            self.save_if_due()
            stop_together()
            self.evaluate_if_due()

    def evaluate(self) -> None:
        if self.held_out is not None:
            logger.info("evaluating %d held-out rows", len(self.held_out))
            with interruptible() if self.trainer.learner.ranks.size == 1 else nullcontext():
                metrics = self.trainer.evaluate(self.held_out[number] for number in range(len(self.held_out)))
            stop_together()
            self.record_evaluation(metrics, training_run.with_prefix("eval", metrics))

    def data_state(self) -> dict[str, bytes]:
        return {_LOADER_FILE: json.dumps(self.loader.state_dict()).encode()}


def run_supervised(
    config: SFTConfig | DPOConfig | RewardModelConfig,
    *,
    on_step: OnStep | None = None,
    make_run: Callable[..., SupervisedRun] = SupervisedRun,
) -> training_run.Summary[dict[str, float]]:
    """Run supervised training; ``on_step`` sees every record of metrics.jsonl, ``make_run`` may return a subclass.
    Under torchrun all ranks call it; the first one writes and has the metrics. Raises ConfigError, before a model is
    loaded, for anything that cannot work, and Stopped on a signal, after the current update and its checkpoint."""
    started = time.monotonic()
    check_model_path(config.model_path)
    check_image_model(config.model_path, trains_vision=config.trainer.vision == "train")
    check_scorable(config.model_path)
    check_mesh(config.model_path, config.trainer)
    config = training_run.with_dtypes(config)
    logger.info("checking the rows")
    _, make_trainer = _CLASSES[type(config)]
    train, held_out = datasets(config)
    loader = ResumableLoader(
        train,
        batch_size=config.trainer.batch_size,
        shuffle=config.train_dataset.shuffle,
        seed=config.seed,
        num_workers=config.train_dataset.num_workers,
        read_ahead=True,
        collate_fn=train.collate_fn,
    )
    total_steps = config.trainer.total_steps or config.trainer.epochs * len(loader)
    start = find_start(config, total_steps)
    if start.is_done:
        return training_run.summary_of_finished(config, start)
    if start.checkpoint is not None:
        loader.load_state_dict(json.loads((start.checkpoint / _LOADER_FILE).read_bytes()))
    device, sp_size, tp_size = resolve_device(config.trainer.device), config.trainer.sp_size, config.trainer.tp_size
    joined = join_ranks(device, sp_size=sp_size, tp_size=tp_size)
    with joined, training_run.open_run_files(config, start, on_step) as files:
        logger.info("loading %s", config.model_path)
        trainer = make_trainer(
            replace(config.trainer, num_threads=trainer_threads(config.trainer)),
            model_path=config.model_path,
            seed=config.seed,
            total_steps=total_steps,
            on_skip=files.record_skipped_update,
        )
        training_run.give_images(trainer, config.model_path, config.run_dir)
        return make_run(
            config=config,
            files=files,
            start=start,
            trainer=trainer,
            total_steps=total_steps,
            tokenizer_path=config.model_path,
            dtype=getattr(torch, config.trainer.dtype),
            started=started,
            loader=loader,
            held_out=held_out,
        ).run()


def datasets(config: SupervisedConfig) -> tuple[BaseDataset, BaseDataset | None]:
    """Return the training and the held-out items; every row has been checked."""
    if config.eval_dataset is not None and config.eval_dataset.collate_fn is not None:
        raise ConfigError("eval_dataset.collate_fn would do nothing: held-out items are not batched; remove it")
    tokenizer = load_tokenizer(config.model_path)
    images = image_encoder(config.model_path, tokenizer, config.run_dir)

    def load(rows: Any) -> BaseDataset:
        make: Any = _CLASSES[type(config)][0]
        return make(rows.path, tokenizer, config=rows, seed=config.seed, images=images)  # type: ignore[no-any-return]

    return load(config.train_dataset), load(config.eval_dataset) if config.eval_dataset else None
