"""Rows become items in order, within the length, each with a trained token; skipped sequences are counted."""

import json
import multiprocessing
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer
from areal_lite.config.supervised_config import PreferenceDatasetConfig, SFTDatasetConfig
from areal_lite.data.chat.chat_tokens import tokenize_messages
from areal_lite.data.supervised import sft_dataset, tokenized_dataset
from areal_lite.data.supervised.preference_dataset import PreferenceDataset
from areal_lite.data.supervised.sft_dataset import SFTDataset
from areal_lite.data.supervised.tokenized_dataset import BaseDataset, surely_within
from areal_lite.errors import ConfigError
from tests.fixtures.chat_templates import family_tokenizer
from tests.fixtures.tool_templates import tool_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def conversation(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def config(**settings):
    return SFTDatasetConfig(path="", max_length=1000, **settings)


@pytest.fixture(scope="module")
def chatml():
    return family_tokenizer("chatml")


def texts(dataset):
    """Return the full text and the trained text of each item."""
    decode = dataset.tokenizer.decode
    return [(decode(item["input_ids"]), decode(item["input_ids"][item["loss_mask"].bool()])) for item in dataset]


def test_an_item_is_the_conversations_tokens_with_an_aligned_mask(chatml):
    # R8
    messages = conversation("so", "hello", "so", "world")
    dataset = SFTDataset([{"messages": messages, "tools": TOOLS}], chatml, 1000)
    [sequence] = tokenize_messages(chatml, messages, TOOLS)
    [item] = dataset
    assert isinstance(dataset, BaseDataset)
    assert len(dataset) == 1
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in item.items()} == {
        "input_ids": (torch.int64, sequence.input_ids),
        "loss_mask": (torch.int64, [int(trained) for trained in sequence.loss_mask]),
        "truncated": (torch.int64, 0),
        "row": (torch.int64, 0),
    }
    item["input_ids"].zero_()
    assert dataset[0]["input_ids"].tolist() == sequence.input_ids


def test_a_loader_gets_each_batch_as_a_list(chatml):
    # R8, R9
    dataset = SFTDataset([{"messages": conversation("so", "x" * n)} for n in range(1, 6)], chatml, 1000)
    torch.manual_seed(0)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True, collate_fn=dataset.collate_fn)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [2, 2]
    assert len({len(item["input_ids"]) for batch in batches for item in batch}) == 4


def shortest_first(items):
    return sorted(items, key=lambda item: len(item["input_ids"]))


def stacked(items):
    return torch.stack([item["row"] for item in items])


def test_a_collate_fn_changes_the_batches_of_the_trainer(chatml):
    rows = [{"messages": conversation("so", "x" * n)} for n in (3, 1, 2)]
    dataset = SFTDataset(rows, chatml, config=config(collate_fn=f"{__name__}.shortest_first"))
    assert [int(item["row"]) for item in dataset.collate_fn([dataset[i] for i in range(3)])] == [1, 2, 0]
    some = [dataset[0] | {"images": ["one"]}, dataset[1]]  # only some rows have images
    assert [item["row"] for item in dataset.collate_fn(some)] == [
        item["row"] for item in dataset.collate_fn(some[::-1])
    ]
    dataset = SFTDataset(rows, chatml, config=config(collate_fn=f"{__name__}.stacked"))
    with pytest.raises(
        ConfigError, match="of 1 rows: each is needed by itself, so .* a list of 1 dicts with input_ids"
    ):
        dataset.collate_fn([dataset[0]])


def test_a_long_sequence_is_truncated_and_counted(chatml):
    # R8
    row = {"messages": conversation("so", "hello world" * 9)}
    [whole] = SFTDataset([row], chatml, 1000)
    dataset = SFTDataset([row], chatml, 20)
    [cut] = dataset
    assert cut["input_ids"].tolist() == whole["input_ids"][:20].tolist()
    assert cut["loss_mask"].tolist() == whole["loss_mask"][:20].tolist()
    assert [item["truncated"].item() for item in (whole, cut)] == [0, 1]
    assert SFTDataset([row], chatml, len(whole["input_ids"]))[0]["truncated"].item() == 0


