"""How well ``areal-lite plan`` predicts: ten runs of a tiny model, each planned and then made.

    python benchmarks/plan.py [--steps 60] [--configs NAME ...] [--json FILE]

The runs differ in kind: on-policy and asynchronous, PPO with a critic, LoRA, evaluations, checkpoints, dumps, group
sizes, weights as files, a filter that rejects groups. Plan and run are processes of their own. A figure is good within
20 % of the run's; a share of tokens or groups, within 5 points; mean staleness is only shown. Times below 0.1 s and
sizes below 10 kB are not compared. Times need a machine without other work. ``--smoke`` plans and makes one short run
in this process and judges nothing. docs/benchmarks.md has figures.
"""

from __future__ import annotations
import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml
from benchmarks.report import Figure, make_parser, write_figures
from tests.fixtures.tiny_model import build_tiny_model

BASE: dict[str, Any] = {
    "experiment_name": "plan",
    "workflow": "tests.e2e.agents.LetterAgent",
    "train_dataset": {"path": "tests.e2e.agents.rows", "kwargs": {"size": 256}},
    "eval_dataset": {"path": "tests.e2e.agents.rows", "kwargs": {"size": 32}},
    "rollout": {
        "group_size": 4,
        "consumer_batch_size": 8,
        "gconfig": {"max_new_tokens": 32},
        "eval_gconfig": {"max_new_tokens": 32, "greedy": True},
    },
    "server": {"dtype": "float32", "num_threads": 1, "device": "cpu"},
    "trainer": {"learning_rate": 1e-5, "dtype": "float32", "num_threads": 1, "device": "cpu"},
}
ASYNC = ["rollout.max_head_offpolicyness=2", "rollout.dump_to_file=true"]
CONFIGS: dict[str, list[str]] = {
    "on-policy": [],
    "dumps": ["rollout.dump_to_file=true", "dump_scores=true", "dump_training=true", "save_model=false"],
    "async": [*ASYNC, "eval_dataset=null"],
    "async redraw": [*ASYNC, "rollout.stale_groups=redraw", "evaluation.every_steps=20"],
    "ppo": ["trainer.advantage=gae", "trainer.critic.learning_rate=1e-5", "trainer.minibatches_per_step=2"],
    "lora": ["trainer.lora.rank=8", "trainer.kl.coef=0.01", "rollout.weight_update=adapter"],
    "evaluations": ["evaluation.every_steps=5", "evaluation.group_size=2"],
    "checkpoints": ["checkpoint.every_steps=5", "checkpoint.keep=3", "eval_dataset=null"],
    "large groups": ["rollout.group_size=16", "rollout.consumer_batch_size=4", "rollout.weight_update=disk"],
    "filter": [
        "should_accept_fn=areal_lite.data.source.dynamic_filters.nonzero_reward_std",
        "rollout.group_size=2",
        "rollout.over_sampling_groups=4",
        "checkpoint.every_minutes=null",
    ],
}
GOOD, GOOD_SHARE = 0.2, 0.05
LEAST = {"seconds": 0.1, "tokens": 1.0, "memory_bytes": 1e4, "disk_bytes": 1e4}
"""Smaller figures are not compared."""
COMPARED = ("total", "steps", "step", "evaluations", "checkpoints", "sampled", "trained", "trainer", "servers", "dumps")


def figures_here(mode: str, config: str, *overrides: str) -> dict[str, Any]:
    """Plan or make a run in this process; return its figures."""
    from areal_lite.config.loader import load_config
    from areal_lite.tools.plan.plan import plan, predict
    from areal_lite.tools.plan.probe import Measurements, measure

    loaded = load_config(config, overrides)
    if mode == "plan":
        made = plan(loaded)
    else:
        measured = Measurements(warm_up_steps=1 + loaded.rollout.max_head_offpolicyness)
        measure(loaded, measured)
        made = predict(loaded, measured)
    return made._asdict()


def figures_of(mode: str, *arguments: str) -> dict[str, Any]:
    """Return the figures of a plan or a run in a process of its own."""
    command = [sys.executable, __file__, "--child", mode, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{mode} {arguments}:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compared(name: str, planned: dict[str, Any], made: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure of a run."""
    for kind, least in LEAST.items():
        for figure, actual in made[kind].items():
            predicted = planned[kind][figure]
            if (figure in COMPARED or kind == "disk_bytes") and max(actual, predicted) >= least:
                good = abs(predicted - actual) <= GOOD * actual
                yield {
                    "config": name,
                    "figure": f"{kind} {figure}",
                    "predicted": predicted,
                    "actual": actual,
                    "good": good,
                }
    for figure, actual in made["staleness"].items():
        predicted = planned["staleness"][figure]
        good = figure == "mean" or abs(predicted - actual) <= GOOD_SHARE  # the mean follows the lead, which adapts
        yield {"config": name, "figure": f"staleness {figure}", "predicted": predicted, "actual": actual, "good": good}


def main() -> int:
    """Plan and make the runs, print, and return 1 if a figure is further off."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--configs", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(figures_here(*args.child)))
        return 0
    if args.smoke:
        args.steps, args.configs = 5, ["checkpoints"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = BASE | {
            "fileroot": f"{folder}/runs",
            "model_path": str(build_tiny_model(Path(folder, "model"), hidden_size=64)),
            "trainer": BASE["trainer"] | {"total_steps": args.steps},
        }
        config = Path(folder, "run.yaml")
        config.write_text(yaml.safe_dump(base))
        for number, name in enumerate(args.configs):
            overrides = [str(config), f"trial_name=trial{number}", *CONFIGS[name]]
            measure = figures_here if args.smoke else figures_of
            planned, made = (measure(mode, *overrides) for mode in ("plan", "run"))
            for row in compared(name, planned, made):
                print(
                    f"{name:13} {row['figure']:28} {row['predicted']:14,.3f} {row['actual']:14,.3f} "
                    f"{row['predicted'] / row['actual'] if row['actual'] else 1:6.2f}{'' if row['good'] else '  off'}",
                    flush=True,
                )
                rows.append(row)
    good = sum(row["good"] for row in rows)
    print(f"{good} of {len(rows)} figures of {len(args.configs)} runs are good")
    figures = [
        Figure(f"{row['config']}: {row['figure']}", row["predicted"], "", ratio=row["predicted"] / row["actual"])
        for row in rows
        if row["predicted"] > 0 and row["actual"] > 0
    ]
    write_figures(args.json, figures)
    return 0 if args.smoke or good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
