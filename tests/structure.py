"""Limits on the shape of the package: ``python tests/structure.py``, a part of ``make lint``.

Prints one line per violation and exits with 1 if there is one. A limit may be exceeded only by an entry of ``ALLOWED``
with its reason, for a signature that another project promises to its users. An entry that nothing needs is a violation
too, so the table stays as short as the truth.
"""

from __future__ import annotations
import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "areal_lite"
FILE_LINES, CLASS_METHODS, PARAMETERS, FOLDER_FILES = 400, 20, 6, 15
SENTENCE_WORDS = 4
TRAIN_LINES, CORE_LINES, ALL_LINES = 24_000, 34_000, 49_999
TRAIN = f"{PACKAGE}.runs.entry_points"
OUTSIDE_CORE = ("tools", "cli", "embedded", "environments")
BESIDE_CORE = (
    *("data/vision", "models/vision_model.py", "trainer/forward/packed_images.py", "api/image_span.py"),
    *("data/supervised/image_rows.py", "models/parallel", "cluster"),
    *("servers/client/teacher.py", "runs/older_policy.py"),
)
"""Rooms and files of images, meshes, Ray, teachers and older policies, which the first two limits do not count."""
TEMPLATES = "tools/init/templates"

ALLOWED: dict[str, str] = {
    "areal_lite/agents/areal_openai.py::ArealOpenAI.__init__": "AReaL's signature",
    "areal_lite/rollout/remote_inf_engine.py::RemoteInfEngine.submit": "AReaL's signature",
    "areal_lite/data/batch/data_proto.py::DataProto": "verl's methods",
    "areal_lite/data/rows/loader.py::ResumableLoader.__init__": "the keywords of torch's DataLoader",
    "areal_lite/data/rows/rl_dataset.py::create_rl_dataset": "verl's signature",
    "areal_lite/data/rows/prompt_rows.py::PromptRows.__init__": "verl's signature",
    "areal_lite/data/source/sample.py::Sample.__init__": "slime's signature",
}
"""What may exceed a limit: FILE, FILE::CLASS or FILE::FUNCTION, and whose promise it is."""


class Violation(NamedTuple):
    key: str
    """FILE, FILE::CLASS or FILE::FUNCTION, or the name of a budget, as in ``ALLOWED``."""
    text: str


def main(root: Path = Path(__file__).parents[1]) -> int:
    """Check the package in ``root``; print the violations and return the exit code."""
    lines = list(check(root, ALLOWED))
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


def check(root: Path, allowed: Collection[str]) -> Iterator[str]:
    """Yield one line for each violation that is not excepted, and for each of ``allowed`` that nothing needs."""
    trees = _trees(root)
    found = [*_shapes(trees), *_folders(root, trees), *_budgets(root, trees)]
    for key, text in found:
        if key not in allowed:
            yield text
    for key in sorted(set(allowed) - {violation.key for violation in found}):
        yield f"{key}: nothing needs this exception; delete it from ALLOWED in tests/structure.py"


class _Module(NamedTuple):
    lines: int
    tree: ast.Module


def _trees(root: Path) -> dict[str, _Module]:
    """Return each module of the package by its path below ``root``."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        if f"{PACKAGE}/{TEMPLATES}/" not in path.as_posix():
            text = path.read_text()
            modules[path.relative_to(root).as_posix()] = _Module(text.count("\n"), ast.parse(text))
    return modules


def _shapes(modules: dict[str, _Module]) -> Iterator[Violation]:
    """Yield files, classes and functions that are too large."""
    for file, module in modules.items():
        if module.lines > FILE_LINES:
            yield Violation(file, f"{file}: {module.lines} lines; at most {FILE_LINES}")
        for name, node in _definitions(module.tree):
            where, key = f"{file}:{node.lineno}: {name}", f"{file}::{name}"
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(child, _FUNCTIONS) and not _is_overload(child) for child in node.body)
                if methods > CLASS_METHODS:
                    yield Violation(key, f"{where} has {methods} methods; at most {CLASS_METHODS}")
            else:
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                parameters = sum(argument.arg not in ("self", "cls") for argument in arguments)
                if parameters > PARAMETERS and not _is_overload(node):
                    yield Violation(key, f"{where} has {parameters} parameters; at most {PARAMETERS}")


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | _FUNCTIONS]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | _FUNCTIONS):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _is_overload(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in function.decorator_list)


def _folders(root: Path, modules: dict[str, _Module]) -> Iterator[Violation]:
    """Yield folders with too many files, or without a first sentence about them."""
    for folder in sorted({str(Path(file).parent) for file in modules}):
        files = [file for file in modules if str(Path(file).parent) == folder and Path(file).name != "__init__.py"]
        if len(files) > FOLDER_FILES:
            yield Violation(folder, f"{folder}: {len(files)} files; at most {FOLDER_FILES} and sub-folders")
        front = modules.get(f"{folder}/__init__.py")
        first = ((ast.get_docstring(front.tree) if front else "") or "").split("\n\n")[0]
        if not first.endswith(".") or len(first.split()) < SENTENCE_WORDS:
            yield Violation(folder, f"{folder}/__init__.py: begin with a docstring whose first paragraph is a sentence")


_BESIDE = tuple(f"{PACKAGE}/{part}" for part in BESIDE_CORE)


def _budgets(root: Path, modules: dict[str, _Module]) -> Iterator[Violation]:
    """Yield the sums of lines that are too large."""
    counted = {file: each for file, each in modules.items() if not file.startswith(_BESIDE)}
    core = {file: each for file, each in counted.items() if file.split("/")[1] not in OUTSIDE_CORE}
    train = {file: counted[file] for file in reached(root, modules, TRAIN) & counted.keys()}
    without = f"{PACKAGE} without {', '.join(OUTSIDE_CORE)}"
    for name, part, most in (
        ("areal-lite train", train, TRAIN_LINES),
        (without, core, CORE_LINES),
        (PACKAGE, modules, ALL_LINES),
    ):
        if (lines := sum(module.lines for module in part.values())) > most:
            yield Violation(name, f"{name}: {lines:,} lines in {len(part)} files; at most {most:,}")


def reached(root: Path, modules: dict[str, _Module], start: str) -> set[str]:
    """Return the files that ``start`` imports, also inside functions and through others; not for type checkers only."""
    by_name = {_module_name(file): file for file in modules}
    todo, files = [start], set[str]()
    while todo:
        name = todo.pop()
        # Importing a module imports the rooms above it.
        todo += [name.rpartition(".")[0]] if "." in name else []
        if (file := by_name.get(name)) is not None and file not in files:
            files.add(file)
            todo += _imports(modules[file].tree)
    return files


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imports(node: ast.AST) -> Iterator[str]:
    """Yield each name that may be a module of the package."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from _imports(child)


if __name__ == "__main__":
    sys.exit(main())
