"""Inputs of a run's episodes: the workflow with its arguments, the packer, training and held-out rows."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from areal_lite.api.engine_api import Row, WorkflowLike
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.config.dotted_path import load_object
from areal_lite.config.run_config import RunConfig
from areal_lite.data.chat.tokenizer import load_processor, load_tokenizer, model_type
from areal_lite.data.packer.data_packer import DataPacker, make_data_packer, rollout_inputs
from areal_lite.data.rows.added_columns import collate_fn_of
from areal_lite.data.rows.samplers import make_curriculum
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.row_streams import CurriculumRows, GeneratedRows, generator_of
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError
from areal_lite.rollout.episodes.workflow_resolution import check_workflow, pickled_workflow
from areal_lite.runs.prompt_settings import prompt_preparer, with_arguments

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training rows, the packer that turns them into workflow input and episodes into batches, the workflow."""

    dataset: Any
    """None if a generator makes the rows."""
    packer: DataPacker
    source: RolloutDataSourceWithBuffer
    workflow: WorkflowChoice


def training_data(config: RunConfig, workflow: WorkflowChoice | None = None) -> TrainingData:
    rows, workflow = config.train_dataset, workflow or WorkflowChoice.of(config)
    logger.info("loading the rows of %s", rows.path)
    generate = None if config.rollout_global_dataset else generator_of(rows)
    dataset: Any = None if generate else _dataset(config, rows, workflow, is_train=True)
    raw: Any = getattr(dataset, "rows", dataset)
    first_row = next(generate(), {}) if generate else raw[0]
    packer = _packer(config, rows, first_row, workflow)
    settings = SourceSettings(
        buffer_filter=config.buffer_filter,
        n_samples_per_prompt=config.rollout.group_size,
        seed=config.seed,
        shuffle=rows.shuffle,
        prompt_key=rows.prompt_key,
        label_key=rows.label_key,
        metadata_key=rows.metadata_key,
        reward_key=config.rollout.rewards.key,
        packer=packer,
        mini_batch_size=config.rollout.consumer_batch_size,
        name=str(rows.path) if generate is None else f"{rows.path} {rows.kwargs}",
    )
    stream: Any = dataset
    if generate is not None:
        stream = GeneratedRows(generate, settings)
    elif (curriculum := make_curriculum(rows, raw)) is not None:
        if packer.collates:
            own = f"{type(packer).__name__} has a rollout_collate_fn"
            raise ConfigError(
                f"{own if packer.collate_fn is None else 'train_dataset has a collate_fn'}, which takes rows in "
                "mini-batches, and train_dataset.sampler chooses one row at a time: remove one of the two"
            )
        stream = CurriculumRows(dataset, settings, curriculum)
    return TrainingData(dataset, packer, RolloutDataSourceWithBuffer(stream, settings), workflow)


def with_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """Return the config with the steps of ``trainer.total_epochs`` over ``num_rows`` rows as ``total_steps``."""
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


def workflow_rows(
    config: RunConfig, rows: DatasetConfig, *, is_train: bool, workflow: WorkflowChoice | None = None
) -> list[Row]:
    """Return the workflow input for each of the rows, in order."""
    logger.info("loading the rows of %s", rows.path)
    workflow = workflow or WorkflowChoice.of(config)
    dataset = _dataset(config, rows, workflow, is_train=is_train)
    raw = getattr(dataset, "rows", dataset)
    packer, size = _packer(config, rows, raw[0], workflow), config.rollout.consumer_batch_size
    batches = [
        [raw[place] for place in range(start, min(start + size, len(raw)))] for start in range(0, len(raw), size)
    ]
    return [one for batch in batches for one in rollout_inputs(packer, batch, prompt_key=rows.prompt_key)]


def tokenizer_path(config: RunConfig) -> str:
    return config.rollout.tokenizer_path or config.model_path


