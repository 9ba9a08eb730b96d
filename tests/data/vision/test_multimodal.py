"""Placeholders, images and videos of a row."""

from __future__ import annotations
import base64
import copy
import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers.processors import TemplateProcessing
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.chat.prompt_encoder import PromptEncoder
from areal_lite.data.vision.multimodal import (
    MultimodalEncoder,
    build_messages,
    load_images,
    load_videos,
    media_values,
    processor_inputs,
)
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_vlm import IMAGE_ID, VIDEO_ID, build_tiny_processor, build_tiny_vlm

RED = (200, 10, 20)
ROWS = DatasetConfig(path="")


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    return build_messages(row, DatasetConfig(path=""))


def picture(size: tuple[int, int] = (16, 8), color: tuple[int, int, int] = RED) -> Image.Image:
    return Image.new("RGB", size, color)


def png(image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, "PNG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def processor() -> Any:
    return build_tiny_processor()


def test_a_message_of_tool_calls_alone_stays_without_content() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": []}
    messages = messages_of({"prompt": [{"role": "user", "content": "<image>"}, calls], "images": [picture()]})
    assert messages[0]["content"] == [{"type": "image"}]
    assert messages[1] == calls


def test_placeholders_become_parts_in_order() -> None:
    """V6."""
    row = {
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<image>Left <image> or right <video>?", "name": "me"},
        ],
        "images": ["a.png", "b.png"],
        "videos": [["c.png"]],
    }
    assert messages_of(row) == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "Left "},
                {"type": "image"},
                {"type": "text", "text": " or right "},
                {"type": "video"},
                {"type": "text", "text": "?"},
            ],
            "name": "me",
        },
    ]


@given(st.lists(st.sampled_from(["<image>", "<video>", "a", "<", "image>", " "]), max_size=8))
def test_joining_the_parts_gives_the_text_back(words: list[str]) -> None:
    """V6."""
    text = "".join(words)
    row = {
        "prompt": text,
        "images": ["x"] * text.count("<image>"),
        "videos": [["x"]] * text.count("<video>"),
    }
    (message,) = messages_of(row)
    content = message["content"]
    if isinstance(content, list):
        content = "".join(part.get("text") or f"<{part['type']}>" for part in content)
    assert content == text


@pytest.mark.parametrize("extra", [{}, {"images": None, "videos": None}])
def test_placeholders_are_text_if_the_row_has_no_such_column(extra: dict[str, Any]) -> None:
    row = {"prompt": "what does <image> mean in <video>?", **extra}
    assert messages_of(row) == [{"role": "user", "content": row["prompt"]}]


def test_text_placeholders_need_a_column_of_their_kind() -> None:
    (message,) = messages_of({"prompt": "<image> is no <video>", "images": ["a.png"]})
    assert message["content"] == [{"type": "image"}, {"type": "text", "text": " is no <video>"}]


def test_parts_are_kept_without_keys_that_are_none() -> None:
    parts = [{"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": "b", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]}
    before = copy.deepcopy(row)
    assert messages_of(row) == [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    assert row == before


@given(st.integers(0, 3), st.integers(0, 3))
def test_placeholders_must_match_the_images(placeholders: int, images: int) -> None:
    """V6."""
    row = {"prompt": "x" + "<image>" * placeholders, "images": ["a.png"] * images}
    if placeholders == images:
        messages_of(row)
    else:
        with pytest.raises(ConfigError, match=f"{placeholders} image placeholders, .*has {images}:"):
            messages_of(row)


def test_placeholders_must_match_the_videos() -> None:
    with pytest.raises(ConfigError, match="the prompt has 1 video placeholders, but 'videos' has 2:"):
        messages_of({"prompt": "<video>", "videos": [["a"], ["b"]]})


@pytest.mark.parametrize("prompt", [None, 3, ["text"], {"role": "user"}])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError, match="it must be text or a list of messages"):
        messages_of({"prompt": prompt})


def test_images_come_in_the_order_of_their_parts_from_message_or_column() -> None:
    row = {
        "prompt": [
            {"role": "user", "content": [{"type": "image", "image": "inline"}, {"type": "image"}]},
            {"role": "user", "content": "<image>"},
        ],
        "images": ["first", "second"],
    }
    assert media_values(messages_of(row), row, DatasetConfig(path="")) == {"image": ["inline", "first", "second"]}


