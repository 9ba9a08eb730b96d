"""The data set that a config asks for: fixed rows, growing rows, or the user's own class."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from areal_lite.api.config import DatasetConfig
from areal_lite.api.dotted_path import load_class
from areal_lite.data.rows.dynamic_dataset import DynamicGenDataset
from areal_lite.data.rows.rl_dataset import RLHFDataset
from areal_lite.errors import ConfigError


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: DatasetConfig,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
    seed: int = 1,
) -> Dataset[Any]:
    """Return the data set that ``data_config`` asks for.

    ``custom_cls`` takes precedence, for training and held-out rows. ``datagen`` applies to training rows only. The
    default is :class:`RLHFDataset`. A user's class is called with data_files, tokenizer, processor and config, and
    with max_samples and seed if it accepts them.

    Args:
        tokenizer: Hugging Face tokenizer; None if only raw rows are needed.
        max_samples: Rows to use; -1 uses ``data_config.max_samples``.
        seed: Chooses the rows if ``data_config.shuffle`` is set.

    Raises:
        ConfigError: If the class cannot be loaded, is not a torch data set, or does not accept a max_samples that
            was given.
    """
    cls: type = RLHFDataset
    if data_config.custom_cls is not None:
        cls = load_class(data_config.custom_cls, Dataset, where="custom_cls")
    elif data_config.datagen is not None and is_train:
        cls = DynamicGenDataset
    optional = {"max_samples": max_samples, "seed": seed}
    parameters = inspect.signature(cls).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        optional = {name: value for name, value in optional.items() if name in parameters}
    if max_samples != -1 and "max_samples" not in optional:
        raise ConfigError(
            f"max_samples is {max_samples}, but {cls.__name__} takes no max_samples: add the argument or leave it unset"
        )
    return cls(  # type: ignore[no-any-return]
        data_files=data_paths, tokenizer=tokenizer, processor=processor, config=data_config, **optional
    )
