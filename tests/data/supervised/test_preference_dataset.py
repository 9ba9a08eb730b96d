"""A row becomes two sequences that are equal up to the answer; other pairs are skipped and counted."""

from __future__ import annotations
import json
from pathlib import Path
from typing import Any
import pytest
import torch
from areal_lite.config.supervised_config import PreferenceDatasetConfig
from areal_lite.data.chat.chat_tokens import tokenize_messages
from areal_lite.data.supervised.preference_dataset import PreferenceDataset
from areal_lite.errors import ConfigError
from tests.fixtures.chat_templates import family_tokenizer

QUESTION = [
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "the"},
]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("world", "wide world"))


@pytest.fixture(scope="module")
def chatml() -> Any:
    return family_tokenizer("chatml")


def trained(dataset: PreferenceDataset, name: str) -> list[str]:
    return [
        dataset.tokenizer.decode(item[f"{name}_ids"][item[f"{name}_mask"].bool()])
        for item in (dataset[number] for number in range(len(dataset)))
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]},
        {"prompt": QUESTION, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": QUESTION, "chosen": GOOD["content"], "rejected": BAD["content"]},
        {"prompt": "the", "chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]},
        {"prompt": QUESTION, "chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]},
        {"prompt": QUESTION[:1], "chosen": [*QUESTION[1:], GOOD], "rejected": [*QUESTION[1:], BAD]},
    ],
    ids=["conversations", "messages", "texts", "beside a text", "beside their beginning", "after their beginning"],
)
def test_only_the_last_answer_and_its_end_are_trained_in_every_row_format(chatml: Any, row: Any) -> None:
    dataset = PreferenceDataset([row], chatml, 1000)
    [item] = [dataset[0]]
    for name, answer in (("chosen", GOOD), ("rejected", BAD)):
        [sequence] = tokenize_messages(chatml, [*QUESTION, answer])
        assert item[f"{name}_ids"].tolist() == sequence.input_ids
        assert item[f"{name}_mask"].dtype == item[f"{name}_ids"].dtype == torch.int64
    assert trained(dataset, "chosen") == ["world<|im_end|>"]
    assert trained(dataset, "rejected") == ["wide world<|im_end|>"]


def test_a_text_prompt_is_the_users_question_and_columns_may_have_other_names(chatml: Any) -> None:
    row = {"q": "so", "better": "hello", "worse": "world"}
    config = PreferenceDatasetConfig(
        path="", max_length=1000, prompt_key="q", chosen_key="better", rejected_key="worse"
    )
    dataset = PreferenceDataset([row], chatml, config=config)
    [sequence] = tokenize_messages(
        chatml, [{"role": "user", "content": "so"}, {"role": "assistant", "content": "hello"}]
    )
    assert dataset[0]["chosen_ids"].tolist() == sequence.input_ids


def test_the_last_answer_is_trained_if_a_template_rewrites_history() -> None:
    tokenizer = family_tokenizer("qwen_thinking")
    dataset = PreferenceDataset([{"chosen": [*QUESTION, GOOD], "rejected": [*QUESTION, BAD]}], tokenizer, 1000)
    assert trained(dataset, "chosen")[0].endswith("world<|im_end|>")
    assert "hello" not in trained(dataset, "chosen")[0]


def test_rows_of_files_are_the_same_as_rows_in_memory(chatml: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "so", "chosen": "hello", "rejected": "world"},
        {"prompt": "the", "chosen": "answer", "rejected": "hello"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = PreferenceDataset(str(path), chatml, 1000)
    assert trained(dataset, "chosen") == ["hello<|im_end|>", "answer<|im_end|>"]


def test_the_seed_chooses_rows_of_a_file(chatml: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "so", "chosen": "x" * number, "rejected": "the"} for number in range(1, 9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = PreferenceDatasetConfig(path="", max_length=1000, max_samples=3, cache_dir=str(tmp_path))
    by_default, first, second = (
        trained(PreferenceDataset(str(path), chatml, config=few, **seed), "chosen")
        for seed in ({}, {"seed": 1}, {"seed": 2})
    )
    assert by_default == first != second


def test_pairs_too_long_or_equal_are_skipped_and_counted(chatml: Any) -> None:
    rows = [
        {"prompt": "so", "chosen": "hello", "rejected": "world"},
        {"prompt": "so", "chosen": "hello", "rejected": "world " * 200},
        {"prompt": "so", "chosen": "hello", "rejected": "hello"},
    ]
    dataset = PreferenceDataset(rows, chatml, 60)
    assert len(dataset) == 1
    assert dataset.dropped == {"a sequence longer than max_length": 1, "equal answers": 1}
    with pytest.raises(ConfigError, match="all 1 rows were skipped: 1 with a sequence longer than max_length"):
        PreferenceDataset(rows[1:2], chatml, 60)
    longest = max(len(dataset[0][f"{name}_ids"]) for name in ("chosen", "rejected"))
    assert len(PreferenceDataset(rows[:1], chatml, longest)) == 1
    with pytest.raises(ConfigError, match="longer than max_length"):
        PreferenceDataset(rows[:1], chatml, longest - 1)


def test_a_pair_with_an_empty_answer_and_no_end_mark_is_skipped(chatml: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':\\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
    config = PreferenceDatasetConfig(path="", max_length=1000, apply_chat_template_kwargs={"chat_template": template})
    rows = [{"prompt": "so", "chosen": "hello", "rejected": rejected} for rejected in ("", "world")]
    dataset = PreferenceDataset(rows, chatml, config=config)
    assert len(dataset) == 1
    assert dataset.dropped == {"no assistant text": 1}


@pytest.mark.parametrize(("better", "worse"), [("thoughts", "none"), ("none", "thoughts")])
def test_what_the_template_leaves_out_of_either_answer_is_reported(
    chatml: Any, better: str, worse: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"none": [GOOD], "thoughts": [GOOD | {"reasoning_content": "why", "content": "wide world"}]}
    PreferenceDataset([{"prompt": "so", "chosen": answers[better], "rejected": answers[worse]}], chatml, 1000)
    assert "row 0, and perhaps others: the chat template leaves out the thoughts" in caplog.text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "so", "chosen": "a"}, r"row 0: 'rejected' is None: it must be text or messages"),
        ({"chosen": "a", "rejected": "b"}, r"'chosen' is an answer, but 'prompt' is None"),
        ({"prompt": [], "chosen": "a", "rejected": "b"}, r"'prompt' is \[\]"),
        ({"prompt": 3, "chosen": "a", "rejected": "b"}, r"'prompt' is 3"),
        ({"chosen": QUESTION, "rejected": QUESTION}, r"ends with a message of role 'user'"),
        (
            {"chosen": [*QUESTION, GOOD], "rejected": [QUESTION[0], GOOD]},
            r"'chosen' and 'rejected' differ before their last message",
        ),
        ({"prompt": "so", "chosen": ["a"], "rejected": ["b"]}, r"must be text or messages"),
    ],
)
def test_a_row_that_is_not_a_pair_is_named(chatml: Any, row: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PreferenceDataset([row], chatml, 1000)
