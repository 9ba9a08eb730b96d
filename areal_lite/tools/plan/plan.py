"""areal-lite plan: predict what a run takes, from a few steps of the real run in a temporary folder.

A prediction is what the probe took, plus the steps, evaluations and checkpoints that it left out, at the cost of those
measured after its warm-up. Start-up counts once. :data:`UNKNOWN` lists what a short probe cannot see.
"""

import itertools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4
from rich.filesize import decimal
from rich.table import Table
from areal_lite.config.run_config import CheckpointConfig, RunConfig
from areal_lite.errors import ConfigError
from areal_lite.processes.quick_import import is_first_rank, is_rank
from areal_lite.runs.run_data import workflow_rows
from areal_lite.tools.plan.probe import DUMPS, LARGEST_RANK, Measurements, Trainable, measure
from areal_lite.trainer.metrics import OnStep

UNKNOWN = (
    "answers that get longer or shorter while the model learns",
    "other work on the machine, now or during the run",
)
UNKNOWN_RANKS = "what several ranks change: torchrun --nproc-per-node N -m areal_lite plan probes them"
UNKNOWN_ASYNC = "how much longer or shorter steps become as the lead of generation over training adapts"
MAX_HELD_OUT = 256
"""Most held-out rows that the probe evaluates on; the time for all rows is scaled up."""
_STEADY_S = 5.0
_MAX_STEADY_STEPS = 40
"""Short steps vary, so the probe measures more of them: this many seconds, or this many steps."""
_NAMED = {*DUMPS, "eval-rollout", "checkpoints", "model", "weights"}


class Plan(NamedTuple):
    """Predicted figures of a run."""

    steps: int
    probed_steps: int
    probe_s: float
    seconds: dict[str, float]
    """``total`` and its parts; ``step``, ``evaluation`` and ``checkpoint`` are those of one."""
    tokens: dict[str, float]
    """``sampled``, evaluations included, and ``trained``."""
    memory_bytes: dict[str, float]
    """Peaks: ``trainer`` is this process, ``servers`` are its child processes together, ``gpus`` are all GPUs, and
    under torchrun ``largest rank`` is that of most memory."""
    disk_bytes: dict[str, float]
    """Bytes in the run's folder at its end, in all and by kind."""
    nodes: dict[str, float]
    """With ``launch: ray``: ``programs`` of the run, their ``CPUs`` and ``GPUs``, and the fewest ``nodes`` for them."""
    staleness: dict[str, float]
    """Mean in policy versions; shares of the sampled tokens that grew too old, and of the groups drawn again."""
    unknown: list[str]


def plan(config: Trainable, *, on_step: OnStep | None = None) -> Plan | None:
    """Probe a run and predict the whole of it. Under torchrun all ranks call it, and the first one has the plan."""
    root = Path(config.fileroot).expanduser().absolute()
    while not root.exists():
        root = root.parent
    warm_up = 1 + (config.rollout.max_head_offpolicyness if isinstance(config, RunConfig) else 0)
    measured = Measurements(warm_up_steps=warm_up, min_steady_s=_STEADY_S, max_steps=warm_up + _MAX_STEADY_STEPS)
    with _probe_folder(root) as folder:
        measure(_probe_config(config, folder), measured, on_step)
    if not is_first_rank():
        return None
    held_out_scale = 1.0
    if isinstance(config, RunConfig) and config.eval_dataset is not None:
        held_out_scale = max(1.0, len(workflow_rows(config, config.eval_dataset, is_train=False)) / MAX_HELD_OUT)
    return predict(config, measured, held_out_scale=held_out_scale)


