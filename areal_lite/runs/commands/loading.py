"""The start of every command that runs a config: load it, announce the wait, choose how torch's threads wait."""

from __future__ import annotations

import argparse
import logging
import os
from typing import TypeVar

from areal_lite.config.loader import load_config
from areal_lite.config.run_config import ExperimentConfig, RunConfig

C = TypeVar("C", bound=ExperimentConfig)
logger = logging.getLogger(__name__)

_SPINS = "10000"
"""Spins before a waiting torch thread sleeps, about half a millisecond: longer than from one operation to the next,
which is then twice as fast."""


def load_run(options: argparse.Namespace, root: type[C]) -> C:
    """Load the config of a command that is about to import torch; raises ConfigError."""
    config = load_config(options.config, options.overrides, root=root)
    logger.info("%s %s: loading torch and transformers", options.command, options.config)
    if not _computes_side_by_side(config):
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)  # servers inherit it
    return config


def _computes_side_by_side(config: ExperimentConfig) -> bool:
    """Return whether several processes of the run compute at the same time on this machine's cores."""
    if not isinstance(config, RunConfig) or config.rollout.addresses:
        return False
    return config.rollout.max_head_offpolicyness > 0 or config.server.replicas > 1