def test_a_column_may_hold_a_single_image() -> None:
    for images, expected in (("a.png", {"image": ["a.png"]}), (None, {})):
        row = {"prompt": "<image>" if images else "none", "images": images}
        assert media_values(messages_of(row), row, DatasetConfig(path="")) == expected


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/red.png"
        self.send_response(200 if found else 404)
        self.end_headers()
        if found:
            self.wfile.write(png())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_every_form_of_an_image_becomes_the_same_rgb_image(tmp_path: Path, server: str) -> None:
    file = tmp_path / "red.png"
    file.write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    rows = DatasetConfig(path=str(tmp_path), image_urls=True)
    images = load_images(
        [
            picture(),
            picture().convert("RGBA"),
            file,
            str(file),
            f"file://{file}",
            png(),
            {"bytes": png(), "path": "gone.png"},
            {"bytes": None, "path": str(file)},
            f"data:image/png;base64,{encoded}",
            f"{server}/red.png",
            np.array(picture()),
            "red.png",
        ],
        rows,
    )
    assert {(image.mode, image.size, image.getpixel((3, 3))) for image in images} == {("RGB", (16, 8), RED)}


def test_grey_images_become_rgb() -> None:
    (image,) = load_images([np.full((4, 6), 7, np.uint8)], ROWS)
    assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (6, 4), (7, 7, 7))


def test_an_image_is_rotated_by_its_orientation_tag() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    (image,) = load_images([png(exif=exif)], ROWS)
    assert image.size == (8, 16)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("gone.png", "'gone.png' .*in a folder of the dataset: a row names images by their path"),
        ("http://127.0.0.1:9/red.png", "a URL is not fetched: set image_urls"),
        (b"no image", "a bytes .*cannot identify"),
        (png(Image.effect_noise((64, 64), 50))[:999], "a bytes .*truncated"),
        ("data:image/png;base64,???", "not base64"),
        ("data:image/png,abc", "'data:image/png,abc' is no data URL"),
        (3.5, "a float is not an image"),
        (None, "a NoneType is not an image"),
        ({"bytes": None, "path": None}, "a dict"),
        (np.zeros((2, 2, 3)), r"dtype float64 and shape \[2, 2, 3\] .its dtype is float64, not uint8"),
        (np.zeros((2, 2, 7), np.uint8), r"shape \[2, 2, 7\]"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_an_image_is_named(value: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=f"image 1 of 2 cannot be read from .*{what}"):
        load_images([picture(), value], ROWS)


@pytest.mark.parametrize("name", ["../secret.png", "{outside}/secret.png", "link.png", "file://{outside}/secret.png"])
def test_a_row_reads_no_file_outside_the_folder_of_its_data(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret.png").write_bytes(png())
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "data" / "rows.jsonl").touch()
    for path in (f"{tmp_path}/data/rows.jsonl", f"train[:3]@{tmp_path}/data", f"{tmp_path}/data/*.jsonl"):
        with pytest.raises(ConfigError, match=f"in {tmp_path}/data: .*none outside it"):
            load_images([name.format(outside=tmp_path)], DatasetConfig(path=path))


def test_an_image_that_cannot_be_downloaded_is_named(server: str) -> None:
    with pytest.raises(ConfigError, match="image 0 of 1 .*gone.png' .HTTP Error 404"):
        load_images([f"{server}/gone.png"], DatasetConfig(path="", image_urls=True))


def test_images_without_pillow_are_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="images need pillow: pip install pillow"):
        load_images([b""], ROWS)


def test_a_video_is_a_list_of_frames() -> None:
    array = np.stack([np.full((4, 6, 3), n, np.uint8) for n in range(3)])
    first, second = load_videos([[picture(), png()], array], ROWS)
    assert [frame.getpixel((0, 0)) for frame in first] == [RED, RED]
    assert [frame.getpixel((0, 0)) for frame in second] == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize("value", ["film.mp4", b"bytes", {"path": "film.mp4"}, [], np.zeros((4, 6, 3))])
def test_a_video_file_is_refused_with_a_hint(value: Any) -> None:
    with pytest.raises(ConfigError, match="video 0 of 1 is .*: video files are not decoded here, .*at least one frame"):
        load_videos([value], ROWS)


