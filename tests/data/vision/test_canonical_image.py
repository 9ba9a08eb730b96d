"""The canonical form of an image, its limits, and where it is stored."""

from __future__ import annotations
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from areal_lite.data.vision import canonical_image as subject
from areal_lite.data.vision import image_source
from areal_lite.data.vision.canonical_image import ImageError, canonical_image
from areal_lite.data.vision.image_processor import ImageProcessor, load_image_processor
from areal_lite.data.vision.image_store import ImageStore
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_vlm import MERGE, build_tiny_processor


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("qwen")
    build_tiny_processor().image_processor.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    return load_image_processor(str(folder))


@pytest.fixture(scope="module")
def idefics(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("idefics")
    return load_image_processor(str(save_idefics(folder)))


def save_idefics(folder: Path, **given: Any) -> Path:
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    options: dict[str, Any] = {"do_image_splitting": False, "max_image_size": {"longest_edge": 16}} | given
    Idefics3ImageProcessorPil(size={"longest_edge": 64}, **options).save_pretrained(folder)
    config = {"model_type": "idefics3", "scale_factor": 2, "vision_config": {"image_size": 16, "patch_size": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=40, deadline=None)
@given(width=st.integers(1, 90), height=st.integers(1, 90), seed=st.integers(0, 3))
def test_a_processor_gives_the_same_pixels_for_an_image_and_its_canonical_form(
    qwen: ImageProcessor, width: int, height: int, seed: int
) -> None:
    image = noise(width, height, seed)
    canonical = canonical_image(encoded(image), qwen)
    again = canonical_image(canonical.png, qwen)
    theirs = build_tiny_processor().image_processor
    ours = qwen.pixels(canonical.png)
    assert again == canonical
    assert ours["image_grid_thw"].tolist() == [list(canonical.grid)]
    second = theirs(Image.open(io.BytesIO(canonical.png)), return_tensors="pt")  # as a server processes it, with resize
    assert torch.equal(ours["pixel_values"], second["pixel_values"])
    first = theirs(image, return_tensors="pt")
    if torch.equal(first["image_grid_thw"], ours["image_grid_thw"]):  # narrow images settle at another size
        assert torch.equal(ours["pixel_values"], first["pixel_values"])
    assert qwen.num_tokens(canonical.grid) == len(ours["pixel_values"]) // MERGE**2


def test_idefics_gives_one_image_of_one_size_and_the_pixels_stay(idefics: ImageProcessor) -> None:
    canonical = canonical_image(encoded(noise(40, 20)), idefics)
    assert canonical == canonical_image(canonical.png, idefics)
    assert canonical.grid == (1, 4, 4)
    assert idefics.num_tokens(canonical.grid) == 4
    (pixels,) = idefics.pixels(canonical.png).values()
    expected = np.asarray(Image.open(io.BytesIO(canonical.png)), np.float32).transpose(2, 0, 1)
    assert pixels.shape == (1, 3, 16, 16)
    assert torch.allclose(pixels[0], torch.from_numpy(expected) / 255 * 2 - 1, atol=1e-6)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("GIF", {}), ("WEBP", {"lossless": True})])
def test_equal_pixels_are_one_image_whatever_the_file(qwen: ImageProcessor, kind: str, options: Any) -> None:
    image = Image.new("RGB", (16, 16), (255, 0, 0))
    more = {"save_all": True, "append_images": [Image.new("RGB", (16, 16))]} if kind != "PNG" else {}
    sha256 = canonical_image(encoded(image), qwen).sha256
    assert canonical_image(encoded(image, kind, **options, **more), qwen).sha256 == sha256


def test_a_rotated_photograph_is_upright(qwen: ImageProcessor) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert canonical_image(encoded(noise(32, 16), "JPEG", exif=exif.tobytes()), qwen).grid == (1, 8, 4)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (lambda: b"", "cannot be read"),
        (lambda: b"GIF89a", "cannot be read"),
        (lambda: encoded(noise(16, 16))[:-300], "cannot be read"),
        (lambda: encoded(noise(16, 16), "BMP"), "send a whole PNG, JPEG, WebP or GIF"),
        (lambda: encoded(Image.new("1", (4001, 4000))), "4001 x 4000 pixels"),
        (lambda: encoded(Image.new("1", (20_000, 20_000))), "Bomb|20000 x 20000 pixels"),
        (lambda: encoded(Image.new("RGB", (1000, 1))), "aspect ratio"),
        (lambda: bytes(20_000_001), "20,000,001 bytes: send at most 20,000,000"),
    ],
)
def test_what_is_no_image_or_too_large_is_refused(
    qwen: ImageProcessor, source: Callable[[], bytes], problem: str
) -> None:
    with pytest.raises(ImageError, match=problem):
        canonical_image(source(), qwen)


def test_an_image_is_refused_before_it_is_decoded(qwen: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MAX_PIXELS", 255)
    broken = bytearray(encoded(noise(16, 16)))
    broken[60:] = bytes(len(broken) - 60)
    with pytest.raises(ImageError, match="16 x 16 pixels: send at most 255"):
        canonical_image(bytes(broken), qwen)


def test_other_models_and_tiles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(
        ConfigError, match="gemma3 model, which reads no images here: use qwen2_vl, qwen2_5_vl, idefics3"
    ):
        load_image_processor(str(tmp_path))
    with pytest.raises(ConfigError, match="set do_image_splitting to false"):
        load_image_processor(str(save_idefics(tmp_path / "tiles", do_image_splitting=True)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no config.json"):
        load_image_processor(str(tmp_path / "empty"))


def test_the_store_keeps_an_image_once_and_reads_only_what_its_name_says(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    sha256 = store.put(b"one")
    written = store.path(sha256).stat().st_mtime_ns
    assert store.put(b"one") == sha256
    assert store.path(sha256).stat().st_mtime_ns == written
    assert store.read(sha256) == b"one"
    assert [path.name for path in (tmp_path / "images").iterdir()] == [f"{sha256}.png"]
    store.path(sha256).write_bytes(b"two")
    with pytest.raises(ConfigError, match="has changed"):
        store.read(sha256)
    with pytest.raises(ConfigError, match="cannot be read"):
        store.read("0" * 64)
    with pytest.raises(ValueError, match="not a sha256"):
        store.path("../" + "0" * 61)


def test_base64_text_is_refused_by_its_length_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_source, "MAX_ENCODED_BYTES", 30)
    assert image_source.base64_bytes(base64.b64encode(b"x" * 30).decode()) == b"x" * 30
    with pytest.raises(ImageError, match="the image has over 30 bytes"):
        image_source.base64_bytes("?" * 45)
