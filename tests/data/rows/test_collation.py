"""A run takes the batches of a ``collate_fn`` apart again, or says what it needs."""

from __future__ import annotations
from typing import Any
import numpy as np
import pytest
import torch
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.batch.collate import collate_fn
from areal_lite.data.packer.data_packer import DataPacker, rollout_inputs
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.data.rows.added_columns import collate_fn_of, rows_of_batch
from areal_lite.errors import ConfigError

ROWS = [{"prompt": f"p{i}", "extra_info": {"index": i}} for i in range(3)]
not_a_function = 3


def packed(collate: Any) -> DataPacker:
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=None, config=DatasetConfig(path=""))
    packer.collate_fn = collate
    return packer


def test_verls_batch_gives_the_rows_back() -> None:
    packer = packed(collate_fn)
    assert packer.collates and not packed(None).collates
    assert rollout_inputs(packer, ROWS) == ROWS
    tensors = rows_of_batch({"ids": torch.arange(6).reshape(3, 2), "n": np.arange(3)}, 3)
    assert [row["ids"].tolist() for row in tensors] == [[0, 1], [2, 3], [4, 5]]
    assert [row["n"] for row in tensors] == [0, 1, 2]


def test_a_list_may_change_each_row() -> None:
    packer = packed(lambda rows: [{**row, "others": len(rows) - 1} for row in rows])
    assert rollout_inputs(packer, ROWS) == [{**row, "others": 2} for row in ROWS]


def test_prompts_are_prepared_from_what_the_function_made() -> None:
    packer = packed(lambda rows: [{"prompt": row["prompt"].upper()} for row in rows])
    packer.prepare_prompt = lambda row: {"raw_prompt_ids": [ord(char) for char in row["prompt"]]}
    made = [row.prepared() for row in rollout_inputs(packer, ROWS)]  # type: ignore[attr-defined]
    assert made == [{"prompt": f"P{i}", "raw_prompt_ids": [80, 48 + i]} for i in range(3)]


@pytest.mark.parametrize(
    "batch", [None, [], {"a": [1, 2]}, {"a": [1, 2, 3], "b": [1]}, {"a": 1}, ROWS[:2], ["p0", "p1", "p2"], "abc"]
)
def test_a_batch_without_a_row_for_each_episode_is_refused(batch: Any) -> None:
    with pytest.raises(
        ConfigError, match="collate_fn made .* of 3 rows: each is needed by itself, so return a dict of columns"
    ):
        rows_of_batch(batch, 3)


def test_items_of_an_update_keep_what_the_trainer_needs() -> None:
    items = [{"input_ids": 1, "row": 0}, {"input_ids": 2, "row": 1}]
    assert rows_of_batch(items[::-1], 2, items[0]) == items[::-1]
    with pytest.raises(ConfigError, match="of 2 rows: each is needed .* a list of 2 dicts with input_ids, row, in the"):
        rows_of_batch([items[0], {"row": 1}], 2, items[0])


def test_the_function_is_loaded_from_its_path() -> None:
    assert collate_fn_of(DatasetConfig(path="")) is None
    assert collate_fn_of(DatasetConfig(path="", collate_fn="areal_lite.data.batch.collate.collate_fn")) is collate_fn
    with pytest.raises(ConfigError, match="not_a_function': it must be a function that takes a list of rows"):
        collate_fn_of(DatasetConfig(path="", collate_fn=f"{__name__}.not_a_function"))
