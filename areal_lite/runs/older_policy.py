"""The older version of the policy that a run keeps on a server of its own, as an opponent in self-play or a judge."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
import torch
from areal_lite.config.run_config import RunConfig
from areal_lite.models.parallel.ranks import broadcast_json
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.runs.engine_stack import OLDER
from areal_lite.runs.stopping import Stopped, interruptible
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightFolder
from areal_lite.servers.weights.publisher import Publish, weight_publisher
from areal_lite.servers.weights.weight_folder import version_name


@dataclass
class OlderPolicy:
    """Every rank calls its methods; ``engine`` is the first rank's, None on the others."""

    every_steps: int | None
    publish: Publish
    weights_dir: Path
    engine: RemoteInfEngine | None

    def follow(self, step: int) -> None:
        """Load the weights of ``step`` if they are due."""
        if step == 0 or (self.every_steps is not None and step % self.every_steps == 0):
            self._load(self.publish(step))

    def resume(self, step: int) -> None:
        """Load the weights that it had at ``step``; those of ``step`` if later ones are gone."""
        version = 0 if self.every_steps is None else step - step % self.every_steps
        if version == step:
            return  # :meth:`follow` has loaded them
        folder = self.weights_dir / version_name(version)
        is_kept = broadcast_json(folder.is_dir())
        if is_kept or version:  # else it has the weights that its server started with
            self._load(WeightFolder(str(folder.resolve()), version) if is_kept else self.publish(step))

    def _load(self, weights: PublishedWeights) -> None:
        if self.engine is not None:
            with suppress(Stopped), interruptible():
                self.engine.update_weights(weights)


@contextmanager
def older_policy(
    config: RunConfig, engine: RemoteInfEngine | None, model: Any, run_dir: Path, dtype: torch.dtype
) -> Iterator[OlderPolicy | None]:
    """Yield the older policy of a run whose config has one."""
    if config.older_policy is None:
        yield None
        return
    folder, files = run_dir / OLDER / "weights", replace(config.rollout, weight_update="disk")
    with weight_publisher(files, model, folder, dtype) as publish:
        yield OlderPolicy(config.older_policy.every_steps, publish, folder, None if engine is None else engine.older)
