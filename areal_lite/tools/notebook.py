"""Runs from Python: ``Trainer(...).train(...)`` blocks, ``await areal_lite.train(...)`` leaves an event loop free.

Both take a workflow as a class or an instance, and make the run that ``areal-lite train`` makes. An awaited run works
in a thread. In a notebook IPython shows progress and curves; elsewhere progress is printed. Cancelling the await, as
interrupting a kernel does, stops the run after its current step, with a checkpoint if it makes any.
"""

import asyncio
import dataclasses
import html
import sys
import time
from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from rich.console import Console
from areal_lite.api.workflow_api import WorkflowLike
from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig
from areal_lite.errors import ConfigError
from areal_lite.runs.entry_points import run_training
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.run_data import WorkflowChoice
from areal_lite.runs.stopping import Stopped, ask_to_stop
from areal_lite.runs.supervised_run import run_supervised
from areal_lite.runs.training_run import Summary
from areal_lite.tools.inspect.plot import metrics_figure
from areal_lite.tools.run.progress import TrainingProgress
from areal_lite.trainer.metrics import OnStep

_LINES = 8
_CURVES_EVERY_S = 5.0
_CURVES_SHARE = 20
"""Curves are drawn every 5 seconds, and at most a 20th of the time."""


class Trainer:
    """A reinforcement learning run whose workflow comes from Python::

        Trainer("run.yaml").train(workflow=MyWorkflow, workflow_kwargs={"max_turns": 4})

    Args:
        config: A YAML file, or a loaded config.
        overrides: ``key=value`` each; for a file only.

    Raises:
        ConfigError: If the file cannot be loaded.
        ValueError: If a loaded config comes with overrides.
    """

    def __init__(self, config: str | Path | RunConfig, *overrides: str) -> None:
        self.config: RunConfig = _loaded(config, overrides, RunConfig)

    def train(
        self,
        workflow: WorkflowLike | None = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> Summary[Evaluation]:
        """Make the run and return its result.

        Args:
            workflow: A ``RolloutWorkflow`` or agent (any class with ``async def run()``): class, instance or dotted
                path. None takes the one that the config names.
            workflow_kwargs: Constructor arguments of a class. None takes those of the config.
            on_step: Gets each record of metrics.jsonl; None prints progress.

        Raises:
            ArealLiteError: As the run itself.
        """
        choice = _choice(self.config, workflow, workflow_kwargs)
        on_step = on_step or TrainingProgress(1).on_step
        return run_training(_recorded(self.config, choice), on_step=on_step, workflow=choice)


async def train(
    config: str | Path | ExperimentConfig,
    *overrides: str,
    workflow: WorkflowLike | None = None,
    workflow_kwargs: Mapping[str, Any] | None = None,
) -> Summary[Any]:
    """Make a run of any kind and return its result.

    Args:
        config: A YAML file, or a loaded config.
        overrides: ``key=value`` each; for a file only.
        workflow: As in :meth:`Trainer.train`; for reinforcement learning only, like ``workflow_kwargs``.
        workflow_kwargs: As there.

    Raises:
        ArealLiteError: As the run itself.
        ValueError: If a loaded config comes with overrides, or supervised training with a workflow.
    """
    passes = workflow is not None or workflow_kwargs is not None
    loaded = _loaded(config, overrides, RunConfig if passes else ExperimentConfig)
    choice = _choice(loaded, workflow, workflow_kwargs) if passes else None
    loaded = loaded if choice is None else _recorded(loaded, choice)
    ipython = sys.modules.get("IPython")
    is_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    show = _Notebook(loaded) if is_notebook else TrainingProgress(1)
    run = asyncio.ensure_future(asyncio.to_thread(_run, loaded, show.on_step, choice))
    try:
        await asyncio.shield(run)
    except asyncio.CancelledError:
        ask_to_stop(True)
        await run
        raise
    finally:
        ask_to_stop(False)
        if isinstance(show, _Notebook):
            show.end()
    summary = run.result()
    if summary is None:
        raise asyncio.CancelledError
    return summary


def _choice(config: RunConfig, workflow: WorkflowLike | None, given: Mapping[str, Any] | None) -> WorkflowChoice:
    """Return the workflow that Python code passed; what is None comes from the YAML."""
    choice = WorkflowChoice.of(config) if workflow is None else WorkflowChoice(workflow, config.workflow_kwargs)
    kwargs = dict(choice.given if given is None else given)
    if kwargs.get("gconfig") == config.rollout.gconfig and "gconfig" in choice.parameters:
        del kwargs["gconfig"]  # the run fills it in, and evaluation gets eval_gconfig
    return dataclasses.replace(choice, given=kwargs)


def _recorded(config: RunConfig, choice: WorkflowChoice) -> RunConfig:
    """Return the config with the names of what Python code passed, for the files of the run."""
    return dataclasses.replace(config, workflow=_name_of(choice.workflow), workflow_kwargs=_name_of(choice.given))


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


def _loaded(config: Any, overrides: Sequence[str], root: type[Any]) -> Any:
    """Return a config of the class ``root``, loaded from a file if it is a path."""
    if not isinstance(config, ExperimentConfig):
        return load_config(config, overrides, root=root)
    if overrides:
        raise ValueError(f"overrides {overrides} come with a loaded config: use dataclasses.replace on the config")
    if not isinstance(config, root):
        raise ValueError(
            f"the config is {type(config).__name__}, which has no workflow: for supervised training call "
            "`await areal_lite.train(config)` without one, or run areal-lite sft, dpo or reward-model"
        )
    return config


def _run(config: Any, on_step: OnStep, workflow: WorkflowChoice | None) -> Summary[Any] | None:
    """Make the run; None if it was asked to stop, because asyncio cannot pass a KeyboardInterrupt on."""
    try:
        if isinstance(config, RunConfig):
            return run_training(config, on_step=on_step, workflow=workflow)
        return run_supervised(config, on_step=on_step)
    except Stopped:
        return None


class _Notebook(TrainingProgress):
    """Progress and curves as outputs of the cell; all of it is displayed on the event loop."""

    def __init__(self, config: Any) -> None:
        from IPython.display import HTML, Image, display

        self._text = StringIO()  # a kernel asks for colours, and rich would display each line by itself
        console = Console(file=self._text, force_jupyter=False, force_terminal=False, width=120)
        super().__init__(1, console=console)
        self._total, self._run_dir, self._step = config.trainer.total_steps, config.run_dir, 0
        self._html, self._image = HTML, Image
        self._loop = asyncio.get_running_loop()
        self._progress_display = display(HTML("starting ..."), display_id=True)
        self._curves_display = display(HTML(""), display_id=True)
        self._next_curves = time.monotonic() + _CURVES_EVERY_S

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().on_step(step, metrics)
        self._step = step
        self._loop.call_soon_threadsafe(self._show_progress)
        if time.monotonic() >= self._next_curves:
            began = time.monotonic()
            curves = self._curves()
            self._next_curves = began + max(_CURVES_EVERY_S, _CURVES_SHARE * (time.monotonic() - began))
            self._loop.call_soon_threadsafe(self._curves_display.update, curves)

    def end(self) -> None:
        self._curves_display.update(self._curves())

    def _show_progress(self) -> None:
        lines = html.escape("\n".join(self._text.getvalue().splitlines()[-_LINES:]))
        bar = f'<progress value="{self._step}" max="{self._total}"></progress>' if self._total else ""
        self._progress_display.update(self._html(f"{bar} step {self._step}<pre>{lines}</pre>"))

    def _curves(self) -> Any:
        image = BytesIO()
        try:
            metrics_figure(self._run_dir).savefig(image, format="png", dpi=80)
        except ConfigError as error:  # no matplotlib, or no step yet
            return self._html(html.escape(f"no curves: {error}"))
        return self._image(data=image.getvalue())
