"""How a run publishes its weights: ``rollout.weight_update``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from areal_lite.api.config import InferenceEngineConfig
from areal_lite.api.published_weights import AdapterFolder, PublishedWeights, WeightFolder
from areal_lite.trainer.lora import adapter_shape
from areal_lite.trainer.shared_weights import SharedWeights, can_share
from areal_lite.trainer.weight_broadcast import WeightBroadcaster
from areal_lite.trainer.weights import names_differ, publish_weights

Publish = Callable[[int], PublishedWeights]
"""Publishes the model's weights as a version; every rank calls it, and the first rank's result is for the servers."""


@contextmanager
def weight_publisher(
    config: InferenceEngineConfig, model: Any, weights_dir: Path, dtype: torch.dtype
) -> Iterator[Publish]:
    """Yield the function that publishes the weights of ``model`` in ``dtype``."""

    def folder(path: Path, version: int) -> WeightFolder:
        return WeightFolder(str(path.resolve()), version)

    way = config.weight_update
    if way == "broadcast" and not names_differ(model):
        with closing(WeightBroadcaster(model, dtype=dtype)) as broadcaster:
            yield broadcaster.publish
        return
    if way == "adapter":
        shape = adapter_shape(model)

        def publish(version: int) -> AdapterFolder:
            path = publish_weights(model, weights_dir, version, adapters_only=True)
            return AdapterFolder(str(path.resolve()), version, shape)

        yield publish
        return
    if way == "disk" or (way == "auto" and config.addresses) or not can_share(model):
        yield lambda version: folder(publish_weights(model, weights_dir, version, dtype=dtype), version)
        return
    with closing(SharedWeights(weights_dir, dtype=dtype)) as shared:
        yield lambda version: folder(shared.publish(model, version), version)
