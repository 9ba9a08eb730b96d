"""A run that measures itself, and may end early: seconds, tokens, memory and disk by step.

The measured run is the real one: servers, episodes, updates, evaluations, checkpoints. :mod:`.plan` makes predictions.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
import torch
from areal_lite.config.run_config import RunConfig
from areal_lite.config.supervised_config import DPOConfig, RewardModelConfig, SFTConfig
from areal_lite.models.parallel.ranks import broadcast_json, gather_json, join_ranks
from areal_lite.models.policy_model import resolve_device
from areal_lite.processes.quick_import import is_first_rank
from areal_lite.runs.entry_points import check_trainable
from areal_lite.runs.rl_run import RLRun, run_rl
from areal_lite.runs.supervised_run import SupervisedRun, run_supervised
from areal_lite.runs.training_run import Summary, TrainingRun
from areal_lite.trainer.metrics import OnStep
from areal_lite.trainer.rl.policy_step import Batch

Trainable = RunConfig | SFTConfig | DPOConfig | RewardModelConfig
DUMPS = ("rollout", "scores", "training")
"""Folders of a run that grow with each step."""
LARGEST_RANK = "largest rank"
_GROUP_ENDS = ("accepted", "rejected", "failed", "cancelled")


@dataclass(kw_only=True)
class Measurements:
    """Measurements of a run. Lists by step hold totals since the start of the run."""

    warm_up_steps: int = 0
    """First steps, which cost more."""
    min_steady_s: float = 0.0
    max_steps: int | None = None
    """The run ends after this many steps, or when it has enough steady steps and seconds. None: at its own end."""
    total_steps: int = 0
    wall_s: float = 0.0
    """From before the servers start until after they stopped."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step, without evaluations and checkpoints."""
    totals: list[dict[str, float]] = field(default_factory=list)
    """Tokens, groups and bytes of growing files, per step."""
    staleness: list[float] = field(default_factory=list)
    """Mean staleness of each batch, in policy versions."""
    lead_groups: list[float] = field(default_factory=list)
    """Groups that generation was allowed ahead, per step."""
    lead_after: float = 0.0
    """Mean of that to expect of the steps after the probe."""
    evaluation_s: list[float] = field(default_factory=list)
    evaluation_tokens: list[float] = field(default_factory=list)
    evaluated_at_start: bool = False
    checkpoints: int = 0
    checkpoint_s: float = 0.0
    """Seconds that the last checkpoint held training back."""
    write_s: float = 0.0
    """Seconds in which it was written in the background."""
    memory: dict[str, float] = field(default_factory=dict)
    """Peak bytes of the trainer's process, its child processes, all GPUs, and of several ranks the largest."""
    disk: dict[str, float] = field(default_factory=dict)
    """Bytes at the end, by folder of the run."""
    tokens: float = 0.0
    """Tokens sampled for the batches and evaluations so far."""

    @property
    def is_enough(self) -> bool:
        steady = self.step_s[self.warm_up_steps :]
        if self.max_steps is None:
            return False
        return (len(steady) >= 2 and sum(steady) >= self.min_steady_s) or len(self.step_s) >= self.max_steps


@dataclass(kw_only=True)
class _Probe(TrainingRun[Any]):
    """Measures a run as it goes."""

    measured: Measurements

    def __post_init__(self) -> None:
        super().__post_init__()
        self.measured.total_steps = self.total_steps

    def run(self) -> Summary[Any]:
        summary = super().run()
        if len(peaks := gather_json(_peak_rss("self"))) > 1:
            self.measured.memory[LARGEST_RANK] = max(peaks)
        return summary

    def tokens(self) -> float:
        return 0.0

    def flush_files(self) -> None:
        """Wait for the files of the step."""

    def record_step(self, metrics: dict[str, float], *, began: float) -> None:
        super().record_step(metrics, began=began)
        measured, folder = self.measured, self.files.run_dir
        measured.step_s.append(time.monotonic() - began)
        self.flush_files()
        before = measured.totals[-1]["trained"] if measured.totals else 0.0
        measured.totals.append(
            {
                "sampled": measured.tokens,
                "trained": before + metrics.get("train/trained_tokens", 0.0),
                "discarded": metrics.get("rollout/discarded_tokens", 0.0),
                "redrawn": sum(metrics.get(f"episodes/{end}", 0.0) for end in _GROUP_ENDS[1:3]),
                "groups": sum(metrics.get(f"episodes/{end}", 0.0) for end in _GROUP_ENDS),
                "dumps": sum(_size(folder / name) for name in DUMPS),
                "logs": sum(_size(folder / name) for name in ("metrics.jsonl", "skipped_updates.jsonl")),
            }
        )
        measured.staleness.append(metrics.get("train/staleness_mean", 0.0))
        measured.lead_groups.append(metrics.get("rollout/lead_groups", 0.0))
        if measured.is_enough:
            self.total_steps = self.step

    def save_if_due(self) -> None:
        self.total_steps = broadcast_json(self.total_steps)  # the first rank says where all end
        super().save_if_due()

    def evaluate(self) -> None:
        began, tokens, count = time.monotonic(), self.tokens(), len(self.evaluations)
        super().evaluate()  # type: ignore[safe-super]
        if len(self.evaluations) > count:
            self.measured.evaluation_s.append(time.monotonic() - began)
            self.measured.evaluation_tokens.append(self.tokens() - tokens)
            self.measured.tokens += self.measured.evaluation_tokens[-1]
            self.measured.evaluated_at_start |= self.step == 0

    def save(self) -> None:
        began = time.monotonic()
        super().save()
        self.measured.checkpoints += 1
        self.measured.checkpoint_s = time.monotonic() - began
        if self.step == self.total_steps:
            self.files.checkpoints.wait()
            self.measured.write_s = time.monotonic() - began - self.measured.checkpoint_s