def test_the_processor_writes_as_many_placeholders_as_there_are_patches(processor: Any) -> None:
    text = "a<|image_pad|>b<|video_pad|>c<|image_pad|>"
    images = [picture((16, 8)), picture((24, 16))]
    inputs = processor_inputs(processor, text, {"image": images, "video": [[picture()] * 4]})
    ids = inputs["input_ids"][0]
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 6]]
    assert inputs["video_grid_thw"].tolist() == [[2, 2, 4]]
    assert (int((ids == IMAGE_ID).sum()), int((ids == VIDEO_ID).sum())) == (2 + 6, 4)
    assert inputs["pixel_values"].shape[0] == 8 + 24
    assert all(isinstance(value, torch.Tensor) for value in inputs.values())


def test_the_processor_adds_no_special_tokens_to_those_of_the_text() -> None:
    eager = build_tiny_processor()
    eager.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    assert eager.tokenizer("a")["input_ids"][0] == 0
    assert processor_inputs(eager, "<|image_pad|>", {"image": [picture()]})["input_ids"].tolist() == [[IMAGE_ID] * 2]


def test_inputs_that_the_processor_rejects_are_an_error(processor: Any) -> None:
    with pytest.raises(ConfigError, match="rejects a text with 1 images and 0 videos: .*"):
        processor_inputs(processor, "no placeholder", {"image": [picture()]})


def test_a_prompt_holds_the_frames_of_its_video(processor: Any) -> None:
    encoder = MultimodalEncoder(DatasetConfig(path=""), processor.tokenizer, processor=processor)
    prompt = encoder.encode({"prompt": [{"role": "user", "content": "<video>?"}], "videos": [[picture()] * 4]})
    assert [frame.getpixel((0, 0)) for frame in prompt.media["multi_modal_data"]["video"][0]] == [RED] * 4
    assert prompt.media["multi_modal_inputs"]["video_grid_thw"].tolist() == [[2, 2, 4]]
    assert prompt.input_ids.count(VIDEO_ID) == 4


def test_a_prompt_with_images_needs_a_processor_and_is_not_truncated(processor: Any) -> None:
    row = {"prompt": "<image>?", "images": [picture()]}
    template = {"chat_template": processor.chat_template}
    text_only = PromptEncoder(DatasetConfig(path="", apply_chat_template_kwargs=template), processor.tokenizer)
    with pytest.raises(ConfigError, match="the row has images or videos, which runs do not read: remove them"):
        text_only.encode(row)
    encoder = MultimodalEncoder(
        DatasetConfig(path="", max_prompt_length=3, truncation="left"), processor.tokenizer, processor=processor
    )
    with pytest.raises(ValueError, match="max_prompt_length is 3, and images cannot be truncated"):
        encoder.forms(encoder.encode(row))


def test_an_image_row_has_positions_on_three_axes(tmp_path: Path, processor: Any) -> None:
    """V11, V13: the model places padded tokens as the dataset does."""
    from areal_lite.config.dataset_config import DatasetConfig
    from areal_lite.data.rows.rl_dataset import RLHFDataset

    picture((24, 16)).save(tmp_path / "red.png")
    row = {
        "prompt": [{"role": "user", "content": "<image>Which colour?"}],
        "images": [str(tmp_path / "red.png")],
        "answer": "red",
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row))
    config = DatasetConfig(path=str(rows), max_prompt_length=64, cache_dir=str(tmp_path))
    (item,) = RLHFDataset(str(rows), processor.tokenizer, config, processor=processor)

    ids, mask = item["input_ids"], item["attention_mask"]
    assert [image.getpixel((0, 0)) for image in item["multi_modal_data"]["image"]] == [RED]
    assert item["multi_modal_inputs"]["image_grid_thw"].tolist() == [[1, 4, 6]]
    assert item["multi_modal_inputs"]["pixel_values"].shape[0] == 24
    assert int((ids == IMAGE_ID).sum()) == 6
    expected, _ = build_tiny_vlm().model.get_rope_index(
        ids[None],
        mm_token_type_ids=(ids == IMAGE_ID).long()[None],
        image_grid_thw=item["multi_modal_inputs"]["image_grid_thw"],
        attention_mask=mask[None],
    )
    assert int(mask[0]) == 0  # padded on the left
    assert item["position_ids"].shape == (4, 64)
    assert torch.equal(item["position_ids"][1:], expected[:, 0])
    assert item["answer"] == "red"
    assert "images" not in item