def test_sequences_without_a_trained_token_are_skipped_and_counted_by_reason(chatml, caplog):
    # R-B7
    rows = [
        {"messages": conversation("so")},
        {"messages": conversation("so", "hello")},
        {"messages": conversation("so" * 99, "hello")},
        {"messages": conversation("hello")},
    ]
    dataset = SFTDataset(rows, chatml, 40)
    assert [trained for _, trained in texts(dataset)] == ["hello<|im_end|>"]
    assert dataset.dropped == {"no assistant text": 2, "no trained token within max_length": 1}
    assert [int(item["row"]) for item in dataset] == [1]
    assert "some of 4 rows were skipped: 2 with no assistant text, 1 with no trained" in caplog.text


def test_a_question_of_the_maximum_length_leaves_no_token_to_train(chatml):
    row = {"messages": conversation("hello world" * 8, "hello")}
    [item] = SFTDataset([row], chatml, 1000)
    start = item["loss_mask"].tolist().index(1)
    assert len(SFTDataset([row], chatml, start + 1)) == 1
    with pytest.raises(ConfigError, match="1 with no trained token within max_length"):
        SFTDataset([row], chatml, start)


def test_an_empty_answer_is_skipped_without_the_template_too(chatml):
    rows = [{"messages": conversation("so ", answer)} for answer in ("", "hello")]
    dataset = SFTDataset(rows, chatml, config=config(apply_chat_template=False))
    assert texts(dataset) == [("so hello", "hello")]
    assert dataset.dropped == {"no assistant text": 1}


def test_an_empty_result_is_an_error(chatml):
    # R-B7
    rows = [{"messages": conversation("so")}, {"messages": conversation("so", "hello")}]
    with pytest.raises(ConfigError, match="all 2 rows were skipped: 1 with no assistant text.*max_length=3"):
        SFTDataset(rows, chatml, 3)


def test_a_conversation_that_splits_gives_several_items_in_order_and_is_rendered_once(rendered):
    rows = [{"messages": conversation("so", "a", "so", "b")}, {"messages": conversation("so", "c")}]
    dataset = SFTDataset(rows, family_tokenizer("qwen_thinking"), 1000)
    assert len(dataset) == 3
    rendered.clear()
    assert [trained.rpartition("\n\n")[2] for _, trained in texts(dataset)] == [f"{x}<|im_end|>" for x in "abc"]
    assert len(rendered) == 2


@pytest.mark.parametrize("prompt", ["so", [{"role": "user", "content": "so"}]])
def test_a_prompt_and_a_response_are_a_question_and_its_answer(chatml, prompt):
    dataset = SFTDataset([{"q": prompt, "a": "hello"}], chatml, config=config(prompt_key="q", response_key="a"))
    same = SFTDataset([{"messages": conversation("so", "hello")}], chatml, 1000)
    assert texts(dataset) == texts(same)


def test_digits_of_a_csv_are_a_prompt_and_a_response(chatml, tmp_path):
    (tmp_path / "sums.csv").write_text("prompt,response\n1+1=,2\n2,0.5\n")
    dataset = SFTDataset(str(tmp_path / "sums.csv"), chatml, 1000)
    same = [{"messages": conversation("1+1=", "2")}, {"messages": conversation("2", "0.5")}]
    assert texts(dataset) == texts(SFTDataset(same, chatml, 1000))


def test_without_the_template_prompt_and_response_are_joined_and_the_eos_is_trained(chatml):
    # R3, R-B1
    row = {"prompt": "so ", "response": "hello"}
    assert texts(SFTDataset([row], chatml, 1000, config(apply_chat_template=False))) == [
        ("so hello<|im_end|>", "hello<|im_end|>")
    ]
    messages = {"messages": conversation("so ", "hello")}
    assert texts(SFTDataset([messages], chatml, 1000, config(apply_chat_template=False))) == [("so hello", "hello")]


