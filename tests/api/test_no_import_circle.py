"""No module imports, however lazily or for types alone, a module that imports it."""

from __future__ import annotations
import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
import pytest

pytestmark = pytest.mark.usefixtures("no_collection")
ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "areal_lite").rglob("*.py")
}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in FILES else node.module


def test_there_is_no_import_circle() -> None:
    graph = {name: {module for module in imports(path) if module in FILES} - {name} for name, path in FILES.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle
    assert len(order) == len(FILES) > 100
