"""A published version of the policy's weights. Each way in which servers take weights has its class here.

The trainer's side makes one, launch hands it to the engine, and infra has every server load it, some of them later.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """A checkpoint folder that servers read."""

    path: str
    version: int

    def __str__(self) -> str:
        return f"policy version {self.version} from {self.path}"


PublishedWeights = WeightFolder