@contextmanager
def _probe_folder(root: Path) -> Iterator[str]:
    """Yield the probe's temporary folder, one for all ranks; the first one makes and removes it."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("MASTER_PORT")
    folder = root / f"areal-lite-plan-{'-'.join(filter(None, launch)) or uuid4().hex}"
    if not is_first_rank():
        yield str(folder)
        return
    if folder.exists():
        raise ConfigError(f"{folder} exists: another plan uses it, or one was killed; then remove it")
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _probe_config(config: Trainable, folder: str) -> Trainable:
    """Return the config of the same run in ``folder``, which evaluates and saves only where it begins and ends."""
    changes: dict[str, Any] = {
        "fileroot": folder,
        "checkpoint": CheckpointConfig(every_minutes=1e9 if config.checkpoint.enabled else None, resume="never"),
        "tracking": [],
        "evaluation": replace(config.evaluation, every_steps=None),
    }
    if not is_rank():
        changes["trainer"] = replace(config.trainer, sp_size=1, tp_size=1)
    if isinstance(config, RunConfig):
        changes |= {"rollout": replace(config.rollout, fileroot=folder), "rollout_cache": None}
        changes |= {"profile_steps": [], "memory_snapshot_steps": []}
        if (rows := config.eval_dataset) is not None:
            changes["eval_dataset"] = replace(rows, max_samples=min(rows.max_samples or MAX_HELD_OUT, MAX_HELD_OUT))
    return replace(config, **changes)


def predict(config: Trainable, measured: Measurements, *, held_out_scale: float = 1.0) -> Plan:
    """Return the prediction for ``config`` from measurements of its first steps, or the figures of a whole run."""
    together = config.trainer.sp_size * config.trainer.tp_size
    is_async = isinstance(config, RunConfig) and config.rollout.max_head_offpolicyness > 0
    probed, total = len(measured.step_s), measured.total_steps
    left, done = total - probed, len(measured.evaluation_s)
    step_s = _per_step(measured, list(itertools.accumulate(measured.step_s)))
    evaluations = measured.evaluated_at_start + -(-total // (config.evaluation.every_steps or total)) if done else 0
    evaluated_s, evaluated_tokens = (measured.evaluation_s or [0.0])[-1], (measured.evaluation_tokens or [0.0])[-1]
    evaluations_left = evaluations * held_out_scale - done  # in units of the probe's
    checkpoints = _checkpoints(config, total, step_s) if measured.checkpoints else 0
    checkpoint_s = measured.checkpoint_s + max(0.0, measured.write_s - total / max(1, checkpoints) * step_s)
    total_s = measured.wall_s + left * step_s + evaluations_left * evaluated_s
    total_s += max(0, checkpoints - measured.checkpoints) * checkpoint_s
    steady = {name: _per_step(measured, [totals[name] for totals in measured.totals]) for name in measured.totals[0]}
    growth = {name: left * each for name, each in steady.items()}
    lead = [*itertools.accumulate(measured.lead_groups)]
    behind = _per_step(measured, [*itertools.accumulate(measured.staleness)]) / max(1.0, _per_step(measured, lead))
    staleness = {
        "mean": (sum(measured.staleness) + left * behind * measured.lead_after) / total,
        "discarded tokens": steady["discarded"] / max(1.0, steady["sampled"]),
        "redrawn groups": steady["redrawn"] / max(1.0, steady["groups"]),
    }
    parts = {
        "steps": total * step_s,
        "evaluations": evaluations * held_out_scale * evaluated_s,
        "checkpoints": checkpoints * checkpoint_s,
    }
    return Plan(
        steps=total,
        probed_steps=probed,
        probe_s=measured.wall_s,
        seconds={
            "total": total_s,
            "start and end": total_s - sum(parts.values()),
            **parts,
            "step": step_s,
            "evaluation": held_out_scale * evaluated_s,
            "checkpoint": checkpoint_s,
        },
        tokens={
            "sampled": measured.tokens + growth["sampled"] + evaluations_left * evaluated_tokens,
            "trained": measured.totals[-1]["trained"] + growth["trained"],
        },
        memory_bytes=measured.memory,
        disk_bytes=_disk(config, measured, growth, evaluations * held_out_scale / max(1, done), checkpoints),
        nodes=_nodes(config) if config.launch == "ray" else {},
        staleness=staleness if is_async else {},
        unknown=[
            *UNKNOWN,
            *([UNKNOWN_ASYNC] if is_async else []),
            *([UNKNOWN_RANKS] if together > 1 and LARGEST_RANK not in measured.memory else []),
        ],
    )


def _per_step(measured: Measurements, totals: Sequence[float]) -> float:
    warm_up = min(measured.warm_up_steps, len(totals) - 1)
    return (totals[-1] - (totals[warm_up - 1] if warm_up else 0.0)) / (len(totals) - warm_up)


def _checkpoints(config: Trainable, steps: int, step_s: float) -> int:
    """Return how many checkpoints a run writes; its last step always has one."""
    minutes = config.checkpoint.every_minutes
    by_time = 0 if minutes is None else int(steps * step_s / (60 * minutes))
    return min(steps, max(-(-steps // (config.checkpoint.every_steps or steps)), by_time + 1))


def _disk(
    config: Trainable, measured: Measurements, growth: Mapping[str, float], evaluations: float, checkpoints: int
) -> dict[str, float]:
    size, keep = Counter(measured.disk), config.checkpoint.keep
    disk = {
        "dumps": sum(size[name] for name in DUMPS) + growth["dumps"] + evaluations * size["eval-rollout"],
        "checkpoints": size["checkpoints"] / max(1, min(keep, measured.checkpoints)) * min(keep, checkpoints),
        "model": size["model"],
        "weights": size["weights"],
        "other": growth["logs"] + sum(bytes for name, bytes in size.items() if name not in _NAMED),
    }
    return {"total": sum(disk.values()), **disk}


def _nodes(config: Trainable) -> dict[str, float]:
    from areal_lite.cluster.ray_places import bundles_of, rank_bundles

    bundles, cluster = [*rank_bundles(config), *bundles_of(config)], config.cluster
    gpus = sum(bundle.gpus for bundle in bundles)
    nodes = max(cluster.n_nodes, -(-gpus // max(1, cluster.n_gpus_per_node)))
    return {"programs": len(bundles), "CPUs": sum(bundle.cpus for bundle in bundles), "GPUs": gpus, "nodes": nodes}


def plan_table(plan: Plan) -> Table:
    seconds, probed = plan.seconds, plan.probed_steps
    table = Table("", "predicted", title=f"{plan.steps} steps, from {probed} steps in {plan.probe_s:.0f} s")
    for name in ("total", "start and end", "steps", "evaluations", "checkpoints"):
        each = f"  ({_duration(seconds[name[:-1]])} each)" if name[:-1] in seconds and seconds[name] else ""
        table.add_row(f"time: {name}", _duration(seconds[name]) + each)
    for name, count in plan.tokens.items():
        table.add_row(f"tokens: {name}", f"{count:,.0f}")
    for title, sizes in (("peak memory", plan.memory_bytes), ("disk", plan.disk_bytes)):
        for name, size in sizes.items():
            if size:
                table.add_row(f"{title}: {name}", decimal(round(size)))
    for name, count in plan.nodes.items():
        table.add_row(f"cluster: {name}", f"{count:g}")
    for name, value in plan.staleness.items():
        table.add_row(f"staleness: {name}", f"{value:.2f} versions" if name == "mean" else f"{value:.1%}")
    return table


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.{1 if seconds >= 1 else 2}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
