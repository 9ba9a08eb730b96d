"""Inputs of a run's episodes: the workflow with its arguments, the packer, the rows, and the prompts added to them.

Guarantees that a setting of a run's prompts acts or is an error before anything starts. A dataset class or packer of
the user's may read any setting, so nothing is refused beside one.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from areal_lite.api.engine_api import Row
from areal_lite.api.workflow_api import RolloutWorkflow, WorkflowLike
from areal_lite.config.dataset_config import DatasetConfig, refuse_idle
from areal_lite.config.dotted_path import load_object
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.run_config import RunConfig
from areal_lite.data.chat.prompt_encoder import PromptEncoder
from areal_lite.data.chat.tokenizer import check_chat_template, load_processor, load_tokenizer
from areal_lite.data.packer.data_packer import DataPacker, make_data_packer, rollout_inputs
from areal_lite.data.rows.added_columns import collate_fn_of
from areal_lite.data.rows.samplers import make_curriculum
from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
from areal_lite.data.source.row_streams import CurriculumRows, GeneratedRows, generator_of
from areal_lite.data.source.source_settings import SourceSettings
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import VISION_MODELS, stored_config
from areal_lite.rollout.episodes.workflow_resolution import check_workflow, pickled_workflow

logger = logging.getLogger(__name__)
_RENDERING = ["apply_chat_template", "apply_chat_template_kwargs", "tools_key", "tools_in_system_prompt"]
_RENDERING += ["image_key", "video_key"]
"""Keys of a dataset section that say how a prompt is written."""


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The training rows, the packer that turns them into workflow input and episodes into batches, the workflow."""

    dataset: Any  # None if a generator makes the rows
    packer: DataPacker
    source: RolloutDataSourceWithBuffer
    workflow: "WorkflowChoice"


def training_data(config: RunConfig, workflow: "WorkflowChoice | None" = None) -> TrainingData:
    rows, workflow = config.train_dataset, workflow or WorkflowChoice.of(config)
    logger.info("loading the rows of %s", rows.path)
    generate = None if config.rollout_global_dataset else generator_of(rows)
    dataset: Any = None if generate else _dataset(config, rows, workflow, is_train=True)
    raw: Any = getattr(dataset, "rows", dataset)
    packer = _packer(config, rows, next(generate(), {}) if generate else raw[0], workflow)
    batch = config.rollout.consumer_batch_size
    if not generate and hasattr(raw, "__len__") and len(raw) < batch:
        logger.warning("a batch has %d rows and train_dataset has %d: rows repeat within a batch", batch, len(raw))
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
        name="" if generate is None else f"{rows.path} {rows.kwargs}",  # rows are compared themselves, and may move
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
    config: RunConfig, rows: DatasetConfig, *, is_train: bool, workflow: "WorkflowChoice | None" = None
) -> list[Row]:
    """Return the workflow input for each of the rows, in order."""
    logger.info("loading the rows of %s", rows.path)
    workflow = workflow or WorkflowChoice.of(config)
    dataset = _dataset(config, rows, workflow, is_train=is_train)
    raw = getattr(dataset, "rows", dataset)
    packer, size = _packer(config, rows, raw[0], workflow), config.rollout.consumer_batch_size
    places = range(len(raw))
    batches = [[raw[place] for place in places[start : start + size]] for start in places[::size]]
    return [one for batch in batches for one in rollout_inputs(packer, batch, prompt_key=rows.prompt_key)]


def tokenizer_path(config: RunConfig) -> str:
    return config.rollout.tokenizer_path or config.model_path


