"""Rows with images as items: spans in ids, whole images, and files in the run's store."""

from __future__ import annotations
import pickle
from pathlib import Path
from typing import Any
import pytest
import torch
from PIL import Image
from areal_lite.api.image_span import ImageSpan
from areal_lite.config.supervised_config import SFTDatasetConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.supervised.image_rows import ImageTokens
from areal_lite.data.supervised.preference_dataset import PreferenceDataset
from areal_lite.data.supervised.sft_dataset import SFTDataset
from areal_lite.data.supervised.tokenized_dataset import Item
from areal_lite.data.vision.image_encoder import ImageEncoder, image_encoder
from areal_lite.errors import ConfigError
from areal_lite.trainer.supervised.supervised_trainer import masked_sequence
from tests.fixtures.tiny_vlm import IMAGE_ID, save_tiny_vlm

RED, BLUE = (Image.new("RGB", size, colour) for size, colour in (((24, 16), "red"), ((16, 8), "blue")))
ANSWER = {"role": "assistant", "content": "red"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def encoder(model: Path, tmp_path: Path) -> ImageEncoder:
    made = image_encoder(str(model), load_tokenizer(str(model)), tmp_path)
    assert made is not None
    return made


def dataset(model: Path, encoder: ImageEncoder | None, *rows: dict[str, Any], max_length: int = 200) -> SFTDataset:
    return SFTDataset(list(rows), load_tokenizer(str(model)), max_length, images=encoder)


def only(items: SFTDataset) -> Item:
    assert len(items) == 1
    return items[0]


def row(*content: Any, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, ANSWER], **columns}


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


TEXT = {"type": "text", "text": "hue?"}


def test_images_are_spans_that_do_not_train(model: Path, encoder: ImageEncoder) -> None:
    item = only(dataset(model, encoder, row(part(RED), TEXT, part(BLUE))))
    ids, mask = item["input_ids"], item["loss_mask"]
    first, second = item["images"]
    assert (first.length, first.grid, second.length, second.grid) == (6, (1, 4, 6), 2, (1, 2, 4))
    assert [i for i, id in enumerate(ids.tolist()) if id == IMAGE_ID] == [
        *range(first.offset, first.end), *range(second.offset, second.end)
    ]  # fmt: skip
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.decode(ids[mask.bool()]) == "red<|im_end|>"
    masked_sequence(ids, mask, group=0)
    assert {path.stem for path in encoder.store.folder.iterdir()} == {first.sha256, second.sha256}


def test_a_column_gives_the_item_images_a_text(model: Path, encoder: ImageEncoder) -> None:
    texts = {"messages": [{"role": "user", "content": "<image>hue?<image>"}, ANSWER], "images": [RED, BLUE]}
    items = dataset(model, encoder, row(part(RED), TEXT, part(BLUE)), texts)
    assert torch.equal(items[0]["input_ids"], items[1]["input_ids"])
    assert items[0]["images"] == items[1]["images"]


def test_text_alone_has_no_columns_of_images(model: Path, encoder: ImageEncoder) -> None:
    item = only(dataset(model, encoder, row(TEXT)))
    assert "images" not in item


def test_several_turns_have_the_images_before_them(model: Path, encoder: ImageEncoder) -> None:
    turns = [*row(part(RED))["messages"], *row(TEXT, part(BLUE))["messages"]]
    item = only(dataset(model, encoder, {"messages": turns}))
    assert [span.length for span in item["images"]] == [6, 2]
    assert int(item["loss_mask"].sum()) == 2 * len("red.")


def test_no_cut_goes_through_an_image(model: Path, encoder: ImageEncoder) -> None:
    turns = [*row(TEXT)["messages"], *row(part(RED))["messages"]]
    whole = only(dataset(model, encoder, {"messages": turns}))
    (span,) = whole["images"]
    cut = only(dataset(model, encoder, {"messages": turns}, max_length=span.end - 1))
    assert len(cut["input_ids"]) == span.offset
    assert "images" not in cut
    assert cut["truncated"] == 1
    tokens = ImageTokens([1] * 9, [True] * 9, (ImageSpan(2, 3, "a", (1, 1, 1)), ImageSpan(6, 2, "b", (1, 1, 1))))
    assert [len(tokens.cut(n).input_ids) for n in range(1, 10)] == [1, 2, 2, 2, 5, 6, 6, 8, 9]
    assert [len(tokens.cut(n).images) for n in (4, 5, 7, 8)] == [0, 1, 1, 2]


def test_a_row_whose_answer_is_beyond_the_limit_is_skipped(model: Path, encoder: ImageEncoder) -> None:
    items = dataset(model, encoder, row(TEXT), row(part(RED), part(RED), part(RED), TEXT), max_length=40)
    assert len(items) == 1
    assert items.dropped == {"no trained token within max_length": 1}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (row({"type": "text", "text": "<|image_pad|>"}), r"a text spells '<\|image_pad\|>'"),
        (row({"type": "video", "video": [RED]}), "a part of type 'video'"),
        (row({"type": "image_url", "image_url": {"url": "data:"}}), "a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": [part(RED)]}]}, "an answer"),
        (row(part(b"no image")), "cannot be read"),
        ({"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": [RED, RED]}, "has 2"),
    ],
)
def test_bad_images_are_refused_before_training(
    model: Path, encoder: ImageEncoder, wrong: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        dataset(model, encoder, wrong)


def test_a_model_of_text_refuses_rows_with_images(model: Path) -> None:
    for wrong in (row(part(RED)), {**row(TEXT), "images": [RED]}):
        with pytest.raises(ConfigError, match="only SFT of a model that reads images"):
            dataset(model, None, wrong)


def test_preference_pairs_refuse_images(model: Path, encoder: ImageEncoder) -> None:
    pair = {"prompt": row(part(RED))["messages"][:1], "chosen": "red", "rejected": "blue"}
    with pytest.raises(ConfigError, match="only SFT of a model that reads images"):
        PreferenceDataset([pair], load_tokenizer(str(model)), 100, images=encoder)


def test_an_index_is_of_one_image_processor(model: Path, encoder: ImageEncoder) -> None:
    assert "max_pixels" in encoder.processor.settings or "longest_edge" in encoder.processor.settings


def test_workers_get_the_encoder(model: Path, encoder: ImageEncoder) -> None:
    rows = dataset(model, encoder, row(part(RED)))
    assert pickle.loads(pickle.dumps(rows))[0]["images"] == rows[0]["images"]


def test_another_column_may_have_the_images(model: Path, encoder: ImageEncoder) -> None:
    config = SFTDatasetConfig(path="", max_length=100, image_key="pictures")
    texts = {"messages": [{"role": "user", "content": "<image>hue?"}, ANSWER], "pictures": [RED]}
    rows = SFTDataset([texts], load_tokenizer(str(model)), config=config, images=encoder)
    assert len(only(rows)["images"]) == 1
