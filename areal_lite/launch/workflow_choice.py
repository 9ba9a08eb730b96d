"""The workflow and the filter a config names, with the run's sampling and tokenizer filled in."""

from __future__ import annotations

import inspect
from typing import Any

from areal_lite.api.config import RunConfig
from areal_lite.api.dotted_path import load_object
from areal_lite.infra.workflow_resolution import check_workflow


def check_workflow_choice(config: RunConfig) -> None:
    """Refuse a workflow or filter that cannot be loaded, or arguments that do not fit, before anything is made."""
    check_workflow(config.workflow, workflow_kwargs(config, is_eval=False))
    if config.should_accept_fn is not None:
        load_object(config.should_accept_fn, where="should_accept_fn")


def workflow_kwargs(config: RunConfig, *, is_eval: bool) -> dict[str, Any]:
    """Return the constructor arguments of ``config.workflow``.

    ``gconfig`` and ``tokenizer`` are added where the constructor takes them and the YAML does not say.
    """
    kwargs = dict(config.workflow_kwargs)
    target = load_object(config.workflow, where="workflow")
    if inspect.isclass(target):
        offered = {
            "gconfig": config.rollout.eval_gconfig if is_eval else config.rollout.gconfig,
            "tokenizer": config.rollout.tokenizer_path or config.model_path,
        }
        accepted = inspect.signature(target).parameters
        kwargs = {name: value for name, value in offered.items() if name in accepted} | kwargs
    return kwargs
