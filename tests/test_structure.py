"""The structure lint finds what it promises to find, in a package made up for the purpose."""

import re
from pathlib import Path
import pytest
from tests.structure import check, main

pytestmark = pytest.mark.usefixtures("no_collection")
ROOT = Path(__file__).parents[1]
ROOM = '"""Rooms for made-up things, and nothing else."""\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "areal_lite"
    for room in ("", "room", "runs"):
        (folder / room).mkdir()
        (folder / room / "__init__.py").write_text(ROOM)
    return folder


def test_a_package_within_the_limits_has_no_violation(package: Path) -> None:
    (package / "room/small.py").write_text("def f(a, b, c, d, e, g, *args, **kwargs): ...\n" * 400)
    assert list(check(package.parent, {})) == []


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("room/long.py", "x = 1\n" * 401, "areal_lite/room/long.py: 401 lines; at most 400"),
        (
            "room/wide.py",
            "class Wide:\n" + "".join(f"    def f{i}(self): ...\n" for i in range(21)),
            "areal_lite/room/wide.py:1: Wide has 21 methods; at most 20",
        ),
        (
            "room/many.py",
            "class Many:\n    async def f(self, a, b, c, *, d, e, g, h): ...\n",
            "areal_lite/room/many.py:2: Many.f has 7 parameters; at most 6",
        ),
        (
            "room/__init__.py",
            '"""Rooms"""\n',
            "areal_lite/room/__init__.py: begin with a docstring whose first paragraph is a sentence",
        ),
        (
            "other/alone.py",
            "",
            "areal_lite/other/__init__.py: begin with a docstring whose first paragraph is a sentence",
        ),
    ],
)
def test_each_violation_is_one_line_and_may_be_excepted(
    package: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, line: str
) -> None:
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(text)
    assert list(check(package.parent, {})) == [line]
    assert main(package.parent) == 1
    assert line in capsys.readouterr().out.splitlines()


def test_a_folder_has_at_most_fifteen_files_beside_its_init(package: Path) -> None:
    for number in range(16):
        (package / f"room/f{number}.py").touch()
    (violation,) = check(package.parent, {})
    assert violation == "areal_lite/room: 16 files; at most 15 and sub-folders"


def test_the_lines_that_training_reaches_are_limited(package: Path) -> None:
    (package / "runs/entry_points.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from areal_lite.room import types_only\n"
        "def f():\n    from areal_lite.room import f0\n"
    )
    for number in range(70):
        folder = package / f"room/r{number // 10}"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(ROOM)
        after = f"import areal_lite.room.r{(number + 1) // 10}.f{number + 1}\n"
        (folder / f"f{number}.py").write_text(after * 400)
    (package / "room/f0.py").write_text("from areal_lite.room.r0.f0 import x\n")
    (package / "room/types_only.py").write_text("x = 1\n")
    (package / "data/vision").mkdir(parents=True)
    for init in ("data/__init__.py", "data/vision/__init__.py"):
        (package / init).write_text(ROOM)
    (package / "data/vision/images.py").write_text("x = 1\n" * 400)
    (package / "room/r6/f69.py").write_text("import areal_lite.data.vision.images\n" * 400)
    (line,) = check(package.parent, {})
    assert line == "areal-lite train: 28,017 lines in 83 files; at most 24,000"


def test_an_exception_covers_its_violation_and_one_that_nothing_needs_is_an_error(package: Path) -> None:
    (package / "room/long.py").write_text("x = 1\n" * 401)
    key = "areal_lite/room/long.py"
    assert list(check(package.parent, {key: "a reason"})) == []
    (package / "room/long.py").write_text("x = 1\n")
    (unneeded,) = check(package.parent, {key: "a reason"})
    assert unneeded.startswith(f"{key}: nothing needs this exception")


def test_each_exception_from_bandit_names_its_check_and_its_reason() -> None:
    texts = [
        path.read_text() for room in ("areal_lite", "workflows", "examples") for path in (ROOT / room).rglob("*.py")
    ]
    lines = [line for text in texts if "nosec" in text for line in text.splitlines() if "nosec" in line]
    assert [line for line in lines if not re.search(r"# nosec B\d{3} # \w", line)] == []
