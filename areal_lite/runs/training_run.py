"""The work around the steps of a training run: evaluate, record, save, stop, resume.

Guarantees that a checkpoint captures a moment between two steps, data and weights alike, even if the run is stopped
within one, and that all ranks stop after the same step. The steps are in ``rl_run`` and ``supervised_run``.
"""

import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar
import orjson
import torch
from areal_lite.config.dump import dump_config
from areal_lite.config.run_config import RunConfig
from areal_lite.data.chat.tokenizer import load_tokenizer, tokenizer_files
from areal_lite.data.vision.image_processor import load_image_processor
from areal_lite.data.vision.image_store import ImagePixels, ImageStore
from areal_lite.errors import TrainingError
from areal_lite.files.incarnation import Incarnation
from areal_lite.files.whole_files import append_line
from areal_lite.models.parallel.ranks import Ranks, broadcast_json
from areal_lite.models.policy_model import resolve_device, resolve_dtype
from areal_lite.runs.folder.resuming import CHECKPOINTS, Start, resume_hint
from areal_lite.runs.folder.run_directory import SKIPPED_UPDATES, run_directory
from areal_lite.runs.stopping import Stopped, expires_soon, finishing, stop_together
from areal_lite.servers.weights.weight_folder import save_model
from areal_lite.trainer.checkpoint.checkpoint import CONFIG_FILE, CheckpointWriter
from areal_lite.trainer.checkpoint.snapshot import restore, snapshot
from areal_lite.trainer.machine_metrics import memory_metrics
from areal_lite.trainer.metrics import MetricsWriter, OnStep, start_tracking

if TYPE_CHECKING:
    from areal_lite.config.supervised_config import SupervisedConfig

logger = logging.getLogger(__name__)
E = TypeVar("E")
C = TypeVar("C", bound="RunConfig | SupervisedConfig")


class StepMetrics(dict[str, float]):
    """Metrics of one step, and what the console shows beside them."""

    top_cause: str = ""
    total_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Summary(Generic[E]):
    run_dir: Path
    steps: int
    seconds: float
    before: E | None  # evaluation of the untrained model; None if the run was resumed or skipped it
    after: E | None
    model_dir: Path | None


def with_dtypes(config: C) -> C:
    """Return the config with the dtypes that auto stands for on this machine, so that a replay on another has them."""
    dtype: Any = str(resolve_dtype(config.trainer.dtype, resolve_device(config.trainer.device))).removeprefix("torch.")
    changes: dict[str, Any] = {"trainer": replace(config.trainer, dtype=dtype)}
    if isinstance(config, RunConfig) and config.server.dtype == "auto":
        changes["server"] = replace(config.server, dtype=dtype)
    return replace(config, **changes)


