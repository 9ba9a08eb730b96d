"""Resolve what a user names to a workflow object, with an error for every wrong case."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any
from areal_lite.api.workflow_api import RolloutWorkflow, WorkflowLike
from areal_lite.config.dotted_path import load_object
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ConfigError, did_you_mean
from areal_lite.processes.child_process import PickledObject, pickled_object

_FORMS = (
    "give a RolloutWorkflow instance, a class with workflow_kwargs, a dotted path 'package.module.Name', "
    "or any class or object with `async def run(self, data, **extra_kwargs)`"
)

_signature: Callable[[Any], inspect.Signature] = functools.lru_cache(32)(inspect.signature)
"""Made once per class: the signature of one without ``__init__`` costs 50 KB of cyclic garbage."""

_PATH_TYPES = {"str", "Path", "PathLike", "None", "Optional", "Union", "pathlib", "os", "typing"}


def pickled_workflow(
    workflow: WorkflowLike, workflow_kwargs: Mapping[str, Any] | None, config: InferenceEngineConfig
) -> PickledObject:
    """Return the arguments of :func:`resolve_workflow` for a worker process."""
    name = workflow if isinstance(workflow, str) else getattr(workflow, "__qualname__", type(workflow).__qualname__)
    return pickled_object(
        (workflow, workflow_kwargs),
        name=f"rollout.workers is {config.workers}, and workflow {name}",
        hint="Define its class at the top level of a module and pass the class, or its dotted path, with "
        "workflow_kwargs of plain values and importable functions; or set rollout.workers: 1",
    )


def resolve_workflow(
    workflow: WorkflowLike, workflow_kwargs: Mapping[str, Any] | None, config: InferenceEngineConfig
) -> RolloutWorkflow:
    """Return the workflow that ``workflow`` names: an instance, class, dotted path, or agent, around which
    ``config.agents.workflow`` is put. A path as ``tokenizer`` is loaded unless annotated as ``str``."""
    target = check_workflow(workflow, workflow_kwargs, allow_sync=config.agents.isolation != "inline")
    if inspect.isclass(target):
        target = target(**_with_tokenizer(target, workflow_kwargs or {}))
    if not isinstance(target, RolloutWorkflow):
        target = load_object(config.agents.workflow, where="rollout.agents.workflow")(target, config)
        assert isinstance(target, RolloutWorkflow)
    return target


def check_workflow(workflow: WorkflowLike, workflow_kwargs: Mapping[str, Any] | None, *, allow_sync: bool) -> Any:
    """Return the class or instance that ``workflow`` names, without constructing it."""
    name = repr(workflow) if isinstance(workflow, str) else getattr(workflow, "__name__", type(workflow).__name__)
    target: Any = load_object(workflow, where="workflow") if isinstance(workflow, str) else workflow
    if target is None:
        raise ConfigError(f"workflow is None: {_FORMS}")
    if inspect.ismodule(target):
        raise ConfigError(f"workflow {name} is a module: name the class in it, '{target.__name__}.Name'")
    if inspect.isclass(target):
        _check_constructor(target, workflow_kwargs or {}, name)
    elif workflow_kwargs:
        raise ConfigError(
            f"workflow {name} is already an instance, so workflow_kwargs {sorted(workflow_kwargs)} have nowhere to "
            "go: pass the class, or drop workflow_kwargs"
        )
    if not (issubclass(target, RolloutWorkflow) if inspect.isclass(target) else isinstance(target, RolloutWorkflow)):
        _check_run(target, name, allow_sync)
    return target


def _with_tokenizer(cls: type[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    path, parameter = kwargs.get("tokenizer"), _signature(cls).parameters.get("tokenizer")
    if not isinstance(path, str) or parameter is None:
        return dict(kwargs)
    named = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
    return dict(kwargs) if named <= _PATH_TYPES else {**kwargs, "tokenizer": load_tokenizer(path)}


def _check_run(target: Any, name: str, allow_sync: bool) -> None:
    run = getattr(target, "run", None)
    if not callable(run):
        kind = "a function" if inspect.isfunction(target) else "not a workflow"
        raise ConfigError(f"workflow {name} is {kind}: {_FORMS}")
    if not (allow_sync or inspect.iscoroutinefunction(run)):
        raise ConfigError(
            f"workflow {name} has a run() that is not async, so it would block all episodes: write "
            "`async def run(self, data, **extra_kwargs)`, or set rollout.agents.isolation: thread"
        )
    parameters = inspect.signature(run).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        named = {p.name for p in parameters}
        if missing := {"base_url", "api_key", "http_client"} - named:
            raise ConfigError(
                f"workflow {name} has a run() that cannot take {', '.join(sorted(missing))}: write "
                "`async def run(self, data, **extra_kwargs)`"
            )


def _check_constructor(cls: type[Any], kwargs: Mapping[str, Any], name: str) -> None:
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise ConfigError(f"workflow {name} does not define {missing}: write `async def {missing}(self, engine, data)`")
    signature = _signature(cls)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        accepted = [p for p in signature.parameters if p not in ("args", "kwargs")]
        hint = did_you_mean(next((name for name in kwargs if name not in accepted), ""), accepted, ".")
        raise ConfigError(
            f"workflow {name}: workflow_kwargs {sorted(kwargs)} do not fit its constructor ({error}){hint} "
            f"It takes {', '.join(accepted) or 'nothing'}"
        ) from None