def test_messages_and_tools_may_be_json_text(chatml):
    messages = conversation("so", "hello")
    row = {"messages": json.dumps(messages), "tools": json.dumps(TOOLS)}
    assert texts(SFTDataset([row], chatml, 1000)) == texts(
        SFTDataset([{"messages": messages, "tools": TOOLS}], chatml, 1000)
    )


def test_template_variables_are_passed_on(chatml):
    settings = {
        "chat_template": "{% for m in messages %}{{ word + m.content }}{% endfor %}",
        "word": "hello ",
    }
    rows = [{"messages": conversation("a", "b")}]
    dataset = SFTDataset(rows, chatml, config=config(apply_chat_template_kwargs=settings))
    assert texts(dataset)[0][0] == "hello ahello b"


def test_null_keys_added_by_arrow_are_not_rendered(chatml):
    # R-B2, R-B6: a column of records gives each of them the keys of all.
    import datasets

    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in ("add", "sub")]
    rows = [
        {
            "messages": [*conversation("so"), {"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [{"function": call["function"] | {"name": "t"}}],
        }
        for call in calls
    ]
    stored = datasets.Dataset.from_list(rows)
    assert stored[0] != rows[0]
    assert texts(SFTDataset(stored, chatml, 1000)) == texts(SFTDataset(rows, chatml, 1000))


def test_rows_are_read_from_a_file(chatml, tmp_path, monkeypatch):
    # R7, R8
    monkeypatch.setenv("HOME", str(tmp_path))  # tables are kept there
    path = tmp_path / "rows.jsonl"
    call = {"function": {"name": "add", "arguments": {"a": None}}}
    rows = [
        {"messages": conversation("so", "hello")},
        {"messages": [*conversation("so"), {"role": "assistant", "content": None, "tool_calls": [call]}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = texts(SFTDataset(rows, chatml, 1000))
    assert '"arguments": {"a": null}' in expected[1][1]
    assert texts(SFTDataset(str(path), chatml, 1000)) == expected
    assert texts(SFTDataset([str(path), str(path)], chatml, 1000)) == expected * 2


def test_max_length_overrides_the_config_and_max_samples_chooses_rows_of_a_file(chatml, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "so", "response": "x" * n}) + "\n" for n in range(1, 9)))
    few = config(cache_dir=str(tmp_path), max_samples=3)
    first, second = (SFTDataset(str(path), chatml, config=few, seed=seed) for seed in (1, 2))
    assert len(first) == len(second) == 3
    assert texts(first) != texts(second)
    assert texts(SFTDataset(str(path), chatml, config=few)) == texts(first)
    assert texts(SFTDataset(first.rows, chatml, 1000)) == texts(first)
    assert SFTDataset(first.rows, chatml, 999, few).max_length == 999
    assert SFTDataset(first.rows, chatml, config=few).max_length == 1000
    with pytest.raises(ConfigError, match="neither max_length nor config is given"):
        SFTDataset(first.rows, chatml)


def test_worker_processes_give_the_same_items(chatml):
    rows = [{"messages": conversation("so", str(n), "so", "hello")} for n in range(3)]
    assert texts(SFTDataset(rows, chatml, config=config(num_workers=1))) == texts(SFTDataset(rows, chatml, 1000))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "so"}, "row 1: 'messages' is the text 'so', which is not JSON"),
        ({"messages": [{"from": "human", "value": "so"}]}, r"row 1: messages\[0\] is .*'human'"),
        ({"chat": [], "id": 3}, r"row 1: it has neither 'messages' nor.*columns \['chat', 'id'\]"),
        ({"prompt": "so", "response": None}, "row 1: it has neither"),
        ({"prompt": True, "response": "so"}, "row 1: it has neither"),
        ({"messages": conversation("so", "a"), "tools": "{"}, "row 1: 'tools' is the text '{'"),
        ({"messages": conversation("so", "a"), "tools": {"name": "add"}}, "row 1: the chat template cannot"),
    ],
)
def test_a_damaged_row_is_refused_with_its_number(chatml, row, message):
    with pytest.raises(ConfigError, match=message):
        SFTDataset([{"messages": conversation("so", "hello")}, row], chatml, 1000)


