"""Importing the package is cheap and changes nothing."""

import math
import subprocess
import sys

BASELINE = "import aiohttp, pydantic, orjson, yaml"
PROBE = r"""
import asyncio, os, re, sys, time
before, policy = dict(os.environ), asyncio.get_event_loop_policy()
start = time.process_time()  # of the CPU: other tests run beside this one
{statement}
seconds = time.process_time() - start
assert dict(os.environ) == before, "os.environ changed"
assert asyncio.get_event_loop_policy() is policy, "event loop policy changed"
heavy = sorted({{"torch", "transformers", "numpy", "openai"}} & set(sys.modules))
# Not ru_maxrss, which begins with what the parent had.
peak = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024
print(seconds, peak, *heavy)
"""


def probe(statement):
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, mebibytes, *heavy = done.stdout.split()
    return float(seconds), float(mebibytes), heavy


def test_import_is_cheap_loads_no_torch_and_changes_neither_environment_nor_loop_policy():
    statements = ["import areal_lite; from areal_lite.api import *", BASELINE]
    probe(statements[0])
    runs: list[list[tuple[float, float, list[str]]]] = []
    ours, baseline = math.inf, math.inf
    while len(runs) < 3 or (ours > 1.5 * baseline and len(runs) < 40):  # a busy machine only adds to the least of each
        runs.append([probe(statement) for statement in statements])  # in turn: load falls on both
        ours, baseline = (min(run[i][0] for run in runs) for i in (0, 1))
    assert runs[0][0][2] == []
    assert ours <= 1.5 * baseline, f"import takes {ours:.3f} s, the baseline {baseline:.3f} s"
    assert max(run[0][1] for run in runs) <= 60
