"""A workflow gets slime's metadata and verl's columns of ``extra_info`` beside those of its row."""

from __future__ import annotations
import logging
from typing import Any
import pytest
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.packer.data_packer import rollout_inputs
from areal_lite.data.packer.decoder_only_llm_packer import DecoderOnlyLLMDataPacker
from areal_lite.errors import ConfigError

TOOLS = {"calculator": {"create_kwargs": {"ground_truth": "4"}}}


def given(row: Any, **config: Any) -> dict[str, Any]:
    """Return what a workflow gets of ``row``."""
    packer = DecoderOnlyLLMDataPacker()
    packer.setup(tokenizer=None, config=DatasetConfig(path="", **config))
    (made,) = rollout_inputs(packer, [row])
    return made


def test_the_columns_of_extra_info_reach_the_workflow() -> None:
    extra = {"index": 7, "tools_kwargs": TOOLS, "interaction_kwargs": {"query": "2+2"}}
    row = {"prompt": "2+2", "extra_info": extra}
    assert given(row) == {**row, **extra}
    assert given({**row, "index": 3})["index"] == 3  # a row's own column stays


@pytest.mark.parametrize("name", ["tools_kwargs", "interaction_kwargs"])
def test_one_of_them_brings_the_others_with_their_defaults(name: str) -> None:
    made = given({"extra_info": {name: {"a": 1}}})
    assert {**made, name: {}} == {**made, "index": 0, "tools_kwargs": {}, "interaction_kwargs": {}}
    assert made[name] == {"a": 1}


@pytest.mark.parametrize("row", [{"prompt": "p"}, {"extra_info": {"index": 3}}, {"extra_info": "text"}])
def test_other_rows_stay_as_they_are_unless_tools_are_needed(row: dict[str, Any]) -> None:
    assert given(row) == row
    needed = given(row, need_tools_kwargs=True)
    assert needed.keys() == {*row, "index", "tools_kwargs", "interaction_kwargs"}
    assert given("text", need_tools_kwargs=True)["tools_kwargs"] == {}


def test_needed_arguments_of_tools_that_are_empty_give_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    row = {"data_source": "gsm8k", "extra_info": {"index": 5, "tools_kwargs": None}}
    given(row)
    given({"extra_info": {"tools_kwargs": TOOLS}}, need_tools_kwargs=True)
    given({"extra_info": {"tools_kwargs": {}, "need_tools_kwargs": False}}, need_tools_kwargs=True)
    assert caplog.messages == []
    given(row, need_tools_kwargs=True)
    given({"extra_info": {"interaction_kwargs": {}, "need_tools_kwargs": True}})
    assert caplog.messages == [
        "tools_kwargs is empty for index 5, data source gsm8k",
        "tools_kwargs is empty for index 0, data source None",
    ]


def test_the_column_of_metadata_reaches_the_workflow_as_a_copy() -> None:
    row = {"prompt": "p", "metadata": "other", "facts": {"level": [1]}}
    made = given(row, metadata_key="facts")
    assert made == {**row, "metadata": {"level": [1]}}
    made["metadata"]["level"].append(2)
    assert row["facts"] == {"level": [1]}
    assert given({"facts": None}, metadata_key="facts")["metadata"] == {}
    assert given(row) == row
    with pytest.raises(ConfigError, match=r"the column 'prompt' \(metadata_key\) of a row is 'p': it must be a dict"):
        given(row, metadata_key="prompt")