@dataclass(frozen=True, slots=True)
class WorkflowChoice:
    """The workflow of a run: what the YAML names, or what Python code passed instead."""

    workflow: WorkflowLike
    given: Mapping[str, Any]  # constructor arguments from the YAML or from Python code

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Return the choice of the YAML; raises ConfigError."""
        if config.workflow is None:
            raise ConfigError(
                "workflow is missing: name a class in the YAML (workflow: package.module.Name), or pass it from Python "
                "to areal_lite.Trainer(config).train(workflow=...)"
            )
        return cls(config.workflow, config.workflow_kwargs)

    @property
    def target(self) -> Any:
        """The class or the instance."""
        return load_object(self.workflow, where="workflow") if isinstance(self.workflow, str) else self.workflow

    @property
    def cls(self) -> Any:
        return self.target if inspect.isclass(self.target) else type(self.target)

    @property
    def takes_prompt_ids(self) -> bool:
        return bool(getattr(self.target, "takes_prompt_ids", False))

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the constructor; none for an instance."""
        return inspect.signature(self.target).parameters if inspect.isclass(self.target) else {}

    def argument(self, name: str) -> Any:
        """Return a constructor argument, or the attribute of an instance; None if there is neither."""
        if not inspect.isclass(self.target):
            return getattr(self.target, name, None)
        parameter = self.parameters.get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        return self.given.get(name, default)

    def check(self, config: RunConfig) -> None:
        """Check that workflow and filter can be loaded, that their arguments fit, and that a sandbox starts."""
        if (sandbox := config.rollout.agents.sandbox) != "none":
            load_object("areal_lite.processes.sandbox.check_sandbox", where="rollout.agents.sandbox")(sandbox)
        allow_sync = config.rollout.agents.isolation != "inline"
        kwargs = self.kwargs(config, config.rollout.gconfig)
        check_workflow(self.workflow, kwargs, allow_sync=allow_sync)
        if config.rollout.workers > 1:
            pickled_workflow(self.workflow, kwargs, config.rollout)
        for name, rows in (("train_dataset", config.train_dataset), ("eval_dataset", config.eval_dataset)):
            if rows is not None and not rows.apply_chat_template and not issubclass(self.cls, RolloutWorkflow):
                raise ConfigError(
                    f"{name}.apply_chat_template is false, and {self.cls.__name__} is an agent, whose messages the "
                    "chat template writes: use a RolloutWorkflow, or apply_chat_template: true"
                )
        if not config.rollout_global_dataset:
            generator_of(config.train_dataset)
        if config.should_accept_fn is not None:
            load_object(config.should_accept_fn, where="should_accept_fn")

    def kwargs(self, config: RunConfig, gconfig: GenerationHyperparameters) -> dict[str, Any]:
        """Return the constructor arguments. ``gconfig``, ``tokenizer`` and ``tokenizer_path`` are added if the
        constructor takes them and they are not given. Both of the last are the path; the engine loads ``tokenizer``."""
        path = tokenizer_path(config)
        offered = {"gconfig": gconfig, "tokenizer": path, "tokenizer_path": path}
        return {name: value for name, value in offered.items() if name in self.parameters} | dict(self.given)


def _packer(config: RunConfig, rows: DatasetConfig, first_row: Any, workflow: WorkflowChoice) -> DataPacker:
    family = stored_config(config.model_path).get("model_type", "")
    # In a run images are spans of the recorded tokens; the packer of image models makes tensors, for own loops.
    packer = make_data_packer("" if family in VISION_MODELS else family, config.data_packer)
    tokenizer = load_tokenizer(tokenizer_path(config))
    if not issubclass(workflow.cls, RolloutWorkflow):
        check_chat_template(tokenizer)
    packer.setup(tokenizer=tokenizer, processor=load_processor(config.model_path), config=rows)
    packer.collate_fn = collate_fn_of(rows)
    packer.prepare_prompt = prompt_preparer(config, rows, workflow, tokenizer=tokenizer, first_row=first_row)
    return packer


