"""metrics.jsonl: one JSON object per training step, also sent to TensorBoard, Weights & Biases or trackio.

Guarantees that every line is a complete record, or that the run ends with an error; that a tracker that cannot start
is an error before the run does anything expensive, and that one that fails later never ends the run.
"""

import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
import yaml
from areal_lite.config.dump import dump_config
from areal_lite.config.run_config import ExperimentConfig
from areal_lite.errors import ConfigError, StorageError
from areal_lite.files.crash_points import crash_point
from areal_lite.files.whole_files import append_line, storing

logger = logging.getLogger(__name__)
OnStep = Callable[[int, dict[str, float]], None]  # called with the step (0 before training) and its metrics
_FIX = "free disk space or fix its permissions, then resume from the last checkpoint"
UPLOAD_TIMEOUT_S = 60  # how long the end of a run waits for an upload, in seconds; the rest stays on disk


class MetricsWriter:
    """Appends records to ``run_dir/NAME``; each line is one write, so readers see complete lines. Records after
    ``last_step`` are removed, because they will be written again. ``tracking`` also receives each record, and
    ``on_step`` the metrics once they are written."""

    def __init__(
        self,
        run_dir: Path | str,
        *,
        name: str = "metrics.jsonl",
        last_step: int | None = None,
        tracking: "Tracking | None" = None,
        on_step: OnStep | None = None,
    ) -> None:
        self._path = Path(run_dir) / name
        self._tracking, self._on_step = tracking, on_step
        with storing(self._path, _FIX):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is not None and self._path.exists():
                _cut_off(self._path, last_step)
        append_line(self._path, b"", fix=_FIX)  # a file that cannot be written ends the run before its first step

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append ``{"step": step, "time": seconds since the epoch, **metrics}``; non-finite values become null."""
        record: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        record |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        crash_point("metrics:before_write")
        append_line(self._path, json.dumps(record).encode() + b"\n", fix=_FIX)
        crash_point("metrics:after_write")
        if self._tracking is not None:
            self._tracking.log(step, metrics)
        if self._on_step is not None:
            self._on_step(step, metrics)


def _cut_off(path: Path, last_step: int) -> None:
    """Remove the records after ``last_step``, and an incomplete last line."""
    end = 0
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(
                    f"{path} is damaged: the line at byte {end} is not a record ({error!r}): remove the line"
                ) from None
            if step > last_step:
                break
            end += len(line)
        file.truncate(end)


class Tracker(NamedTuple):
    log: Callable[[int, Mapping[str, float]], object]
    close: Callable[[], object]


class Tracking(AbstractContextManager["Tracking"]):
    """Trackers by name. Their exceptions are logged once per tracker and counted in ``failures``."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self.failures: Counter[str] = Counter()  # calls that raised, by tracker
        self._trackers = trackers

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.log, step, metrics)

    def __exit__(self, *error: object) -> None:
        for name, tracker in self._trackers.items():
            self._attempt(name, tracker.close)
        for name, count in self.failures.items():
            logger.warning("%s failed %d times in this run; metrics.jsonl has every record", name, count)

    def _attempt(self, name: str, call: Callable[..., object], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:  # a tracker must not stop the run
            self.failures[name] += 1
            if self.failures[name] == 1:
                what = f"{type(error).__name__}: {error}"
                logger.warning("%s failed, and the run continues: %s; further failures are only counted", name, what)


def start_tracking(config: ExperimentConfig, run_dir: Path, *, last_step: int = 0) -> Tracking:
    """Start the trackers as run ``trial_name`` of ``experiment_name``, which resumes if ``last_step`` is above 0."""
    trackers: dict[str, Tracker] = {}
    for name in dict.fromkeys(config.tracking):
        try:
            trackers[name] = _TRACKERS[name](config, run_dir, last_step)
        except Exception as error:
            missing = isinstance(error, ImportError)
            reason = f"it is not installed: pip install {name}" if missing else f"{type(error).__name__}: {error}"
            with Tracking(trackers):  # ends those that have started
                raise ConfigError(f"tracking: {name} cannot start: {reason}, or leave {name} out") from error
    return Tracking(trackers)


def _tensorboard(config: ExperimentConfig, run_dir: Path, last_step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    events: Any = SummaryWriter(str(run_dir / "tensorboard"), purge_step=last_step + 1)  # hides events of later steps
    events.add_text("config", f"```yaml\n{dump_config(config)}```")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            events.add_scalar(name, value, step)

    return Tracker(log, events.close)


def _wandb(config: ExperimentConfig, run_dir: Path, last_step: int) -> Tracker:
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False):
        raise PermissionError(
            "there is no API key: run `wandb login`, or set WANDB_MODE=offline and upload the run later with "
            "`wandb sync`"
        )
    run_id = run_dir / "wandb_run_id"
    if not run_id.exists():
        run_id.write_text(secrets.token_hex(4))
    run = wandb.init(
        **_names(config),
        dir=run_dir,
        id=run_id.read_text(),
        resume="allow",
        settings=wandb.Settings(console="off", finish_timeout=UPLOAD_TIMEOUT_S),
    )
    # W&B drops metrics whose step is not above the last one, as after a resume; so step is a metric here.
    run.define_metric("*", step_metric="step")
    return Tracker(lambda step, metrics: run.log({"step": step, **metrics}), run.finish)


def _trackio(config: ExperimentConfig, run_dir: Path, last_step: int) -> Tracker:
    import trackio

    run = trackio.init(**_names(config), resume="allow" if last_step else "never", embed=False)
    return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


def _names(config: ExperimentConfig) -> dict[str, Any]:
    """Return project, name and config of a tracked run; keys and tokens are masked."""
    return {"project": config.experiment_name, "name": config.trial_name, "config": yaml.safe_load(dump_config(config))}


_TRACKERS: dict[str, Callable[[ExperimentConfig, Path, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
