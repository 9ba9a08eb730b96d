"""Record which test calls which function of areal_lite: a pytest plugin of ``make mutants``.

Each function marks one byte of a file that all processes of a test map, so that programs which a test starts count too.
Where a variable says that calls are recorded, the import of this file makes later imports compile the marks in; a
program that a test starts imports it by ``sitecustomize.py``.
"""

from __future__ import annotations
import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
TREE = Path(__file__).resolve().parents[1]
PYCACHE = "marked"
"""Folder of the compiled files with marks, which only processes that record read."""

_tests: dict[str, dict[str, Any]] = {}


def functions(node: ast.AST, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the functions in ``node`` with their qualified names; lambdas are part of the function they are in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, DEFINITIONS):
            inner = f"{name}{child.name}"
            if isinstance(child, ast.ClassDef):
                yield from functions(child, f"{inner}.")
            else:
                yield inner, child
                yield from functions(child, f"{inner}.<locals>.")
        else:
            yield from functions(child, name)


def prepare(tree: Path) -> None:
    """Number the functions of a copy of the tree, before anything is recorded in it."""
    names: list[str] = []
    starts: dict[str, int] = {}
    for path in sorted((tree / "areal_lite").rglob("*.py")):
        file = str(path.relative_to(tree))
        starts[file] = len(names)
        names += [f"{file}:{name}" for name, _ in functions(ast.parse(path.read_bytes()))]
    (tree / "calls_names.json").write_text(json.dumps([names, starts]))
    (tree / "calls.bin").write_bytes(bytes(len(names)))
    (tree / "sitecustomize.py").write_text("import tests.mutants_calls\n")


def _install() -> None:
    starts = json.loads((TREE / "calls_names.json").read_text())[1]
    with (TREE / "calls.bin").open("r+b") as file:
        builtins.__calls__ = mmap.mmap(file.fileno(), 0)  # type: ignore[attr-defined]
    compile_plain = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **options: Any) -> Any:
        start = starts.get(str(path).removeprefix(f"{TREE}/"))
        if start is None or not str(path).startswith(f"{TREE}/"):
            return compile_plain(self, data, path, **options)
        module = ast.parse(data)
        for number, (_, function) in enumerate(functions(module), start):
            (mark,) = ast.parse(f"__calls__[{number}] = 1").body
            for node in ast.walk(mark):
                ast.copy_location(node, function)
            function.body.insert(int(ast.get_docstring(function) is not None), mark)
        return compile_plain(self, module, path, **options)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]
    sys.pycache_prefix = str(TREE / PYCACHE)


def _called() -> list[str]:
    names = json.loads((TREE / "calls_names.json").read_text())[0]
    return [name for name, mark in zip(names, bytes(builtins.__calls__), strict=True) if mark]  # type: ignore[attr-defined]


def pytest_runtest_setup(item: Any) -> None:
    """Begin anew."""
    builtins.__calls__[:] = bytes(len(builtins.__calls__))  # type: ignore[attr-defined]


def pytest_runtest_logreport(report: Any) -> None:
    """Keep time and calls of a test; the first setup, which makes shared fixtures, counts for all tests."""
    test = _tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "calls": []})
    test["seconds"] += report.duration
    test["passed"] &= report.passed
    if report.when == "setup":
        test["calls"] += next(iter(_tests.values()))["calls"] if len(_tests) > 1 else _called()
    if report.when == "teardown":
        test["calls"] = sorted({*test["calls"], *_called()})


def pytest_sessionfinish() -> None:
    """Write the record of one test file."""
    (TREE / "calls.json").write_text(json.dumps({name: test for name, test in _tests.items() if test["passed"]}))


if "AREAL_LITE_CALLS" in os.environ:
    _install()
