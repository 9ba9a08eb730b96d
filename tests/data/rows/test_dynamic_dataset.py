"""A generator's rows are added at the start and after each step; a resumed run restores them."""

import json
import orjson
import pytest
from areal_lite.config.dataset_config import ClassConfig, DatasetConfig
from areal_lite.data.rows.prompt_rows import AbstractDataGenerator
from areal_lite.data.rows.rl_dataset import DynamicGenDataset
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_model import build_tiny_model


class Counting(AbstractDataGenerator):
    """Makes one row at a time, holding the number of rows so far."""

    def generate(self, dataset):
        return [{self.config.prompt_key: f"new {len(dataset)}"}]


class Scripted(AbstractDataGenerator):
    """Returns what a test has set."""

    rows: list = []

    def generate(self, dataset):
        return self.rows


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"prompt": text}) + b"\n" for text in ("a", "b")))

    def make(name="Counting", tokenizer=None, **settings):
        datagen = ClassConfig(path=__name__, name=name)
        config = DatasetConfig(path=str(path), cache_dir=str(tmp_path / "cache"), datagen=datagen, **settings)
        return DynamicGenDataset(str(path), tokenizer, config)

    return make


@pytest.fixture
def script(monkeypatch):
    return lambda *rows: monkeypatch.setattr(Scripted, "rows", list(rows))


def texts(dataset):
    return [row["prompt"] for row in dataset.rows]


def test_rows_are_generated_at_the_start_and_after_each_batch(make):
    # V63, V-B5
    dataset = make()
    assert texts(dataset) == ["a", "b", "new 2"]
    rows = dataset.rows
    dataset.on_batch_end(batch={"anything": 1})
    dataset.on_batch_end(batch=None)
    assert texts(dataset) == ["a", "b", "new 2", "new 3", "new 4"]
    assert len(dataset) == 5
    assert dataset.rows is rows  # whoever draws from them sees the new ones
    assert rows[-1] == {"prompt": "new 4"}
    assert rows[1:3] == [{"prompt": "b"}, {"prompt": "new 2"}]
    assert rows.__getitems__([4, 0]) == [{"prompt": "new 4"}, {"prompt": "a"}]
    with pytest.raises(IndexError):
        rows[5]


def test_a_resumed_run_has_its_generated_rows(make, script):
    # V63
    dataset = make()
    dataset.on_batch_end(None)
    state = json.loads(json.dumps(dataset.state_dict()))
    script({"prompt": "of another start"})
    resumed = make("Scripted")
    resumed.load_state_dict(state)
    assert texts(resumed) == texts(dataset)
    resumed.on_batch_end(None)
    assert texts(resumed) == [*texts(dataset), "of another start"]
    assert resumed.state_dict() != state == dataset.state_dict()


def test_new_rows_are_filtered_and_may_be_empty(make, script, tmp_path):
    # V5
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path / "model"))
    script({"prompt": "x" * 99}, {"prompt": "c"})
    dataset = make("Scripted", tokenizer, max_prompt_length=60, filter_overlong_prompts=True)
    assert texts(dataset) == ["a", "b", "c"]
    assert dataset.dropped == {"too long": 1}
    assert len(dataset[2]["input_ids"]) == 60
    script({"prompt": "x" * 99})
    dataset.on_batch_end(None)
    script()
    dataset.on_batch_end(None)
    assert texts(dataset) == ["a", "b", "c"]
    assert dataset.dropped == {"too long": 2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "datagen Scripted, row 1: a text: each row must be an object"),
        ({"prompts": "x"}, r"row 1: its columns are \['prompts'\], but .*rows.jsonl has \['prompt'\]"),
        ({"prompt": "x", "when": object()}, "cannot save its rows.*use JSON values"),
    ],
)
def test_a_value_that_is_not_a_row_is_refused(make, script, row, message):
    script(row)
    with pytest.raises(ConfigError, match=message):
        make("Scripted")


def test_a_generator_must_be_a_subclass(make):
    with pytest.raises(ConfigError, match="datagen: .* must be a subclass of .*AbstractDataGenerator"):
        make("DatasetConfig")


def plain_texts():
    return ["a", "b"]


def test_rows_that_are_texts_have_no_columns_to_generate():
    path, datagen = f"{__name__}.plain_texts", ClassConfig(path=__name__, name="Counting")
    with pytest.raises(ConfigError, match=rf"and those of {path} are texts: remove datagen"):
        DynamicGenDataset(path, None, DatasetConfig(path=path, datagen=datagen))


def test_without_a_generator_the_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="datagen is null: set the path"):
        DynamicGenDataset("x.jsonl", None, DatasetConfig(path="x.jsonl"))
