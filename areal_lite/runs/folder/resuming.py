"""The checkpoint that a run resumes from, found and checked before anything expensive starts.

A run that is killed and started again must end with the bits of one that was never killed. So the start is decided
once, here, from the disk alone, and by three rules:

- The newest checkpoint is taken or is an error. To skip a damaged one looks harmless, as the older one resumes just as
  well; but hours of training would vanish without a word, and the run would fail when it reaches the damaged step
  again, because a checkpoint never replaces another.
- A resumed run evaluates first only if metrics.jsonl lacks the evaluation of that step: the evaluation comes after the
  checkpoint, so a kill between the two loses it. Evaluating always would record it twice, never would leave a gap.
- A run is done only if its model is at least as new as its last record. The manifest alone does not show it: a run that
  was extended by raising ``total_steps`` finds the model of the shorter run.

The last rule compares the time of a file with that of a record: if the clock was set back, a model is saved twice.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from areal_lite.config.dump import dump_config
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from areal_lite.config.supervised_config import SupervisedConfig

_Config: TypeAlias = "RunConfig | SupervisedConfig"
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Starting point of a run."""

    checkpoint: Path | None = None
    step: int = 0
    evaluates: bool  # evaluate before the first step; a resumed run does only if metrics.jsonl lacks that evaluation
    is_done: bool = False  # True if nothing is left to train, evaluate or save


def find_start(config: _Config, total_steps: int) -> Start:
    """Return where the run starts, as ``checkpoint.resume`` and the run's folder say."""
    from areal_lite.trainer.checkpoint.checkpoint import check_config, checkpoint_step, find_checkpoint

    run_dir = config.run_dir
    if (checkpoint := find_checkpoint(run_dir / CHECKPOINTS, config.checkpoint.resume)) is None:
        return Start(evaluates=not isinstance(config, RunConfig) or config.evaluation.at_start)
    check_config(checkpoint, dump_config(config))
    step = checkpoint_step(checkpoint)
    if step > total_steps:
        raise ConfigError(
            f"{checkpoint} has trained {step} steps and trainer.total_steps is {total_steps}: raise it to train "
            "longer, or choose another trial_name"
        )
    is_done = step == total_steps and _is_complete(config, run_dir, step)
    return Start(checkpoint=checkpoint, step=step, evaluates=not _is_evaluated(run_dir, step), is_done=is_done)


def resume_hint(run_dir: Path) -> str:
    """Return which checkpoint a failed run can be resumed from."""
    from areal_lite.trainer.checkpoint.checkpoint import find_checkpoint

    if (last := find_checkpoint(run_dir / CHECKPOINTS, "auto")) is None:
        return "there is no checkpoint to resume from: set checkpoint.every_minutes or every_steps to make them"
    return f"the last good checkpoint is {last}"


def _is_complete(config: _Config, run_dir: Path, step: int) -> bool:
    """Return whether the last step has its evaluation and its saved model, if the run makes them."""
    if config.eval_dataset is not None and not _is_evaluated(run_dir, step):
        return False
    if not config.save_model:
        return True
    manifest = run_dir / "model" / "manifest.json"
    # A model older than this step's records was saved by a run with fewer steps.
    trained_at = max((record["time"] for record in _records(run_dir, step)), default=0.0)
    return manifest.is_file() and manifest.stat().st_mtime >= trained_at


def _is_evaluated(run_dir: Path, step: int) -> bool:
    return any(name.startswith("eval/") for record in _records(run_dir, step) for name in record)


def _records(run_dir: Path, step: int) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.startswith(b'{"step": %d,' % step) and line.endswith(b"\n")]