@dataclass(kw_only=True)
class _RLProbe(_Probe, RLRun):
    config: RunConfig

    def tokens(self) -> float:
        metrics = self.driver.engine.server_metrics() if self.driver is not None else {}
        return sum(value for name, value in metrics.items() if name.endswith("/tokens"))

    def flush_files(self) -> None:
        if self.driver is not None:
            self.driver.engine.flush_dumps()

    def generate(self) -> Batch:
        """Return the next batch; count tokens before the weights are published, when the batch after it starts."""
        batch = super().generate()
        self.measured.tokens = self.tokens()
        return batch

    def record_step(self, metrics: dict[str, float], *, began: float) -> None:
        """Record a step; after the last one, stop the episodes of the next batch, as a whole run does."""
        super().record_step(metrics, began=began)
        if self.step == self.total_steps and self.driver is not None:
            left = self.measured.total_steps - self.step
            self.measured.lead_after = self.driver.engine.forecast_lead(left) if left else 0.0
            self.driver.engine.close_source(self.driver.data.source)


@dataclass(kw_only=True)
class _SupervisedProbe(_Probe, SupervisedRun):
    pass


def measure(config: Trainable, measured: Measurements, on_step: OnStep | None = None) -> None:
    """Run ``config`` and write down what it took; errors are those of the run."""
    began = time.monotonic()
    with _peak_memory(measured.memory):
        if isinstance(config, RunConfig):
            check_trainable(config)
            trainer = config.trainer
            with join_ranks(resolve_device(trainer.device), sp_size=trainer.sp_size, tp_size=trainer.tp_size):
                run_rl(config, on_step, make_run=partial(_RLProbe, measured=measured))
        else:
            run_supervised(config, on_step=on_step, make_run=partial(_SupervisedProbe, measured=measured))
    measured.wall_s = time.monotonic() - began
    if is_first_rank():
        measured.disk = {path.name: _size(path) for path in config.run_dir.iterdir()}


def _size(path: Path) -> float:
    """Return the bytes of a file or of all files in a folder; 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return float(sum(file.stat().st_size for file in files if file.is_file()))


@contextmanager
def _peak_memory(peak: dict[str, float]) -> Iterator[None]:
    """Keep the peak memory of this process, its descendants together and all GPUs in ``peak``, in bytes."""
    ended, seen = threading.Event(), set[str]()

    def sample() -> None:
        own, *others = _family()
        peak["trainer"] = _peak_rss(own)
        # A process that has just been forked still shows the memory of its parent.
        peak["servers"] = max(peak.get("servers", 0.0), sum(_peak_rss(other) for other in others if other in seen))
        seen.update(others)
        if torch.cuda.is_available():
            gpus = [torch.cuda.mem_get_info(gpu) for gpu in range(torch.cuda.device_count())]
            peak["gpus"] = max(peak.get("gpus", 0.0), float(sum(total - free for free, total in gpus)))

    def watch() -> None:
        while not ended.wait(0.5):  # the kernel keeps the peak of each process
            sample()

    thread = threading.Thread(target=watch, name="areal-lite-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sample()


def _family() -> list[str]:
    family = [str(os.getpid())]
    for member in family:
        for children in Path(f"/proc/{member}/task").glob("*/children"):
            with suppress(OSError):  # the process has ended
                family += children.read_text().split()
    return family


def _peak_rss(process: str) -> float:
    """Return the largest resident size of a process so far, in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0.0)
