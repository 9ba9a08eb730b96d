"""``verify`` checks images against their files."""

from __future__ import annotations
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from PIL import Image
from areal_lite.tools.verify.verify_episodes import images_are_their_files


def findings(root: Path, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Return what is found in a turn of 8 tokens with an image of 4."""
    file = io.BytesIO()
    Image.new("RGB", (56, 28)).save(file, "PNG")
    sha256 = hashlib.sha256(file.getvalue()).hexdigest()
    (root / "images").mkdir(parents=True)
    (root / "images" / f"{sha256}.png").write_bytes(file.getvalue())
    span: dict[str, Any] = {"offset": 2, "length": 4, "sha256": sha256, "grid": [1, 4, 8]}
    turn = {"ids": [1, 2, 9, 9, 9, 9, 3, 4], "loss_mask": [0] * 8, "images": [span]}
    change(turn)
    group: Any = SimpleNamespace(records=[{"sample_idx": 0, "turns": [turn, {"ids": [5], "loss_mask": [1]}]}])
    run: Any = SimpleNamespace(root=root)
    return list(images_are_their_files(group, run))


def test_an_image_that_is_its_file_is_sound(tmp_path: Path) -> None:
    assert findings(tmp_path, lambda turn: None) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda turn: turn["images"][0].update(grid=[1, 8, 4]), "has 56 x 28 pixels, and the grid [1, 8, 4]"),
        (lambda turn: turn["images"][0].update(length=3), "has 56 x 28 pixels, and the grid [1, 4, 8] with 3 tokens"),
        (lambda turn: turn["images"][0].update(offset=1), "the tokens of an image in turn 0 differ"),
    ],
)
def test_a_span_that_is_not_its_images_is_found(tmp_path: Path, change: Callable[[Any], Any], says: str) -> None:
    (found,) = findings(tmp_path, change)
    assert says in found


@pytest.mark.parametrize(
    "change",
    [
        lambda turn: turn["images"][0].update(offset=6),
        lambda turn: turn["loss_mask"].__setitem__(3, 1),
        lambda turn: turn["images"][0].update(sha256="../x"),
    ],
)
def test_spans_that_cannot_be_are_an_error(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match="image|sha256"):
        findings(tmp_path, change)


def test_a_file_that_changed_or_is_gone_is_found(tmp_path: Path) -> None:
    def spoil(turn: Any) -> None:
        path = tmp_path / "images" / f"{turn['images'][0]['sha256']}.png"
        path.write_bytes(path.read_bytes() + b"x")

    (found,) = findings(tmp_path, spoil)
    assert "has changed: its sha256 is" in found
    with pytest.raises(FileNotFoundError):
        findings(
            tmp_path / "other", lambda turn: (tmp_path / "other/images" / f"{turn['images'][0]['sha256']}.png").unlink()
        )
