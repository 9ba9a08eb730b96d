"""areal-lite doctor: is everything there that a run needs? The checks in order, each a small function.

A check yields findings. If it raises, the error is a finding to fix: errors of areal_lite say value, rule and fix, and
the first one decides the exit code. Checks write only to a temporary folder: the run's folder does not change.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from areal_lite import __version__
from areal_lite.api.config import ExperimentConfig, RunConfig
from areal_lite.api.config_loader import load_config
from areal_lite.api.supervised_config import SupervisedConfig
from areal_lite.errors import ArealLiteError, ConfigError, RunDirBusyError

PACKAGE = "areal-lite"
_LOW_DISK = 5e9
"""Bytes; torch, a small model and its checkpoints take about this."""


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARNING = "warning"
    FIX = "fix"


class Finding(NamedTuple):
    """What a check found."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level:<9}" + self.text.strip().replace("\n", "\n" + 9 * " ")


Findings = Iterator[Finding]


def ok(text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(Level.OK, text)


def warning(text: str) -> Finding:
    """Return a finding that does not stop a run."""
    return Finding(Level.WARNING, text)


class Checkup:
    """Runs checks, shows their findings, and keeps the exit code."""

    def __init__(self, show: Callable[[Finding], None]) -> None:
        self.show = show
        self.exit_code = 0
        """That of the first failure, as in :mod:`areal_lite.errors`; 0 without failures."""
        self._failures: set[str] = set()

    def run(self, check: Findings) -> bool:
        """Show what a check finds; return whether it ended without an error."""
        try:
            for finding in check:
                self.show(finding)
        except ArealLiteError as error:
            return self._failed("\n".join([str(error), *getattr(error, "__notes__", ())]), error.exit_code)
        except (Exception, BaseExceptionGroup) as error:  # of a library, or of the user's code
            return self._failed(f"{type(error).__name__}: {error}", ArealLiteError.exit_code)
        return True

    def _failed(self, text: str, exit_code: int) -> bool:
        if text not in self._failures:  # several checks need the model
            self.show(Finding(Level.FIX, text))
            self._failures.add(text)
        self.exit_code = self.exit_code or exit_code
        return False


def doctor(config: str | None, overrides: Sequence[str], *, show: Callable[[Finding], None]) -> int:
    """Check the machine and, with a config, its run; return the exit code.

    Args:
        config: A YAML file of any kind of run; None checks the machine alone.
        overrides: ``key=value`` each.
        show: Called with each finding as soon as it is known.
    """
    checkup = Checkup(show)
    with _warnings_shown(show):
        for check in (packages, devices, machine):
            checkup.run(check())
        if config is not None:
            loaded: list[ExperimentConfig] = []
            if checkup.run(config_file(config, overrides, loaded)):
                _check_run(checkup, loaded[0])
    return checkup.exit_code


def _check_run(checkup: Checkup, config: ExperimentConfig) -> None:
    from areal_lite.launch import doctor_model as model
    from areal_lite.launch import doctor_run as run

    assert isinstance(config, RunConfig | SupervisedConfig)
    has_model = checkup.run(model.model_folder(config.model_path))
    fine = [
        has_model and checkup.run(model.tokenizer(config)),
        checkup.run(run.settings(config)),
        checkup.run(run_folder(config)),
        has_model and checkup.run(model.room(config)),
    ]
    if all(fine):
        checkup.run(run.supervised(config) if isinstance(config, SupervisedConfig) else run.rollouts(config))
    else:
        tried = "training step" if isinstance(config, SupervisedConfig) else "servers, episode and training step"
        checkup.show(warning(f"{tried} not tried: fix the above first"))


@contextmanager
def _warnings_shown(show: Callable[[Finding], None]) -> Iterator[None]:
    """Show warnings that areal_lite logs as findings, and no other log lines."""
    from areal_lite.infra import server_pool

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name != server_pool.__name__:  # the check of the servers shows their state
                show(warning(record.getMessage()))

    logger, handler = logging.getLogger("areal_lite"), Handler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


# -- the machine -------------------------------------------------------------------------------------


def packages() -> Findings:
    """Compare Python and the installed packages with what pyproject.toml asks for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    try:
        metadata = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        yield warning(f"{PACKAGE} is not installed, so versions are not checked: pip install -e .")
        return
    if not SpecifierSet(metadata["Requires-Python"]).contains(python := platform.python_version()):
        raise ConfigError(f"python is {python}, and {PACKAGE} needs {metadata['Requires-Python']}: use another python")
    yield ok(f"{PACKAGE} {__version__}, python {python} on {sys.platform}")
    faults, unfit, fine = [], [], set()
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
        name, needs = requirement.name, requirement.specifier
        optional = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if not optional:
                faults.append(f"{name} is missing (needs {needs or 'any version'})")
            continue
        if needs.contains(version, prereleases=True):
            fine.add(name)
        elif optional:
            unfit.append(f"{name} is {version}, and an extra of {PACKAGE} needs {needs}: pip install '{name}{needs}'")
        else:
            faults.append(f"{name} is {version}, and {PACKAGE} needs {needs}")
    yield from map(warning, dict.fromkeys(unfit))
    if faults:
        raise ConfigError("\n".join(faults) + f"\npip install --upgrade {PACKAGE}, or pip install -e . in a checkout")
    yield ok(f"{len(fine)} packages have the versions that {PACKAGE} needs")


def devices() -> Findings:
    """Show torch, the CPU cores and the GPUs."""
    import torch

    yield ok(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} CPU cores")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield ok(f"GPU {index}: {name}, {gigabytes(free)} of {gigabytes(total)} free")
    elif Path("/proc/driver/nvidia").exists():
        yield warning(
            f"there is an NVIDIA GPU, but torch (for CUDA {torch.version.cuda}) cannot use it: install torch for the "
            "CUDA of the driver (nvidia-smi shows it); until then runs use the CPU"
        )
    else:
        yield ok("no GPU: server and trainer run on the CPU")


def machine() -> Findings:
    """Show free memory and disk space."""
    yield ok(f"{gigabytes(free_memory())} of memory are free")
    text = f"{gigabytes(free := shutil.disk_usage(Path.cwd()).free)} of disk are free here"
    yield (
        ok(text)
        if free > _LOW_DISK
        else warning(
            f"only {text}: a small model with its checkpoints takes {gigabytes(_LOW_DISK)}; free some, or set fileroot"
        )
    )


def free_memory() -> float:
    """Return the bytes of memory that this process and its children can still take."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int((group / "memory.current").read_text()))
    return float(free)


def gigabytes(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e9:.1f} GB"


# -- the config --------------------------------------------------------------------------------------


def config_file(path: str, overrides: Sequence[str], loaded: list[ExperimentConfig]) -> Findings:
    """Load the config into ``loaded``."""
    loaded.append(load_config(path, overrides, root=ExperimentConfig))
    yield ok(f"{path}: {loaded[0].experiment_name}, kind {getattr(loaded[0], 'kind', 'reinforcement learning')}")


def run_folder(config: RunConfig | SupervisedConfig) -> Findings:
    """Check that a run can start or resume in its folder, and that no live run holds it."""
    from areal_lite.launch.resuming import find_start
    from areal_lite.launch.run_directory import check_disposable

    path = config.run_dir
    lock = path / ".lock"
    if lock.exists():
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirBusyError(
                    f"{path} is held by a run that is still alive (pid {file.read() or 'unknown'}): stop it, or choose "
                    "another trial_name"
                ) from None
    total = config.trainer.total_steps
    start = find_start(config, sys.maxsize if total is None else total)
    if start.checkpoint is not None:
        yield ok(f"{path}: training resumes after step {start.step}")
        return
    if (path / "metrics.jsonl").exists():
        check_disposable(config, path)
    yield ok(f"{path}: a new run")