def test_missing_rows_length_or_eos_are_refused(chatml):
    with pytest.raises(ConfigError, match="there are no rows"):
        SFTDataset([], chatml, 1000)
    row = {"messages": conversation("so", "a")}
    with pytest.raises(ConfigError, match="max_length is 1"):
        SFTDataset([row], chatml, 1)
    assert len(SFTDataset([row], chatml, 2, config(apply_chat_template=False))) == 1

    class NoEos:
        eos_token = None

    with pytest.raises(ConfigError, match="row 0: the tokenizer has no EOS token"):
        SFTDataset([{"prompt": "so", "response": "a"}], NoEos(), 9, config(apply_chat_template=False))


def test_tools_that_the_template_does_not_render_are_refused_or_written_into_the_system_prompt():
    smollm2 = tool_tokenizer("smollm2")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    row = {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        "tools": TOOLS,
    }
    with pytest.raises(ConfigError, match="row 0: the chat template does not render tools.*tools_in_system_prompt"):
        SFTDataset([row], smollm2, config=config())
    with pytest.raises(ConfigError, match="row 0: .*calls the tool 'add', but.*tools_in_system_prompt"):
        SFTDataset([row | {"tools": None}], smollm2, config=config())
    [(whole, trained)] = texts(SFTDataset([row], smollm2, config=config(tools_in_system_prompt=True)))
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in whole.split("<|im_end|>")[0]
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in whole
    assert trained == f"{written}<|im_end|>3<|im_end|>"
    pair = {"prompt": "1 + 2?", "chosen": "3", "rejected": "4", "tools": TOOLS}
    with pytest.raises(ConfigError, match="does not render tools"):
        PreferenceDataset([pair], smollm2, 1000)
    settings = PreferenceDatasetConfig(path="", max_length=1000, tools_in_system_prompt=True)
    [item] = PreferenceDataset([pair], smollm2, config=settings)
    assert "<tools>" in smollm2.decode(item["chosen_ids"])


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tokenized(monkeypatch):
    """Collect the texts that are tokenized."""
    seen, tokens_of = [], sft_dataset.tokens_of
    monkeypatch.setattr(sft_dataset, "tokens_of", lambda t, text: (seen.append(text.text), tokens_of(t, text))[1])
    return seen


@pytest.fixture
def rendered(monkeypatch):
    """Collect the conversations that are rendered."""
    seen, render = [], sft_dataset.render_conversation

    def spy(tokenizer, messages, *args, **kwargs):
        seen.append(messages)
        return render(tokenizer, messages, *args, **kwargs)

    monkeypatch.setattr(sft_dataset, "render_conversation", spy)
    return seen


def test_a_row_is_tokenized_when_it_is_read(chatml, tokenized):
    rows = [{"messages": conversation("so", "x" * n)} for n in (1, 2, 3)]
    dataset = SFTDataset(rows, chatml, 1000)
    assert (len(dataset), tokenized) == (3, [])
    assert "xx<|im_end|>" in chatml.decode(dataset[1]["input_ids"])
    assert len(tokenized) == 1


def test_a_text_is_surely_within_if_each_byte_may_be_a_token():
    assert surely_within("é" * 46, 100)
    assert not surely_within("é" * 46 + "e", 100)