def _dataset(config: RunConfig, rows: DatasetConfig, workflow: WorkflowChoice, *, is_train: bool) -> Any:
    from areal_lite.data.rows.prompt_rows import DynamicGenRows, PromptRows, make_dataset

    # Only prompt lengths, and classes of the user's that may read tokens, need a tokenizer here.
    tokenizes = rows.filter_overlong_prompts or rows.custom_cls or (is_train and rows.datagen)
    rows, system_prompt = _with_arguments(rows, workflow)
    return make_dataset(
        rows,
        DynamicGenRows if is_train and rows.datagen is not None else PromptRows,
        data_files=rows.path,
        tokenizer=load_tokenizer(tokenizer_path(config)) if tokenizes else None,
        processor=load_processor(config.model_path) if tokenizes else None,
        seed=config.seed,
        system_prompt=system_prompt,
    )


def prompt_preparer(
    config: RunConfig, rows: DatasetConfig, workflow: WorkflowChoice, *, tokenizer: Any, first_row: Any
) -> Callable[[Row], Row] | None:
    """Return what adds the prompt's forms to the rows of a dataset section; None if the workflow takes none. They are
    ``raw_prompt_ids`` for a workflow with ``takes_prompt_ids``, ``raw_prompt`` with return_raw_chat and
    ``full_prompts`` with return_full_prompt. A row that has one of them keeps its own."""
    section = "eval_dataset" if rows is config.eval_dataset else "train_dataset"
    has_prompt = rows.prompt_key in first_row if isinstance(first_row, Mapping) else True
    takes_ids = workflow.takes_prompt_ids and has_prompt
    if not takes_ids and config.data_packer is None and rows.custom_cls is None:
        _refuse_idle_prompt_keys(rows, section, workflow, has_prompt=has_prompt, first_row=first_row)
    forms = {"raw_prompt_ids": takes_ids, "raw_prompt": rows.return_raw_chat, "full_prompts": rows.return_full_prompt}
    added = [name for name, wanted in forms.items() if wanted]
    if not added:
        return None
    system_prompt = None
    if takes_ids:
        rows, system_prompt = _with_arguments(rows, workflow)
    else:
        rows = replace(rows, max_prompt_length=None)
    encoder = PromptEncoder(rows, tokenizer, system_prompt=system_prompt)

    def prepare(row: Row) -> Row:
        if "raw_prompt_ids" in row:  # a dataset class of the user's has prepared it
            return {}
        forms = encoder.forms(encoder.encode(row))
        return {name: forms[name] for name in added}

    if config.data_packer is None:
        try:
            prepare(first_row)
        except ValueError as error:
            raise ConfigError(f"{section} {rows.path}, row 0: {error}") from error
    return prepare


def _with_arguments(rows: DatasetConfig, workflow: WorkflowChoice) -> tuple[DatasetConfig, str | None]:
    """Return the section with ``enable_thinking`` of a workflow that takes the prompt's ids, and its system prompt."""
    if not workflow.takes_prompt_ids:
        return rows, None
    thinking = workflow.argument("enable_thinking")
    if thinking is not None and rows.apply_chat_template:
        rows = replace(rows, apply_chat_template_kwargs={"enable_thinking": thinking} | rows.apply_chat_template_kwargs)
    return rows, workflow.argument("system_prompt")


def _refuse_idle_prompt_keys(
    rows: DatasetConfig, section: str, workflow: WorkflowChoice, *, has_prompt: bool, first_row: Any
) -> None:
    """Refuse settings that nothing reads because the workflow takes no ids of the prompt."""
    if has_prompt:
        name = workflow.cls.__qualname__
        why = f"{name} writes its own prompts: remove it, or use a workflow with takes_prompt_ids, such as single_turn"
    else:
        why = f"the rows have no column {rows.prompt_key!r}, only {', '.join(first_row)}: set {section}.prompt_key"
    filters = rows.filter_overlong_prompts
    faults = {"truncation": why}
    if not filters:
        faults["max_prompt_length"] = f"{why}, or set filter_overlong_prompts"
    if not (filters or isinstance(first_row, list) or (has_prompt and rows.return_full_prompt)):
        faults |= dict.fromkeys(_RENDERING, why)
    if not has_prompt:
        faults |= dict.fromkeys(("return_raw_chat", "return_full_prompt"), why)
    refuse_idle(section, rows, faults)
