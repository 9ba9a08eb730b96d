"""A row's prompt becomes tensors of one shape; dropped rows are counted, and errors name their row."""

import logging
import pickle
import orjson
import pytest
import torch
from torch.utils.data import Dataset
from areal_lite.config.dataset_config import ClassConfig, DatasetConfig
from areal_lite.data.rows.prompt_rows import AbstractDataGenerator
from areal_lite.data.rows.rl_dataset import DynamicGenDataset, RLHFDataset, create_rl_dataset
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_model import CHAT_TEMPLATE, build_tiny_model

TOOLS_TEMPLATE = "{{ tools | tojson if tools else '-' }}|{{ mood }}|{{ messages[0]['content'] }}"
FUSSY_TEMPLATE = "{{ raise_exception('no systems') if messages[0]['role'] == 'system' else messages[0]['content'] }}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(build_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def write(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def config(tmp_path):
    return lambda **settings: DatasetConfig(path="unused", cache_dir=str(tmp_path / "cache"), **settings)


def rendered(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def prompts(*texts):
    return [{"prompt": text} for text in texts]


# --- items


def test_an_item_has_left_padded_tensors_and_the_rest_of_its_row(write, config, tokenizer):
    # V6, V8, V9, V10, V11, V12
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "data_source": "gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "index": 7,
            "split": "train",
            "tools_kwargs": {"a": 1},
            "interaction_kwargs": {"b": 2},
        },
    }
    dataset = RLHFDataset(write(row), tokenizer, config(max_prompt_length=64))
    item = dataset[0]
    ids = tokenizer(rendered("hi"), add_special_tokens=False)["input_ids"]
    padding = 64 - len(ids)
    assert item["input_ids"].tolist() == [tokenizer.pad_token_id] * padding + ids
    assert item["attention_mask"].tolist() == [0] * padding + [1] * len(ids)
    assert item["position_ids"].tolist() == [0] * padding + list(range(len(ids)))
    assert {item[key].dtype for key in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert item["raw_prompt_ids"] == ids
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (7, {"a": 1}, {"b": 2})
    for key in ("data_source", "reward_model", "extra_info"):
        assert item[key] == row[key]
    assert not {"prompt", "raw_prompt", "full_prompts", "multi_modal_data"} & item.keys()
    assert dataset.rows[0] == row


@pytest.mark.parametrize("extra", [{}, {"extra_info": None}, {"extra_info": {"index": None}}])
def test_extra_info_has_defaults(write, config, tokenizer, extra):
    # V12
    item = RLHFDataset(write({"prompt": "hi"} | extra), tokenizer, config())[0]
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (0, {}, {})


def test_extra_info_that_is_not_a_dict_is_an_error_with_its_row(write, config, tokenizer):
    # V12
    dataset = RLHFDataset(write({"prompt": "hi", "extra_info": "x"}), tokenizer, config())
    with pytest.raises(ConfigError, match="row 0: extra_info is 'x': it must be a dict"):
        dataset[0]


def test_without_a_length_nothing_is_padded_or_truncated(write, config, tokenizer):
    item = RLHFDataset(write(*prompts("x" * 300)), tokenizer, config())[0]
    assert item["input_ids"].tolist() == item["raw_prompt_ids"]
    assert item["position_ids"].tolist() == list(range(len(item["raw_prompt_ids"])))


def test_a_text_prompt_is_one_user_message(write, config, tokenizer):
    # V8, V11
    item = RLHFDataset(write(*prompts("hi")), tokenizer, config(return_raw_chat=True, return_full_prompt=True))[0]
    assert item["raw_prompt"] == [{"role": "user", "content": "hi"}]
    assert item["full_prompts"] == rendered("hi")


def texts():
    return ["hi", [{"role": "user", "content": "hi"}], {"prompt": "hi"}]


def test_d10_d11_a_row_may_be_its_prompt_alone(config, tokenizer):
    dataset = RLHFDataset(f"{__name__}.texts", tokenizer, config(max_prompt_length=64, filter_overlong_prompts=True))
    first, second, third = (dataset[index]["raw_prompt_ids"] for index in range(3))
    assert first == tokenizer("hi", add_special_tokens=False)["input_ids"]
    assert second == third == tokenizer(rendered("hi"), add_special_tokens=False)["input_ids"]


def test_without_the_chat_template_a_prompt_is_used_as_it_is(write, config, tokenizer):
    plain = config(
        apply_chat_template=False, max_prompt_length=2, filter_overlong_prompts=True, return_full_prompt=True
    )
    dataset = RLHFDataset(write(*prompts("hi", "longer")), tokenizer, plain)
    assert [dataset[0]["full_prompts"], len(dataset[0]["raw_prompt_ids"]), len(dataset)] == ["hi", 2, 1]
    messages = write({"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(ConfigError, match="row 0: apply_chat_template is false, and the prompt in 'prompt' is .*list"):
        RLHFDataset(messages, tokenizer, config(apply_chat_template=False))[0]


def test_null_keys_added_by_a_table_are_not_rendered(write, config, tokenizer):
    # V6
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    item = RLHFDataset(write({"prompt": [message]}), tokenizer, config(return_raw_chat=True))[0]
    assert item["raw_prompt"] == [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]


def test_the_tokenizer_adds_no_special_tokens_to_those_of_the_template(write, config, tokenizer):
    # V8
    from tokenizers.processors import TemplateProcessing

    eager = pickle.loads(pickle.dumps(tokenizer))
    eager.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert eager("a")["input_ids"][0] == 0
    path = write(*prompts("hi"))
    items = [RLHFDataset(path, each, config())[0] for each in (eager, tokenizer)]
    assert items[0]["raw_prompt_ids"] == items[1]["raw_prompt_ids"]
    as_they_are = [RLHFDataset(path, each, config(apply_chat_template=False))[0] for each in (eager, tokenizer)]
    assert as_they_are[0]["raw_prompt_ids"] == as_they_are[1]["raw_prompt_ids"]


@pytest.mark.parametrize("truncation", ["left", "right", "middle"])
def test_a_long_prompt_is_truncated_as_configured(write, config, tokenizer, truncation):
    # V9, V11
    full = tokenizer(rendered("abcdefghij"), add_special_tokens=False)["input_ids"]
    item = RLHFDataset(write(*prompts("abcdefghij")), tokenizer, config(max_prompt_length=9, truncation=truncation))[0]
    kept = {"left": full[-9:], "right": full[:9], "middle": full[:4] + full[-5:]}[truncation]
    assert item["input_ids"].tolist() == item["raw_prompt_ids"] == kept


def test_a_long_prompt_is_an_error_with_its_row_by_default(write, config, tokenizer):
    # V9
    dataset = RLHFDataset(write(*prompts("a", "x" * 99)), tokenizer, config(max_prompt_length=50))
    assert len(dataset[0]["input_ids"]) == 50
    with pytest.raises(ConfigError, match=r"row 1: the prompt has \d+ tokens, and the maximum is 50"):
        dataset[1]


def test_the_template_gets_its_kwargs_and_the_tools_of_the_row(write, config, tokenizer):
    # V8
    schema = {"name": "f", "parameters": {"x": {"type": "int"}}}
    rows = [
        {"prompt": "hi", "schemas": [schema, {"name": "g", "parameters": None}]},
        {"prompt": "hi", "schemas": None},
    ]
    settings = {"tools_key": "schemas", "return_full_prompt": True}
    kwargs = {"chat_template": TOOLS_TEMPLATE, "mood": "glad"}
    dataset = RLHFDataset(write(*rows), tokenizer, config(apply_chat_template_kwargs=kwargs, **settings))
    tools, mood, content = dataset[0]["full_prompts"].split("|")
    assert orjson.loads(tools) == [schema, {"name": "g"}]
    assert (mood, content) == ("glad", "hi")
    assert dataset[1]["full_prompts"] == "-|glad|hi"
    kwargs["tools"] = [{"name": "h"}]
    dataset = RLHFDataset(write(*rows[1:]), tokenizer, config(apply_chat_template_kwargs=kwargs, **settings))
    assert orjson.loads(dataset[0]["full_prompts"].split("|")[0]) == [{"name": "h"}]


def test_tools_may_be_json_text(write, config, tokenizer):
    settings = {"apply_chat_template_kwargs": {"chat_template": TOOLS_TEMPLATE}, "return_full_prompt": True}
    dataset = RLHFDataset(
        write({"prompt": "a", "tools": '[{"name": "f"}]'}, {"prompt": "b", "tools": "["}),
        tokenizer,
        config(**settings),
    )
    assert orjson.loads(dataset[0]["full_prompts"].split("|")[0]) == [{"name": "f"}]
    with pytest.raises(ConfigError, match="row 1: 'tools' is the text .*, which is not JSON"):
        dataset[1]


def test_tools_that_the_template_does_not_render_are_refused_or_written_into_the_system_prompt(
    write, config, tokenizer
):
    kwargs = {"chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}
    settings = {"apply_chat_template_kwargs": kwargs, "return_full_prompt": True}
    path = write({"prompt": "a", "tools": [{"name": "f"}]})
    with pytest.raises(ConfigError, match="does not render tools.*set tools_in_system_prompt"):
        RLHFDataset(path, tokenizer, config(**settings))[0]
    dataset = RLHFDataset(path, tokenizer, config(tools_in_system_prompt=True, **settings))
    assert dataset[0]["full_prompts"].startswith("[system]# Tools")
    assert '<tools>\n{"name": "f"}\n</tools>' in dataset[0]["full_prompts"]


def test_without_a_chat_template_the_error_has_the_fix(write, config, tokenizer):
    # V7
    bare = pickle.loads(pickle.dumps(tokenizer))
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template for messages: use the tokenizer of the model's chat"):
        RLHFDataset(write(*prompts("hi")), bare, config())
    kwargs = {"chat_template": CHAT_TEMPLATE}
    RLHFDataset(write(*prompts("hi")), bare, config(apply_chat_template_kwargs=kwargs))[0]


def test_reserved_template_variables_are_refused(write, config, tokenizer):
    with pytest.raises(ConfigError, match="has tokenize, which is reserved: remove it"):
        RLHFDataset(write(*prompts("hi")), tokenizer, config(apply_chat_template_kwargs={"tokenize": True}))


def test_items_survive_worker_processes(write, config, tokenizer):
    dataset = RLHFDataset(write(*prompts("hi", "ho")), tokenizer, config(max_prompt_length=50))
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1]["raw_prompt_ids"] == dataset[1]["raw_prompt_ids"]


# --- rows


def test_raw_rows_need_no_tokenizer_but_items_do(write, config):
    dataset = RLHFDataset(write(*prompts("hi")), None, config(max_prompt_length=3))
    assert list(dataset.rows) == prompts("hi")
    with pytest.raises(ConfigError, match="encoding prompts needs a tokenizer: pass one"):
        dataset[0]
    with pytest.raises(ConfigError, match="filter_overlong_prompts needs a tokenizer"):
        RLHFDataset(write(*prompts("hi")), None, config(max_prompt_length=3, filter_overlong_prompts=True))


def test_a_wrong_column_names_the_columns_and_a_close_one(write, config, tokenizer):
    path = write({"prompt": "a", "answer": "b"})
    for settings, setting in (
        (config(prompt_key="prompts"), "prompt_key"),
        (config(label_key="prompts"), "label_key"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"no column 'prompts' \({setting}\); .*columns are \['answer', 'prompt'\]; did you mean 'prompt'\?",
        ):
            RLHFDataset(path, None, settings)


def test_raw_rows_need_no_prompt_unless_its_column_is_named(write, config, tokenizer):
    path = write({"question": "a"})
    assert RLHFDataset(path, None, config()).rows[0] == {"question": "a"}
    with pytest.raises(ConfigError, match="no column 'prompt'"):
        RLHFDataset(path, tokenizer, config())


@pytest.mark.parametrize("bad", [None, [], [{"content": "x"}]])
@pytest.mark.parametrize("filtered", [True, False])
def test_a_prompt_that_is_neither_text_nor_messages_is_an_error_with_its_row(write, config, tokenizer, bad, filtered):
    path = write(*prompts([{"role": "user", "content": "hi"}], bad))
    with pytest.raises(ConfigError, match=r"row 1: the prompt in 'prompt'.*must be text or a list of messages"):
        RLHFDataset(path, tokenizer, config(max_prompt_length=99, filter_overlong_prompts=filtered))[1]


@pytest.mark.parametrize("max_samples", [0, -2])
def test_max_samples_below_one_is_refused(write, config, max_samples):
    with pytest.raises(ValueError, match=f"max_samples is {max_samples}: it must be 1 or more, or -1"):
        RLHFDataset(write(*prompts("hi")), None, config(), max_samples=max_samples)


# --- the overlong filter


@pytest.mark.parametrize("workers", [1, 2])
def test_prompts_over_the_limit_by_one_token_are_dropped_and_counted(write, config, tokenizer, caplog, workers):
    # V5, V-B2
    limit = len(tokenizer(rendered("abc"), add_special_tokens=False)["input_ids"])
    path = write(*prompts("abc", "abcd", "ab", "x" * 331))
    with caplog.at_level(logging.WARNING):
        dataset = RLHFDataset(
            path,
            tokenizer,
            config(max_prompt_length=limit, filter_overlong_prompts=True, filter_overlong_prompts_workers=workers),
        )
    assert [row["prompt"] for row in dataset.rows] == ["abc", "ab"]
    assert dataset.dropped == {"too long": 2}
    assert f"dropped 2 rows with prompts longer than {limit} tokens" in caplog.text
    assert all(len(item["input_ids"]) == limit for item in (dataset[0], dataset[1]))


def test_rows_the_template_fails_on_are_dropped_counted_and_logged(write, config, tokenizer, caplog):
    # V-B7
    bad = [{"role": "system", "content": "hi"}]
    path = write(*prompts(bad, [{"role": "user", "content": "hi"}], bad, [{"role": "user", "content": "x" * 99}]))
    settings = {
        "max_prompt_length": 50,
        "filter_overlong_prompts": True,
        "apply_chat_template_kwargs": {"chat_template": FUSSY_TEMPLATE},
    }
    with caplog.at_level(logging.WARNING):
        dataset = RLHFDataset(path, tokenizer, config(**settings))
    assert len(dataset) == 1
    assert dataset.dropped == {"template failed": 2, "too long": 1}
    assert "2 rows that failed; first: template failed: the chat template cannot write" in caplog.text
    assert "TemplateError: no systems" in caplog.text
    with pytest.raises(ConfigError, match=r"none of 2 rows is left.*and 2 rows that failed; first: .*no systems"):
        RLHFDataset(write(*prompts(bad, bad)), tokenizer, config(**settings))


def test_when_all_are_too_long_the_error_has_their_number(write, config, tokenizer):
    # S-B2
    with pytest.raises(ConfigError, match=r"none of 2 rows is left; dropped 2 rows .* longer than 3 tokens"):
        RLHFDataset(write(*prompts("a", "b")), tokenizer, config(max_prompt_length=3, filter_overlong_prompts=True))


def test_a_filter_without_a_limit_is_refused(write, config, tokenizer):
    with pytest.raises(ConfigError, match="filter_overlong_prompts is set, but max_prompt_length is not"):
        RLHFDataset(write(*prompts("a")), tokenizer, config(filter_overlong_prompts=True))


def made_rows(texts):
    return prompts(*texts)


def test_rows_of_a_function_are_filtered_too(config, tokenizer):
    # V5
    settings = {
        "max_prompt_length": 60,
        "filter_overlong_prompts": True,
        "kwargs": {"texts": ["x" * 99, "a"]},
    }
    dataset = RLHFDataset(f"{__name__}.made_rows", tokenizer, config(**settings))
    assert dataset.rows == prompts("a")


def uneven():
    return prompts("a") + [{"promt": "b"}]


def test_a_row_without_the_column_is_an_error_with_its_number(config, tokenizer):
    dataset = RLHFDataset(f"{__name__}.uneven", tokenizer, config())
    with pytest.raises(ConfigError, match=r"row 1: .*no column 'prompt'.*did you mean 'promt'"):
        dataset[1]


# --- which class


class Limited(Dataset):
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        self.given = (data_files, tokenizer, processor, config, max_samples)


class Unlimited(Dataset):
    def __init__(self, data_files, tokenizer, processor, config):
        pass


class Generator(AbstractDataGenerator):
    def generate(self, dataset):
        return prompts("new")


def named(name, path=__name__):
    return ClassConfig(path=path, name=name)


def test_the_default_is_rows_with_prompts_and_max_samples_limits_them(write, config):
    # V1, V2, V-B4
    path = write(*prompts("a", "b", "c"))
    for is_train in (True, False):
        dataset = create_rl_dataset(path, config(shuffle=False), None, None, is_train=is_train, max_samples=2)
        assert type(dataset) is RLHFDataset
        assert list(dataset.rows) == prompts("a", "b")
    assert len(create_rl_dataset(path, config(), None, None)) == 3
    assert len(create_rl_dataset(path, config(max_samples=1), None, None)) == 1


def test_without_a_seed_the_rows_are_those_of_seed_1(write, config):
    path, settings = write(*prompts(*"abcdefghij")), config(max_samples=3, datagen=named("Generator"))
    for make in (
        lambda **seed: RLHFDataset(path, None, settings, **seed),
        lambda **seed: DynamicGenDataset(path, None, settings, **seed),
        lambda **seed: create_rl_dataset(path, settings, None, None, **seed),
    ):
        assert list(make().rows) == list(make(seed=1).rows) != list(make(seed=2).rows)


def test_a_users_class_takes_precedence_over_a_generator(config):
    # V1
    settings = config(custom_cls=named("Limited"), datagen=named("Generator"))
    for is_train in (True, False):
        dataset = create_rl_dataset("p", settings, "t", "q", is_train=is_train, max_samples=2)
        assert type(dataset) is Limited
        assert dataset.given == ("p", "t", "q", settings, 2)


def test_a_generator_is_for_training_rows_only(write, config):
    # V1, V-B5
    settings = config(datagen=named("Generator"))
    path = write(*prompts("a", "b"))
    train = create_rl_dataset(path, settings, None, None, max_samples=1)
    assert type(train) is DynamicGenDataset
    assert len(train) == 2
    assert type(create_rl_dataset(path, settings, None, None, is_train=False)) is RLHFDataset


def test_a_class_is_loaded_once_from_a_file_or_module(tmp_path, config):
    # V1
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch.utils.data import Dataset\nclass Mine(Dataset):\n    def __init__(self, **given):\n"
        "        self.given = given\n"
    )
    settings = config(custom_cls=named("Mine", str(file)))
    first, second = (create_rl_dataset("p", settings, None, None, seed=3) for _ in range(2))
    assert first.given["seed"] == 3
    assert type(first) is type(second)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            named("AbstractDataGenerator"),
            "custom_cls: AbstractDataGenerator of .* must be a subclass of torch.utils.data",
        ),
        (named("made_rows"), "custom_cls: made_rows of .* must be a subclass of torch.utils.data.*Dataset"),
        (named("Limitted"), "did you mean .*Limited"),
        (named("X", "no_such_module"), "there is no module 'no_such_module'"),
        (named("X", "nosuch.py"), "custom_cls: no such file nosuch.py"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(config, cls, message):
    # V1
    with pytest.raises(ConfigError, match=message):
        create_rl_dataset("p", config(custom_cls=cls), None, None)


def test_max_samples_is_an_error_for_a_class_that_does_not_take_it(config):
    # V-B4
    settings = config(custom_cls=named("Unlimited"))
    create_rl_dataset("p", settings, None, None)
    with pytest.raises(ConfigError, match="Unlimited takes no max_samples: add the argument"):
        create_rl_dataset("p", settings, None, None, max_samples=5)
