"""Rows in, training batches out: adapters between dataset files, engine and trainer.

Names load with their first use, so importing this package loads no torch. Imports ``api``, ``config`` and ``files``;
called by ``rollout``, ``trainer``, ``agents`` and ``runs``. Read in the order of a row: rows, chat, packer, source,
batch; vision and supervised stand beside them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_lite.data.batch.data_proto import DataProto
    from areal_lite.data.chat.tokenizer import load_tokenizer
    from areal_lite.data.packer.data_packer import DataPacker, training_batch
    from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
    from areal_lite.data.rows.load_rows import load_rows
    from areal_lite.data.rows.rl_dataset import RLHFDataset
    from areal_lite.data.source.buffered_data_source import RolloutDataSourceWithBuffer
    from areal_lite.data.source.rollout_data_source import RolloutDataSource
    from areal_lite.data.source.sample import Sample
    from areal_lite.data.source.source_settings import SourceSettings
    from areal_lite.data.supervised.preference_dataset import PreferenceDataset
    from areal_lite.data.supervised.sft_dataset import SFTDataset

__all__ = [
    "DataPacker", "DataProto", "DecoderOnlyLLMDataPacker", "PreferenceDataset", "RLHFDataset",
    "RolloutDataSource", "RolloutDataSourceWithBuffer", "SFTDataset", "Sample", "SourceSettings", "load_rows",
    "load_tokenizer", "training_batch",
]  # fmt: skip
_MODULES = {
    "DataPacker": "packer.data_packer",
    "DataProto": "batch.data_proto",
    "DecoderOnlyLLMDataPacker": "packer.decoder_only_llm_packer",
    "PreferenceDataset": "supervised.preference_dataset",
    "RLHFDataset": "rows.rl_dataset",
    "RolloutDataSource": "source.rollout_data_source",
    "RolloutDataSourceWithBuffer": "source.buffered_data_source",
    "SFTDataset": "supervised.sft_dataset",
    "Sample": "source.sample",
    "SourceSettings": "source.source_settings",
    "load_rows": "rows.load_rows",
    "load_tokenizer": "chat.tokenizer",
    "training_batch": "packer.data_packer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"areal_lite.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
