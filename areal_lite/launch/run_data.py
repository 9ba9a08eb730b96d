"""Inputs of a run's episodes: the workflow with its arguments, the packer, training and held-out rows."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

from areal_lite.api.config import DatasetConfig, RunConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.api.engine_api import Row
from areal_lite.data.chat.tokenizer import load_processor, load_tokenizer, model_type
from areal_lite.data.packer.data_packer import DataPacker, make_data_packer, rollout_inputs
from areal_lite.data.rows.samplers import AbstractSampler, create_rl_sampler
from areal_lite.data.source.buffered_data_source import CurriculumDataSource, RolloutDataSourceWithBuffer
from areal_lite.errors import ConfigError
from areal_lite.infra.workflow_resolution import check_workflow
from areal_lite.launch.prompt_settings import prompt_preparer, with_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training rows, and the packer that turns them into workflow input and episodes into batches."""

    dataset: Any
    packer: DataPacker
    source: RolloutDataSourceWithBuffer


def training_data(config: RunConfig) -> TrainingData:
    """Return the training rows behind a new data source."""
    rows = config.train_dataset
    logger.info("loading the rows of %s", rows.path)
    dataset = _dataset(config, rows, is_train=True)
    raw = getattr(dataset, "rows", dataset)
    packer = _packer(config, rows, raw)
    settings: dict[str, Any] = {
        "buffer_filter": config.buffer_filter,
        "n_samples_per_prompt": config.rollout.group_size,
        "seed": config.seed,
        "shuffle": rows.shuffle,
        "prompt_key": rows.prompt_key,
        "label_key": rows.label_key,
        "packer": packer,
        "name": str(rows.path),
    }
    sampler = create_rl_sampler(rows, raw, seed=config.seed)
    if isinstance(sampler, AbstractSampler):
        return TrainingData(dataset, packer, CurriculumDataSource(dataset, sampler=sampler, **settings))
    return TrainingData(dataset, packer, RolloutDataSourceWithBuffer(dataset, **settings))


def with_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """Return the config with the steps of ``trainer.total_epochs`` over ``num_rows`` rows as ``total_steps``.

    Raises:
        ConfigError: If they fill no batch, or are too few for the rest of the config.
    """
    trainer, size = config.trainer, config.rollout.consumer_batch_size
    if trainer.total_epochs is None:
        return config
    steps = trainer.total_epochs * num_rows // size
    if not steps:
        raise ConfigError(
            f"trainer.total_epochs is {trainer.total_epochs}, and {num_rows} training rows are fewer than a batch: "
            f"lower rollout.consumer_batch_size from {size}, or add rows"
        )
    try:
        trainer = replace(trainer, total_steps=min(steps, trainer.total_steps or steps))
    except ValueError as error:
        raise ConfigError(f"trainer.total_epochs gives {steps} steps: {error}") from None
    return replace(config, trainer=trainer)


def workflow_rows(config: RunConfig, rows: DatasetConfig, *, is_train: bool) -> list[Row]:
    """Return the workflow input for each of the rows, in order."""
    logger.info("loading the rows of %s", rows.path)
    dataset = _dataset(config, rows, is_train=is_train)
    raw = getattr(dataset, "rows", dataset)
    every = [raw[place] for place in range(len(raw))]
    return [*rollout_inputs(_packer(config, rows, raw), every, prompt_key=rows.prompt_key)]


def tokenizer_path(config: RunConfig) -> str:
    """Return the folder of the run's tokenizer."""
    return config.rollout.tokenizer_path or config.model_path


def check_workflow_choice(config: RunConfig) -> None:
    """Check that workflow and filter can be loaded and that their arguments fit, without making anything."""
    allow_sync = config.rollout.agent_isolation != "inline"
    check_workflow(config.workflow, workflow_kwargs(config, is_eval=False), allow_sync=allow_sync)
    if config.should_accept_fn is not None:
        load_object(config.should_accept_fn, where="should_accept_fn")


def workflow_kwargs(config: RunConfig, *, is_eval: bool) -> dict[str, Any]:
    """Return the constructor arguments of ``config.workflow``.

    ``gconfig``, ``tokenizer`` and ``tokenizer_path`` are added if the constructor takes them and the YAML does not
    set them. Both of the last are the path; the engine loads ``tokenizer``.
    """
    kwargs = dict(config.workflow_kwargs)
    target = load_object(config.workflow, where="workflow")
    if inspect.isclass(target):
        offered = {
            "gconfig": config.rollout.eval_gconfig if is_eval else config.rollout.gconfig,
            "tokenizer": tokenizer_path(config),
            "tokenizer_path": tokenizer_path(config),
        }
        accepted = inspect.signature(target).parameters
        kwargs = {name: value for name, value in offered.items() if name in accepted} | kwargs
    return kwargs


def _packer(config: RunConfig, rows: DatasetConfig, raw: Any) -> DataPacker:
    packer = make_data_packer(model_type(config.model_path), config.data_packer)
    tokenizer = load_tokenizer(tokenizer_path(config))
    packer.setup(tokenizer=tokenizer, processor=load_processor(config.model_path), config=rows)
    packer.prepare_prompt = prompt_preparer(config, rows, tokenizer=tokenizer, first_row=raw[0])
    return packer


def _dataset(config: RunConfig, rows: DatasetConfig, *, is_train: bool) -> Any:
    from areal_lite.data.rows.dynamic_dataset import create_rl_dataset

    # Only prompt lengths, and classes of the user's that may read tokens, need a tokenizer here.
    tokenizes = rows.filter_overlong_prompts or rows.custom_cls or (is_train and rows.datagen)
    rows, system_prompt = with_arguments(config, rows)
    return create_rl_dataset(
        rows.path,
        rows,
        load_tokenizer(tokenizer_path(config)) if tokenizes else None,
        load_processor(config.model_path) if tokenizes else None,
        is_train=is_train,
        seed=config.seed,
        system_prompt=system_prompt,
    )
