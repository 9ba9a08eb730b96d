"""Findings of ``areal-lite doctor``, and its checks of the machine: packages, devices, memory, disk."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple
from areal_lite import __version__
from areal_lite.errors import ConfigError

PACKAGE = "areal-lite"
_LOW_DISK = 5e9
"""Bytes; torch, a small model and its checkpoints take about this."""


class Finding(NamedTuple):
    level: Literal["ok", "warning", "fix"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:<9}" + self.text.strip().replace("\n", "\n" + 9 * " ")


Findings = Iterator[Finding]


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warning(text: str) -> Finding:
    return Finding("warning", text)


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
    """Show torch, the CPU cores, the GPUs, and without one whether there is a C++ compiler."""
    import torch
    from areal_lite.models.kernels.compiler import find_compiler
    from areal_lite.models.policy_model import has_bfloat16

    yield ok(f"torch {torch.__version__}, {len(os.sched_getaffinity(0))} CPU cores")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            yield ok(f"GPU {index}: {torch.cuda.get_device_name(index)}, {gigabytes(free)} of {gigabytes(total)} free")
    elif Path("/proc/driver/nvidia").exists():
        yield warning(
            f"there is an NVIDIA GPU, but torch (for CUDA {torch.version.cuda}) cannot use it: install torch for the "
            "CUDA of the driver (nvidia-smi shows it); until then runs use the CPU"
        )
    else:
        yield ok("no GPU: server and trainer run on the CPU")
        if not has_bfloat16():
            yield ok("the CPU has no instructions for bfloat16: dtype auto is float32")
        elif find_compiler() is None:
            yield warning(
                "there is no C++ compiler: in bfloat16 the embedded server takes up to twice as long, and a training "
                "step a quarter longer. Install g++, or set CXX to a compiler"
            )


def machine() -> Findings:
    yield ok(f"{gigabytes(free_memory())} of memory are free")
    text = f"{gigabytes(free := shutil.disk_usage(Path.cwd()).free)} of disk are free here"
    takes = f"a small model with its checkpoints takes {gigabytes(_LOW_DISK)}"
    yield ok(text) if free > _LOW_DISK else warning(f"only {text}: {takes}; free some, or set fileroot")


def free_memory() -> float:
    """Return the bytes of memory that this process and its children can still take."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (limit := group / "memory.max").exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int((group / "memory.current").read_text()))
    return float(free)


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
