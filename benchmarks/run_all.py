"""All benchmarks, each in a process of its own, and one table of their figures.

    python benchmarks/run_all.py [--smoke] [--folder runs/benchmarks] [--vllm-python PYTHON] [--trl-python PYTHON]

Writes NAME.json of each and table.md to the folder. A benchmark that fails does not stop the others.
"""

from __future__ import annotations
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.report import ROOT, table

MODEL = "runs/models/SmolLM2-135M-Instruct"
SCRIPTS: dict[str, list[str]] = {
    "roofline": [],
    "engine_throughput": ["--in-flight", "256", "2048", "8192"],
    "rollout_workers": [],
    "agent_call": [],
    "agent_streams": [],
    "routing": [],
    "async_overlap": [],
    "data_source": [],
    "dump_index": [],
    "embedded_throughput": ["--model", MODEL],
    "weight_update": ["--model", MODEL, "--servers", "embedded"],
    "train_step": ["--model", MODEL],
    "step_profile": ["--model", MODEL],
    "packing": [],
    "branches": [],
    "packing_plans": [],
    "logits_memory": [],
    "advantages": [],
    "grpo_step": ["--model", MODEL],
    "long_prompts": ["--model", MODEL],
    "leaderboard": [],
    "plan": [],
    "chaos": [],
    "growth": [],
}
"""Benchmarks with their options; the slowest are last."""
ALL_CORES = ("roofline", "embedded_throughput", "train_step", "step_profile", "grpo_step", "leaderboard")
"""The others compute in one thread."""


def main() -> None:
    """Run all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="the smallest size of each")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmarks")
    parser.add_argument("--vllm-python", help="passed on to embedded_throughput.py")
    parser.add_argument("--trl-python", help="passed on to grpo_step.py")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    peers = {
        "embedded_throughput": ["--vllm-python", args.vllm_python] if args.vllm_python else [],
        "grpo_step": ["--trl-python", args.trl_python] if args.trl_python else [],
    }
    reports, failed = [], []
    for name, options in SCRIPTS.items():
        path = (args.folder / f"{name}.json").absolute()
        path.unlink(missing_ok=True)
        command = [sys.executable, f"benchmarks/{name}.py", *options, *peers.get(name, []), "--json", str(path)]
        environment = os.environ if name in ALL_CORES else os.environ | {"OMP_NUM_THREADS": "1"}
        print(f"\n== {name}", flush=True)
        done = subprocess.run([*command, *["--smoke"] * args.smoke], cwd=ROOT, env=environment)
        if done.returncode:
            failed.append(name)
        if path.exists():
            reports.append(json.loads(path.read_text()))
    text = table(reports)
    (args.folder / "table.md").write_text(text + "\n")
    print(f"\n{text}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