def test_a_long_check_logs_how_far_it_is(chatml, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(tokenized_dataset, "_CHUNK", 1)
    rows = [{"messages": conversation("so", "hello")}] * 2
    SFTDataset(rows, chatml, 1000)
    assert "checked" not in caplog.text
    monkeypatch.setattr(tokenized_dataset, "_LOG_EVERY_S", -1)
    SFTDataset(rows, chatml, 1000)
    assert "checked 1 of 2 rows" in caplog.text


def test_a_tokenizer_without_a_fingerprint_stores_no_index(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"messages": conversation("so ", "hello")}])
    settings = config(apply_chat_template=False, cache_dir=str(tmp_path))
    assert texts(SFTDataset(path, ByT5Tokenizer(), config=settings)) == [("so hello", "hello")]
    assert not (tmp_path / "indices").exists()


def test_only_a_row_whose_length_may_matter_is_tokenized_at_the_start(chatml, tokenized):
    rows = [{"messages": conversation("so" * n, "hello")} for n in (1, 30, 2)]
    dataset = SFTDataset(rows, chatml, 80)
    assert (len(dataset), len(tokenized)) == (3, 1)
    assert "soso" in tokenized[0]


def test_rows_of_a_file_are_rendered_once_and_again_when_something_changes(chatml, tmp_path, rendered):
    rows = [{"messages": conversation("so")}, *({"messages": conversation("so", "x" * n)} for n in (1, 2))]
    path = lines(tmp_path / "rows.jsonl", rows)
    here = {"cache_dir": str(tmp_path)}

    def counted(tokenizer=chatml, **settings):
        rendered.clear()
        dataset = SFTDataset(path, tokenizer, config=config(**here, **settings))
        return len(dataset), dict(dataset.dropped), len(rendered)

    assert counted() == (2, {"no assistant text": 1}, 3)
    assert counted() == counted(num_workers=1) == (2, {"no assistant text": 1}, 0)
    assert counted(max_samples=2) == (1, {"no assistant text": 1}, 2)
    assert counted(apply_chat_template_kwargs={"x": 1, "y": 2}) == (2, {"no assistant text": 1}, 3)
    assert counted(apply_chat_template_kwargs={"y": 2, "x": 1}) == (2, {"no assistant text": 1}, 0)
    assert counted(family_tokenizer("qwen_thinking")) == (2, {"no assistant text": 1}, 3)
    lines(tmp_path / "rows.jsonl", rows[1:])
    assert counted() == (2, {}, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_row_of_a_file_is_refused_with_its_line(chatml, tmp_path, num_workers):
    good, bad = {"messages": conversation("so", "a"), "n": 1.5}, {"messages": [{"role": 3}], "n": 2.5}
    first, second = (
        lines(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", [good, good]), ("b", [good, bad]))
    )
    (tmp_path / "b.jsonl").write_text("\n" + (tmp_path / "b.jsonl").read_text())
    settings = config(cache_dir=str(tmp_path), num_workers=num_workers)
    with pytest.raises(ConfigError, match=r"^row 3 \(\S+/b.jsonl, line 3\): messages\[0\]"):
        SFTDataset([first, second], chatml, config=settings)
    assert multiprocessing.active_children() == []


def test_what_a_template_leaves_out_is_one_warning_with_the_fix(chatml, caplog, tmp_path):
    kwargs = {"chat_template": "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"}
    rows = [{"messages": conversation("so", "hello")}] * 3
    path = lines(tmp_path / "rows.jsonl", rows)
    settings = config(apply_chat_template_kwargs=kwargs, cache_dir=str(tmp_path))
    for _ in range(2):  # the second one reads the index
        caplog.clear()
        SFTDataset(path, chatml, config=settings)
        assert caplog.text.count("writes no end mark after an answer, so the model does not learn to stop") == 1
        assert "row 0, and perhaps others: " in caplog.text
        assert "{{ eos_token }}" in caplog.text
    caplog.clear()
    SFTDataset(rows, chatml, 1000)
    assert caplog.text == ""
