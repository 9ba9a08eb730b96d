"""The data side of a run: its packer, its training rows as a data source, its held-out rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_lite.api.config import DatasetConfig, RunConfig
from areal_lite.api.engine_api import Row
from areal_lite.data.chat.tokenizer import load_processor, load_tokenizer, model_type
from areal_lite.data.packer.data_packer import DataPacker, make_data_packer
from areal_lite.data.packer.rollout_batch import rollout_inputs
from areal_lite.data.rows.samplers import AbstractSampler, create_rl_sampler
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.curriculum_data_source import CurriculumDataSource


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What rows are drawn from and what trains on them goes through."""

    dataset: Any
    packer: DataPacker
    source: RolloutDataSourceWithBuffer


def training_data(config: RunConfig) -> TrainingData:
    """Return the training rows behind a data source at its start.

    Raises:
        ConfigError: If rows, tokenizer or packer cannot be had.
    """
    rows = config.train_dataset
    packer, dataset = _packer(config, rows), _dataset(config, rows, is_train=True)
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
    sampler = create_rl_sampler(rows, getattr(dataset, "rows", dataset), seed=config.seed)
    if isinstance(sampler, AbstractSampler):
        return TrainingData(dataset, packer, CurriculumDataSource(dataset, sampler=sampler, **settings))
    return TrainingData(dataset, packer, RolloutDataSourceWithBuffer(dataset, **settings))


def workflow_rows(config: RunConfig, rows: DatasetConfig, *, is_train: bool) -> list[Row]:
    """Return what workflows get for each of the rows, in order.

    Raises:
        ConfigError: If rows, tokenizer or packer cannot be had.
    """
    dataset = _dataset(config, rows, is_train=is_train)
    raw = getattr(dataset, "rows", dataset)
    every = [raw[place] for place in range(len(raw))]
    return list(rollout_inputs(_packer(config, rows), every, prompt_key=rows.prompt_key))


def tokenizer_path(config: RunConfig) -> str:
    """Return the folder of the run's tokenizer."""
    return config.rollout.tokenizer_path or config.model_path


def _packer(config: RunConfig, rows: DatasetConfig) -> DataPacker:
    packer = make_data_packer(model_type(config.model_path), config.data_packer)
    packer.setup(
        tokenizer=load_tokenizer(tokenizer_path(config)),
        processor=load_processor(config.model_path),
        config=rows,
    )
    return packer


def _dataset(config: RunConfig, rows: DatasetConfig, *, is_train: bool) -> Any:
    from areal_lite.data.rows.create_dataset import create_rl_dataset

    # Raw rows are enough, unless prompts are measured or a class of the user's may want tokens.
    tokenizes = rows.filter_overlong_prompts or rows.custom_cls or (is_train and rows.datagen)
    return create_rl_dataset(
        rows.path,
        rows,
        load_tokenizer(tokenizer_path(config)) if tokenizes else None,
        load_processor(config.model_path) if tokenizes else None,
        is_train=is_train,
        seed=config.seed,
    )
