"""The choice of ``rollout.weight_update``: by which medium a run publishes its weights."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
import torch
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.models.lora import adapter_shape
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.servers.weights.broadcaster import WeightBroadcaster
from areal_lite.servers.weights.published_weights import PublishedWeights, WeightFolder
from areal_lite.servers.weights.shared_memory import SharedWeights
from areal_lite.servers.weights.weight_folder import can_send, keep_newest, publish_weights

logger = logging.getLogger(__name__)

Publish = Callable[[int], PublishedWeights]
"""Publishes the model's weights as a version; every rank calls it, and the first rank's result is for the servers."""


@contextmanager
def weight_publisher(
    config: InferenceEngineConfig, model: Any, weights_dir: Path, dtype: torch.dtype
) -> Iterator[Publish]:
    """Yield the function that publishes the weights of ``model`` in ``dtype``; of files the last version stays."""
    way = config.weight_update
    if way == "auto":
        way = "disk" if config.addresses else "memory"
    lacking = way == "memory" and not hasattr(os, "memfd_create")
    if lacking or (way in ("broadcast", "memory") and not can_send(model)):
        if config.weight_update != "auto":
            logger.warning("weights are published as files: rollout.weight_update %s is not possible here", way)
        way = "disk"
    if way == "broadcast":
        yield WeightBroadcaster(model, dtype=dtype).publish
    elif way == "memory":
        with closing(SharedWeights(weights_dir, dtype=dtype)) as shared:
            yield lambda version: WeightFolder(str(shared.publish(model, version).resolve()), version)
    else:
        shape = adapter_shape(model) if way == "adapter" else None
        published: list[int] = []

        def publish(version: int) -> PublishedWeights:
            published.append(version)
            path = publish_weights(model, weights_dir, version, dtype=dtype, adapters_only=shape is not None)
            return WeightFolder(str(path.resolve()), version, shape)

        yield publish
        if published and Ranks.current().rank == 0:
            keep_newest(weights_dir, 1, last=published[-1])
