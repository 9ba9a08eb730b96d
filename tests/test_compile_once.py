"""The compiler of the tests gives what the compiler gives, without it where nothing has changed."""

from __future__ import annotations
import os
import shutil
import subprocess
from pathlib import Path
import pytest

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the compiler in a folder of its own; the real one writes a line for each call."""
    (tmp_path / "once").mkdir()
    (tmp_path / "real").mkdir()
    real = tmp_path / "real/c++"
    real.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec {shutil.which("c++")} "$@"\n')
    once = Path(shutil.copy(Path(__file__).with_name("compile_once.sh"), tmp_path / "once/c++"))
    for program in (real, once):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{real.parent}:{os.environ['PATH']}")
    return once


def test_it_compiles_again_if_an_argument_the_source_or_a_header_changed(compiler: Path, tmp_path: Path) -> None:
    source, header, made = tmp_path / "a.cpp", tmp_path / "a.h", tmp_path / "a.o"
    source.write_text('#include "a.h"\nint a() { return NUMBER + MORE; }\n')
    header.write_text("#define NUMBER 1\n")

    def compile(more: int) -> bytes:
        made.unlink(missing_ok=True)
        arguments = [f"-I{tmp_path}", f"-DMORE={more}", "-c", str(source), "-o", str(made)]
        subprocess.run([compiler, *arguments], check=True)
        return made.read_bytes()

    first = compile(1)
    assert compile(1) == first
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert compile(2) != first
    header.write_text("#define NUMBER 5\n")
    assert compile(1) != first
    source.write_text("int a() { return 7; }\n")
    assert compile(1) != first
    assert len((tmp_path / "calls").read_text().splitlines()) == 4


def test_what_cannot_be_compiled_is_an_error_each_time(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("no C++\n")
    for _ in range(2):
        done = subprocess.run([compiler, "-c", source, "-o", tmp_path / "a.o"], capture_output=True, text=True)
        assert done.returncode != 0 and "a.cpp" in done.stderr


def test_what_makes_no_last_argument_is_the_compilers_own(compiler: Path, tmp_path: Path) -> None:
    for arguments in (["--version"], ["-dumpversion"]):
        done, own = (subprocess.run([name, *arguments], capture_output=True) for name in (compiler, "c++"))
        assert done.returncode == 0 and done.stdout == own.stdout
    (tmp_path / "a.cpp").write_text("int a() { return 7; }\n")
    subprocess.run([compiler, "-o", tmp_path / "a.o", "-c", tmp_path / "a.cpp"], check=True)
    assert (tmp_path / "a.o").exists() and not [*compiler.parent.glob("?" * 64)]
