"""Pixels of stored images: read once, and kept up to a limit."""

from __future__ import annotations
import pytest
import torch
from areal_lite.data.vision.image_store import ImagePixels
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_vlm import save_tiny_vlm
from tests.fixtures.vision_sequences import Pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Pictures:
    folder = tmp_path_factory.mktemp("vlm")
    return Pictures(save_tiny_vlm(folder), folder / "images")


def test_the_latest_images_are_kept_within_the_limit(pictures: Pictures) -> None:
    images = [pictures.image(seed).sha256 for seed in range(3)]
    size = sum(tensor.nbytes for tensor in pictures.pixels(images[0]).values())
    pixels = ImagePixels(pictures.store, pictures.processor, max_bytes=2 * size)
    first, second = pixels(images[0]), pixels(images[1])
    assert pixels(images[0]) is first
    pixels(images[2])  # the second was used longest ago
    assert pixels(images[0]) is first
    again = pixels(images[1])
    assert again is not second
    assert torch.equal(again["pixel_values"], second["pixel_values"])


def test_one_image_is_kept_however_large_it_is(pictures: Pictures) -> None:
    sha256 = pictures.image(0).sha256
    pixels = ImagePixels(pictures.store, pictures.processor, max_bytes=1)
    assert pixels(sha256) is pixels(sha256)


def test_a_missing_image_is_named(pictures: Pictures) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        pictures.pixels("0" * 64)