def summary_of_finished(config: "RunConfig | SupervisedConfig", start: Start) -> Summary[Any]:
    """Return the summary of a run that has nothing left to do, and say so."""
    logger.info(
        "nothing to do: %s has trained all %d steps; raise their number to train longer, or set another trial_name",
        config.run_dir,
        start.step,
    )
    model_dir = config.run_dir / "model" if config.save_model else None
    return Summary(run_dir=config.run_dir, steps=0, seconds=0.0, before=None, after=None, model_dir=model_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Output files of a run. Ranks other than the first write nothing."""

    run_dir: Path
    checkpoints: CheckpointWriter
    metrics: MetricsWriter | None
    incarnation: Incarnation | None = None

    def check_start(self) -> None:
        """Raise StorageError on the first rank if the run has been started again since this start of it."""
        if self.incarnation is not None:
            self.incarnation.check()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        if self.metrics is not None:
            self.check_start()
            metrics.update(with_prefix("checkpoint", self.checkpoints.take_metrics()))
            self.metrics.write(step, metrics)

    def record_skipped_update(self, update: Mapping[str, Any]) -> None:
        """Append a non-finite update, which was not applied, to skipped_updates.jsonl."""
        if self.metrics is not None:
            # JSON has no nan and no infinity.
            record = {name: str(value) if isinstance(value, float) else value for name, value in update.items()}
            append_line(self.run_dir / SKIPPED_UPDATES, orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))


@contextmanager
def open_run_files(config: "RunConfig | SupervisedConfig", start: Start, on_step: OnStep | None) -> Iterator[RunFiles]:
    """Lock the run's folder, start the trackers and open the files; call it after the ranks have joined."""
    run_dir, metrics, own, size = config.run_dir, None, None, Ranks.current().size
    if (wanted := config.cluster.n_ranks) not in (0, size):
        logger.warning(
            "cluster.n_ranks is %d, and %d ranks train: only a command of areal-lite starts them", wanted, size
        )
    with ExitStack() as stack:
        if Ranks.current().rank == 0:
            folder = start.checkpoint and start.checkpoint.resolve().parent
            stack.enter_context(run_directory(config, fresh=folder != (run_dir / CHECKPOINTS).resolve()))
            own = Incarnation(run_dir)
            tracking = stack.enter_context(start_tracking(config, run_dir, last_step=start.step))
            metrics = MetricsWriter(run_dir, last_step=start.step, tracking=tracking, on_step=on_step)
        writer = stack.enter_context(CheckpointWriter(run_dir / CHECKPOINTS, keep=config.checkpoint.keep))
        yield RunFiles(run_dir=run_dir, checkpoints=writer, metrics=metrics, incarnation=own)


def give_images(trainer: Any, model_path: str, run_dir: Path) -> None:
    """Let the models of a trainer that read images read those of the run in ``run_dir``."""
    for learner in trainer.learners.values():
        if learner.module.tower is not None:
            learner.module.pixels = ImagePixels(ImageStore.of_run(run_dir), load_image_processor(model_path))


@dataclass(kw_only=True)
class TrainingRun(ABC, Generic[E]):
    """A training run; a subclass defines :meth:`fit` and :meth:`evaluate`. All ranks make the same calls in order."""

    config: "RunConfig | SupervisedConfig"
    files: RunFiles
    start: Start
    trainer: Any  # a :class:`PolicyTrainer` or a :class:`SupervisedTrainer`
    total_steps: int
    tokenizer_path: str
    dtype: torch.dtype  # dtype in which models are written for use; checkpoints keep the dtype they are trained in
    started: float  # start of :attr:`Summary.seconds`, on the monotonic clock
    step: int = field(init=False)  # steps done. In RL, this is also the policy version.
    under_way: int | None = field(init=False, default=None)  # step in training, for which a stop waits; else None
    evaluations: dict[int, E] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.step = self._saved_step = self.start.step
        self._saved_at: float | None = None
        self._saved_clock = time.monotonic()
        self._longest_step_s = 0.0
        self._skipped_updates = 0.0
        self._save_wait_s: float | None = None  # seconds that training waited for the last save; None once recorded

    def run(self) -> Summary[E]:
        """Resume, train up to ``total_steps``, and save the model; raises Stopped or TrainingError."""
        if self.start.checkpoint is not None:
            logger.info("resuming after step %d of %d from %s", self.step, self.total_steps, self.start.checkpoint)
            self.resume_from(self.start.checkpoint)
        with finishing(self.work_left):
            try:
                if self.start.evaluates:
                    self.evaluate_if_due()
                logger.info("training step %d of %d", min(self.step + 1, self.total_steps), self.total_steps)
                self.fit()
                self.warn_of_skipped_updates()
                model_dir = self.save_model() if self.config.save_model else None
                stop_together()
            except Stopped:
                self.save_stopped()
                raise
            except TrainingError as error:
                self.files.checkpoints.wait()
                error.add_note(resume_hint(self.files.run_dir))
                raise
        return Summary(
            run_dir=self.files.run_dir,
            steps=self.total_steps - self.start.step,
            seconds=time.monotonic() - self.started,
            before=self.evaluations.get(0),
            after=next(reversed(self.evaluations.values()), None),
            model_dir=model_dir,
        )

    @abstractmethod
    def fit(self) -> None:
        """Train up to ``total_steps``."""

    @abstractmethod
    def evaluate(self) -> None:
        """Evaluate on the held-out rows, if there are any, and keep the result."""

    @abstractmethod
    def data_state(self) -> dict[str, bytes]:
        """Return the checkpoint files that hold the position in the data; called on the first rank."""

    def resume_from(self, checkpoint: Path) -> None:
        restore(self.trainer, checkpoint)

    def record_step(self, metrics: dict[str, float], *, began: float) -> None:
        """Record the metrics of a step that began at that moment of the monotonic clock."""
        self._longest_step_s = max(self._longest_step_s, time.monotonic() - began)
        self._skipped_updates += metrics.get("train/skipped_updates", 0.0)
        metrics.update(with_prefix("perf", memory_metrics()))
        if self._save_wait_s is not None:
            metrics["checkpoint/wait_s"], self._save_wait_s = self._save_wait_s, None
        self.files.record(self.step, metrics)

    def warn_of_skipped_updates(self) -> None:
        updates = (self.step - self.start.step) * getattr(self.config.trainer, "minibatches_per_step", 1)
        if 2 * self._skipped_updates > updates and self.files.metrics is not None:
            logger.warning(
                "%d of %d updates were skipped because loss or gradient was not finite, so the model hardly learned: "
                "lower trainer.learning_rate (%g). skipped_updates.jsonl lists them",
                self._skipped_updates,
                updates,
                self.config.trainer.learning_rate,
            )

    def record_evaluation(self, result: E, metrics: dict[str, float]) -> None:
        self.evaluations[self.step] = result
        self.files.record(self.step, metrics)

    def save_if_due(self) -> None:
        """Save a checkpoint if this step is due for one, the last save is long ago, or the machine expires soon."""
        self.under_way = None
        config = self.config.checkpoint
        self.files.checkpoints.check()  # a failed write ends the run now, not at the next save
        if config.enabled and (self.is_due(config.every_steps or self.total_steps) or self.save_is_urgent()):
            self.save()

    def evaluate_if_due(self) -> None:
        """Evaluate if this step is due for it; the last step always is."""
        if self.is_due(self.config.evaluation.every_steps or self.total_steps):
            self.evaluate()

    def is_due(self, every_steps: int) -> bool:
        """Return whether this step is a multiple of ``every_steps``, or the last."""
        return self.step == self.total_steps or self.step % every_steps == 0

    def save_is_urgent(self) -> bool:
        """Return whether ``every_minutes`` have passed, or the machine may expire before another step ends."""
        minutes = self.config.checkpoint.every_minutes
        long_ago = minutes is not None and time.monotonic() - self._saved_clock >= 60 * minutes
        urgent = long_ago or expires_soon(
            os.environ,
            time.time(),
            margin_s=self.config.checkpoint.expiry_margin_s,
            longest_step_s=self._longest_step_s,
            saved_at=self._saved_at,
        )
        return bool(broadcast_json(urgent))  # clocks of ranks differ

    def save(self) -> None:
        """Start writing a checkpoint of this step, unless it has one."""
        if self._saved_step == self.step:
            return
        began = time.monotonic()
        self.files.checkpoints.wait()  # frees the memory of the previous snapshot
        files: dict[str, bytes] = {}
        if Ranks.current().rank == 0:
            tokenizer = {f"policy/model/{name}": file for name, file in tokenizer_files(self.tokenizer_path).items()}
            files = {**tokenizer, CONFIG_FILE: dump_config(self.config).encode(), **self.data_state()}
        self.files.checkpoints.save(self.step, snapshot(self.trainer), files)
        self._saved_step, self._saved_at, self._saved_clock = self.step, time.time(), time.monotonic()
        self._save_wait_s = self._saved_clock - began

    def work_left(self) -> Sequence[str]:
        """Return what a stop waits for, in words."""
        step = [] if self.under_way is None else [f"step {self.under_way}"]
        saves = self.config.checkpoint.enabled and (step or self.step > self.start.step)
        return [*step, "a checkpoint"] if saves else step

    def save_stopped(self) -> None:
        """Save the last whole step, if the run makes checkpoints, and wait until it is written."""
        if self.config.checkpoint.enabled:
            self.save()
        self.files.checkpoints.wait()
        broadcast_json()  # when one rank exits, the launcher ends the others, and the first may be writing

    def save_model(self) -> Path:
        logger.info("saving the model")
        tokenizer = load_tokenizer(self.tokenizer_path)
        return save_model(self.trainer.model, tokenizer, self.files.run_dir / "model", dtype=self.dtype)


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
