"""The prompt of a row as the dataset section asks for it: who takes it, and settings that nothing would take.

Guarantees that a setting of a run's prompts acts or is an error before anything starts. A dataset class or packer of
the user's may read any setting, so nothing is refused beside one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from areal_lite.api.engine_api import Row
from areal_lite.config.dataset_config import DatasetConfig, refuse_idle
from areal_lite.config.run_config import RunConfig
from areal_lite.data.chat.prompt_encoder import PromptEncoder
from areal_lite.errors import ConfigError

_RENDERING = (
    *("apply_chat_template", "apply_chat_template_kwargs", "tools_key", "tools_in_system_prompt"),
    *("image_key", "video_key"),
)


def prompt_preparer(
    config: RunConfig,
    rows: DatasetConfig,
    target: Any,
    workflow_kwargs: Mapping[str, Any],
    *,
    tokenizer: Any,
    first_row: Any,
) -> Callable[[Row], Row] | None:
    """Return what adds the prompt's forms to the rows of a dataset section; None if the workflow takes none.

    They are ``raw_prompt_ids`` for a workflow with ``takes_prompt_ids``, ``raw_prompt`` with return_raw_chat and
    ``full_prompts`` with return_full_prompt. A row that has one of them keeps its own.
    """
    key, section = rows.prompt_key, "eval_dataset" if rows is config.eval_dataset else "train_dataset"
    has_prompt = key in first_row if isinstance(first_row, Mapping) else True
    takes_ids = bool(getattr(target, "takes_prompt_ids", False)) and has_prompt
    if takes_ids:
        why = ""
    elif has_prompt:
        name = getattr(target, "__qualname__", type(target).__qualname__)
        why = f"{name} writes its own prompts: remove it, or use a workflow with takes_prompt_ids, such as single_turn"
    else:
        why = f"the rows have no column {key!r}, only {', '.join(first_row)}: set {section}.prompt_key"
    _check(config, rows, section, why=why, has_prompt=has_prompt, first_row=first_row)
    forms = {"raw_prompt_ids": takes_ids, "raw_prompt": rows.return_raw_chat, "full_prompts": rows.return_full_prompt}
    added = [name for name, wanted in forms.items() if wanted]
    if not added:
        return None
    system_prompt = None
    if takes_ids:
        rows, system_prompt = with_arguments(rows, target, workflow_kwargs)
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


def with_arguments(
    rows: DatasetConfig, target: Any, workflow_kwargs: Mapping[str, Any]
) -> tuple[DatasetConfig, str | None]:
    """Return the section with ``enable_thinking`` of a workflow that takes the prompt's ids, and its system prompt."""
    if not getattr(target, "takes_prompt_ids", False):
        return rows, None
    thinking = _argument(target, workflow_kwargs, "enable_thinking")
    if thinking is not None and rows.apply_chat_template:
        variables = {"enable_thinking": thinking} | rows.apply_chat_template_kwargs
        rows = replace(rows, apply_chat_template_kwargs=variables)
    return rows, _argument(target, workflow_kwargs, "system_prompt")


def _check(config: RunConfig, rows: DatasetConfig, section: str, *, why: str, has_prompt: bool, first_row: Any) -> None:
    """Refuse settings that nothing reads because the workflow takes no ids of the prompt, for the reason ``why``."""
    if not why or config.data_packer is not None or rows.custom_cls is not None:
        return
    filters = rows.filter_overlong_prompts
    faults = {"truncation": why}
    if not filters:
        faults["max_prompt_length"] = f"{why}, or set filter_overlong_prompts"
    if not (filters or isinstance(first_row, list) or (has_prompt and rows.return_full_prompt)):
        faults |= dict.fromkeys(_RENDERING, why)
    if not has_prompt:
        faults |= dict.fromkeys(("return_raw_chat", "return_full_prompt"), why)
    refuse_idle(section, rows, faults)


def _argument(target: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    if not inspect.isclass(target):
        return getattr(target, name, None)
    parameter = inspect.signature(target).parameters.get(name)
    default = None if parameter is None or parameter.default is parameter.empty else parameter.default
    return kwargs.get(name, default)
