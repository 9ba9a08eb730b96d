"""The workflow a config names, with the run's sampling and tokenizer filled in."""

from __future__ import annotations

import inspect
from typing import Any

from areal_lite.api.config import RunConfig
from areal_lite.api.dotted_path import load_object


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
