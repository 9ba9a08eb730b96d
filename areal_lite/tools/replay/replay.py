"""``areal-lite replay``: trains again from the dumps of a run instead of from servers.

Guarantees that the same batches in the same order go through the same trainer, so that an unchanged config gives the
run's weights (to the bit, where the run is deterministic), and that the run's folder is only read.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
import torch
from areal_lite.config.loader import load_recorded
from areal_lite.config.rollout_config import RunIdentity
from areal_lite.config.run_config import RunConfig
from areal_lite.errors import ConfigError
from areal_lite.files.model_path import check_model_path
from areal_lite.models.parallel.ranks import Ranks, broadcast_batch, join_ranks
from areal_lite.models.policy_model import resolve_device
from areal_lite.runs.entry_points import check_learnable
from areal_lite.runs.evaluation import Evaluation
from areal_lite.runs.folder.resuming import find_start
from areal_lite.runs.rl_run import open_trainer
from areal_lite.runs.rollout_driver import apply_reward_model, make_reward_model
from areal_lite.runs.run_data import tokenizer_path
from areal_lite.runs.stopping import stop_together
from areal_lite.runs.training_run import Summary, TrainingRun, give_images, open_run_files, with_dtypes, with_prefix
from areal_lite.tools.foreign_files import has_plain_files, open_inside
from areal_lite.tools.replay.dump_reader import TrainedBatches
from areal_lite.tools.verify.verify_weights import weight_hashes
from areal_lite.trainer.forward.scalar_model import ValueScorer
from areal_lite.trainer.metrics import OnStep
from areal_lite.trainer.rl.algorithm import Algorithm
from areal_lite.trainer.rl.policy_step import Batch
from areal_lite.trainer.rl.policy_trainer import PolicyTrainer

_DECIDES_WEIGHTS = ("trainer", "seed", "model_path", "reward_model")
_MAY_CHANGE = (
    *_DECIDES_WEIGHTS,
    *("checkpoint", "dump_training", "tracking", "save_model", "experiment_name", "trial_name", "fileroot"),
)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A run that can be trained again."""

    batches: TrainedBatches
    config: RunConfig
    total_steps: int
    is_same: bool
    """True if it trains all steps of the run with the run's own config."""


def plan_replay(run: Path, overrides: Sequence[str] = ()) -> Replay:
    """Check everything that a replay of the run in the folder ``run`` needs, and return it; loads no model."""
    for override in overrides:
        if override.split("=")[0].split(".")[0] not in _MAY_CHANGE:
            raise ConfigError(
                f"{override}: a replay trains the episodes as they are, so only these keys may change: "
                f"{', '.join(_MAY_CHANGE)}. To generate anew, use areal-lite train"
            )
    before = load_recorded(run, open_inside, root=RunConfig)
    config = load_copy(run, overrides, trial_name=f"{before.trial_name}-replay")
    for key in ("data_packer", "rollout_cache"):
        if (value := getattr(config, key)) is not None:
            raise ConfigError(
                f"{run}/config.yaml has {key}={value}, whose batches are not in the dumps: train the run again "
                "without it"
            )
    for path in (config.model_path, config.reward_model):
        if path is not None and Path(path).is_dir() and not has_plain_files(Path(path), run):
            raise ConfigError(f"{path} holds what is no regular file, or a link out of {run}: name another model_path")
    check_model_path(config.model_path)
    check_learnable(config)
    batches = TrainedBatches.open(run, max_staleness=config.rollout.max_head_offpolicyness)
    algorithm = Algorithm(config.trainer, max_new_tokens=config.rollout.gconfig.max_new_tokens)
    if "baselines" in algorithm.needs and not batches.have_baselines:
        raise ConfigError(
            f"trainer.advantage={config.trainer.advantage} needs the reward of a greedy answer per row, which {run} "
            "did not generate: choose another estimator, or train a run with this one"
        )
    total_steps = min(config.trainer.steps, len(batches))
    for step in range(1, total_steps + 1):
        batches.groups(step)
    is_same = all(getattr(config, key) == getattr(before, key) for key in _DECIDES_WEIGHTS)
    is_same = is_same and total_steps == before.trainer.total_steps
    return Replay(batches=batches, config=config, total_steps=total_steps, is_same=is_same)


def load_copy(run: Path, overrides: Sequence[str], *, trial_name: str) -> RunConfig:
    """Return the config of a run with overrides, for another run with that name that dumps nothing itself."""
    given = [f"trial_name={trial_name}", *overrides]
    # The saved config has the run's identity in its rollout section, too.
    identity = {field.name for field in fields(RunIdentity)}
    given += [f"rollout.{override}" for override in given if override.split("=")[0] in identity]
    config = load_recorded(run, open_inside, given, root=RunConfig)
    if config.run_dir.resolve() == run.resolve():
        raise ConfigError(f"{run} is the run itself, which is only read: choose another trial_name")
    return replace(config, rollout=replace(config.rollout, dump_to_file=False))


@dataclass(kw_only=True)
class ReplayRun(TrainingRun[Evaluation]):
    """A run that trains dumped batches; it starts no server and evaluates nothing."""

    config: RunConfig
    trainer: PolicyTrainer
    batches: TrainedBatches
    reward_model: ValueScorer | None

    def fit(self) -> None:
        while self.step < self.total_steps:
            began = time.monotonic()
            batch = broadcast_batch(self.batch() if Ranks.current().rank == 0 else None)
            read, self.under_way = time.monotonic(), self.step + 1
            metrics = with_prefix("train", self.trainer.train_step(batch, version=self.step))
            self.step += 1
            now = time.monotonic()
            metrics |= {"timing/rollout_wait_s": read - began, "timing/weight_update_s": 0.0}
            self.record_step(metrics | {"timing/step_s": now - began}, began=began)
            self.save_if_due()
            stop_together()

    def batch(self) -> Batch:
        groups = self.batches.groups(self.step + 1)
        apply_reward_model(self.reward_model, groups, self.config)
        return groups

    def evaluate(self) -> None:
        """Do nothing: there are no servers."""

    def data_state(self) -> dict[str, bytes]:
        """Return nothing: the step says which batch comes next."""
        return {}


def run_replay(replay: Replay, *, on_step: OnStep | None = None) -> Summary[Evaluation]:
    """Train the batches of a run; ``on_step`` sees every record of metrics.jsonl."""
    started, config = time.monotonic(), with_dtypes(replay.config)
    device, sp_size, tp_size = resolve_device(config.trainer.device), config.trainer.sp_size, config.trainer.tp_size
    with join_ranks(device, sp_size=sp_size, tp_size=tp_size), ExitStack() as stack:
        start = find_start(config, replay.total_steps)
        files = stack.enter_context(open_run_files(config, start, on_step))
        trainer = open_trainer(config, files, stack)
        give_images(trainer, config.model_path, replay.batches.run)
        return ReplayRun(
            config=config,
            files=files,
            start=start,
            trainer=trainer,
            total_steps=replay.total_steps,
            tokenizer_path=tokenizer_path(config),
            dtype=getattr(torch, config.server.dtype),
            started=started,
            batches=replay.batches,
            reward_model=make_reward_model(config) if Ranks.current().rank == 0 else None,
        ).run()


def same_weights(run: Path, other: Path) -> bool | None:
    """Compare the saved models of two runs bit for bit; None if one of them saved none."""
    hashes = [weight_hashes(folder / "model", folder) for folder in (run, other)]
    return hashes[0] == hashes[1] if all(hashes) else None