@dataclass(frozen=True, slots=True)
class WorkflowChoice:
    """The workflow of a run: what the YAML names, or what Python code passed instead."""

    workflow: WorkflowLike
    given: Mapping[str, Any]
    """Constructor arguments from the YAML or from Python code."""

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the choice of the YAML; raises ConfigError."""
        if config.workflow is None:
            raise ConfigError(
                "workflow is missing: name a class in the YAML (workflow: package.module.Name), or pass it from Python "
                "to areal_lite.Trainer(config).train(workflow=...)"
            )
        return cls(config.workflow, config.workflow_kwargs)

    @classmethod
    def passed(cls, config: RunConfig, workflow: WorkflowLike | None, given: Mapping[str, Any] | None) -> Self:
        """Return the choice of Python code; what is None comes from the YAML."""
        workflow = cls.of(config).workflow if workflow is None else workflow
        given = dict(config.workflow_kwargs if given is None else given)
        if given.get("gconfig") == config.rollout.gconfig and "gconfig" in _parameters(cls(workflow, {}).target):
            del given["gconfig"]  # the run fills it in, and evaluation gets eval_gconfig
        return cls(workflow, given)

    @property
    def target(self) -> Any:
        """The class or the instance."""
        return load_object(self.workflow, where="workflow") if isinstance(self.workflow, str) else self.workflow

    def recorded(self, config: RunConfig) -> RunConfig:
        """Return the config with the names of what Python code passed, for the files of the run."""
        kwargs = {str(name): _name_of(value) for name, value in self.given.items()}
        return dataclasses.replace(config, workflow=_name_of(self.workflow), workflow_kwargs=kwargs)

    def check(self, config: RunConfig) -> None:
        """Check that workflow and filter can be loaded and that their arguments fit, without making anything."""
        allow_sync = config.rollout.agents.isolation != "inline"
        kwargs = self.kwargs(config, is_eval=False)
        target = check_workflow(self.workflow, kwargs, allow_sync=allow_sync)
        if config.rollout.workers > 1:
            pickled_workflow(self.workflow, kwargs, config.rollout)
        _check_keys(config, target)
        if config.should_accept_fn is not None:
            load_object(config.should_accept_fn, where="should_accept_fn")

    def kwargs(self, config: RunConfig, *, is_eval: bool) -> dict[str, Any]:
        """Return the constructor arguments.

        ``gconfig``, ``tokenizer`` and ``tokenizer_path`` are added if the constructor takes them and they are not
        given. Both of the last are the path; the engine loads ``tokenizer``.
        """
        offered = {
            "gconfig": config.rollout.eval_gconfig if is_eval else config.rollout.gconfig,
            "tokenizer": tokenizer_path(config),
            "tokenizer_path": tokenizer_path(config),
        }
        accepted = _parameters(self.target)
        return {name: value for name, value in offered.items() if name in accepted} | dict(self.given)


def _check_keys(config: RunConfig, workflow: Any) -> None:
    """Check that the keys of rows and rewards have an effect with this workflow, a class or an instance."""
    cls = workflow if inspect.isclass(workflow) else type(workflow)
    is_agent = not issubclass(cls, RolloutWorkflow)
    if not config.rollout_global_dataset:
        generator_of(config.train_dataset)
    for name, rows in (("train_dataset", config.train_dataset), ("eval_dataset", config.eval_dataset)):
        if rows is not None and is_agent and not rows.apply_chat_template:
            raise ConfigError(
                f"{name}.apply_chat_template is false, and {cls.__name__} is an agent, whose messages the chat "
                "template writes: use a RolloutWorkflow, or apply_chat_template: true"
            )


def _parameters(target: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(target).parameters if inspect.isclass(target) else {}


def _name_of(value: Any) -> Any:
    """Return ``value`` as YAML can hold it: plain values as they are, a tokenizer by its folder, others by name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_name_of(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _name_of(entry) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _name_of(dataclasses.asdict(value))
    if isinstance(path := getattr(value, "name_or_path", None), str):
        return path
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _packer(config: RunConfig, rows: DatasetConfig, first_row: Any, workflow: WorkflowChoice) -> DataPacker:
    packer = make_data_packer(model_type(config.model_path), config.data_packer)
    tokenizer = load_tokenizer(tokenizer_path(config))
    packer.setup(tokenizer=tokenizer, processor=load_processor(config.model_path), config=rows)
    packer.collate_fn = collate_fn_of(rows)
    packer.prepare_prompt = prompt_preparer(
        config, rows, workflow.target, workflow.given, tokenizer=tokenizer, first_row=first_row
    )
    return packer


def _dataset(config: RunConfig, rows: DatasetConfig, workflow: WorkflowChoice, *, is_train: bool) -> Any:
    from areal_lite.data.rows.dynamic_dataset import DynamicGenRows, make_dataset
    from areal_lite.data.rows.prompt_rows import PromptRows

    # Only prompt lengths, and classes of the user's that may read tokens, need a tokenizer here.
    tokenizes = rows.filter_overlong_prompts or rows.custom_cls or (is_train and rows.datagen)
    rows, system_prompt = with_arguments(rows, workflow.target, workflow.given)
    return make_dataset(
        rows,
        DynamicGenRows if is_train and rows.datagen is not None else PromptRows,
        data_files=rows.path,
        tokenizer=load_tokenizer(tokenizer_path(config)) if tokenizes else None,
        processor=load_processor(config.model_path) if tokenizes else None,
        seed=config.seed,
        system_prompt=system_prompt,
    )
