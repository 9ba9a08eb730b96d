"""``areal-lite inspect`` shows an image of a dump as one marker where its tokens are."""

from __future__ import annotations
import hashlib
import io
import json
from pathlib import Path
from typing import Any
import pytest
from PIL import Image
from areal_lite.cli.main import main
from tests.tools.inspect.dump_lines import line, turn, write

PAD = "<|image_pad|>"
GONE = "c" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def sha256(tmp_path: Path) -> str:
    """The digest of a stored image of 24 x 16 pixels."""
    file = io.BytesIO()
    Image.new("RGB", (24, 16)).save(file, "PNG")
    name = hashlib.sha256(file.getvalue()).hexdigest()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{name}.png").write_bytes(file.getvalue())
    return name


def dump(root: Path, *images: tuple[int, int, str], task: int = 7) -> None:
    """Dump an episode whose first turn is ``a``, three placeholders, ``b``, and one more."""
    spans = [{"offset": at, "length": count, "sha256": name, "grid": [1, 4, 6]} for at, count, name in images]
    first = turn("prompt", f"a{PAD * 3}b{PAD}", 6, images=spans)
    write(root / f"rollout/3/{task}.jsonl", line(task, turns=[first, turn("assistant", PAD, 1)]))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_text_of_a_turn_has_a_marker_for_each_image(
    tmp_path: Path, sha256: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, (1, 3, sha256), (5, 1, GONE))
    shown = answer(capsys, tmp_path, "--by", "turns")
    marker = f"a[image {sha256[:12]}, 24 x 16 pixels, 3 tokens]b[image cccccccccccc, its file is missing, 1 tokens]\n"
    assert marker in shown
    assert shown.count(PAD) == 1  # that of the answer, which the model sampled


def test_a_table_of_tokens_has_one_row_for_an_image_and_json_names_it(
    tmp_path: Path, sha256: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, (1, 3, sha256), (5, 1, GONE))
    rows = answer(capsys, tmp_path, "--tokens", "rollout/3/7.jsonl:1").splitlines()
    assert [each.split()[:4] for each in rows[1:]] == [
        ["0", "0", "prompt", "0"],
        ["1", "0", "prompt", "-"],
        ["4", "0", "prompt", "4"],
        ["5", "0", "prompt", "-"],
        ["6", "1", "assistant", "0"],
    ]
    assert f"[image {sha256[:12]}, 24 x 16 pixels, 3 tokens]" in rows[2]
    found: list[Any] = [
        json.loads(each) for each in answer(capsys, tmp_path, "--tokens", "rollout/3/7.jsonl:1", "--json").splitlines()
    ]
    assert [each["image"] for each in found] == [None, *[sha256] * 3, None, GONE, None]
    assert [each["id"] for each in found] == [0, 1, 2, 3, 4, 5, 0]


def test_another_picture_with_the_same_ids_is_a_difference(
    tmp_path: Path, sha256: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, (1, 3, sha256))
    dump(tmp_path, (1, 3, GONE), task=8)
    shown = answer(capsys, tmp_path, "--diff", "rollout/3/7.jsonl:1", "rollout/3/8.jsonl:1")
    assert f"token 1 is the first that differs:\n  rollout/3/7.jsonl:1: image {sha256[:12]}, turn 0" in shown


@pytest.mark.parametrize("image", [(1, 10**15, GONE), (-1, 2, GONE), (1, 3, "../x")])
def test_images_that_cannot_be_are_left_out(
    tmp_path: Path, image: tuple[int, int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, image)
    assert f"a{PAD * 3}b" in answer(capsys, tmp_path, "--by", "turns")
    assert len(answer(capsys, tmp_path, "--tokens", "rollout/3/7.jsonl:1").splitlines()) == 8
