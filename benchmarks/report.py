"""What all benchmarks share: the options ``--smoke`` and ``--json``, and the file that ``--json`` names.

The file holds the figures of one run beside its machine, commit and command. ``make bench`` makes its table from these
files, and the tests read them at the smallest size. Figures are finite and above 0.
"""

from __future__ import annotations
import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOAD = os.getloadavg()[0]
"""Load of the machine before the benchmark."""


@dataclass(frozen=True)
class Figure:
    """One measured value."""

    figure: str
    value: float
    unit: str
    ratio: float | None = None
    """The value over that of the reference in the same run."""
    limit: float | None = None
    """The best value that this machine allows, in the same unit."""


def of_limit(figure: Figure) -> str:
    """Return how much of the limit is reached, as ``0.25 of the limit 400``; empty without a limit."""
    if figure.limit is None:
        return ""
    is_rate = figure.unit.endswith("/s")
    share = figure.value / figure.limit if is_rate else figure.limit / figure.value
    return f"{share:.2f} of the limit {_number(figure.limit)}"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a size that ends in seconds; its figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def write_figures(path: Path | None, figures: Iterable[Figure]) -> None:
    """Write the figures to ``path`` unless it is None."""
    if path is None:
        return
    report = {
        "benchmark": Path(sys.argv[0]).stem,
        "command": shlex.join(sys.argv),
        "commit": _commit(),
        "machine": {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "load": LOAD},
        "figures": [asdict(figure) for figure in figures],
    }
    path.write_text(json.dumps(report, indent=1, allow_nan=False))


def table(reports: Iterable[dict[str, Any]]) -> str:
    """Return the figures of all reports as one Markdown table."""
    lines = ["| benchmark | figure | value | ratio | limit | machine | commit |", "|---|---|---|---|---|---|---|"]
    for report in reports:
        machine = "{cpu}, {cores} cores, load {load:.1f}".format(**report["machine"])
        for figure in (Figure(**values) for values in report["figures"]):
            ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
            value = f"{_number(figure.value)} {figure.unit}"
            cells = (report["benchmark"], figure.figure, value, ratio, of_limit(figure), machine, report["commit"])
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
