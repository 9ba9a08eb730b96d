"""Change one expression or statement at a time, and see whether a test fails: ``make mutants``.

Works in a copy of the tree, with the tests that call the changed function, fastest first. Prints the mutants that
survive and exits with 1 if fewer than the target are killed. As a pytest plugin, this file records which test calls
which function; ``build/mutants.json`` keeps that for test files that have not changed.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "build" / "mutants.json"
SECONDS = 100.0
"""Most test time of one mutant."""

# -- a pytest plugin: which test calls which function --------------------------------------------------------

_codes: dict[int, Any] = {}
_tests: dict[str, dict[str, Any]] = {}


def _called() -> list[str]:
    """Return ``path:function``; lambdas and comprehensions count as the function they are in."""
    home = f"{Path.cwd()}/"
    codes = [code for code in _codes.copy().values() if code.co_filename.startswith(f"{home}areal_lite/")]
    return [f"{c.co_filename.removeprefix(home)}:{c.co_qualname.partition('.<locals>.<')[0]}" for c in codes]


def _note(frame: Any, event: str, arg: Any) -> None:
    _codes[id(frame.f_code)] = frame.f_code


def pytest_runtest_setup(item: Any) -> None:
    """Begin to record."""
    _codes.clear()
    threading.settrace(_note)
    sys.settrace(_note)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep time and calls of a test; the first setup, which makes shared fixtures, counts for all tests."""
    test = _tests.setdefault(report.nodeid, {"seconds": 0.0, "passed": True, "calls": []})
    test["seconds"] += report.duration
    test["passed"] &= report.passed
    if report.when == "setup":
        test["calls"] += next(iter(_tests.values()))["calls"] if len(_tests) > 1 else _called()
    if report.when == "teardown":
        sys.settrace(None)
        test["calls"] = sorted({*test["calls"], *_called()})


def pytest_sessionfinish() -> None:
    """Write the record of one test file."""
    Path("calls.json").write_text(json.dumps({name: test for name, test in _tests.items() if test["passed"]}))


# -- mutants -------------------------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Mutant(NamedTuple):
    """One change of a file: its lines from ``first`` up to ``end`` become ``after``."""

    path: str
    function: str
    first: int
    end: int
    before: str
    after: str


def changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yield what may stand in the place of ``node``, or of a part of it.

    Of numbers only 0, 1 and 2 change: larger ones are sizes and times, whose exact value no test should depend on.
    """
    new = copy.copy(node)
    match node:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            new.ops = [SWAPS[type(op)]()]
            yield node, f"({ast.unparse(new)})"
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
            new.op = SWAPS[type(op)]()
            yield node, f"({ast.unparse(new)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value) if value <= 2:
            yield node, str(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Constant):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass"


def walk(node: Any, name: str = "", in_function: bool = False) -> Iterator[tuple[Any, str]]:
    """Yield the nodes that may change and their functions: no texts, annotations, logging and assertions."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.AnnAssign(value=None) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "warnings")))):
            return
    yield node, name if in_function else ""
    for key, value in ast.iter_fields(node):
        if key in ("annotation", "returns", "decorator_list", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, DEFINITIONS):
                inner = f"{name}{'.<locals>.' if in_function else '.'}{child.name}".removeprefix(".")
                yield from walk(child, inner, not isinstance(child, ast.ClassDef))
            elif isinstance(child, ast.AST):
                yield from walk(child, name, in_function)


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a file."""
    lines = source.splitlines(keepends=True)
    for node, function in walk(ast.parse(source)):
        for old, new in changes(node):
            first, end = old.lineno - 1, old.end_lineno
            after = lines[first][: old.col_offset] + new.encode() + lines[end - 1][old.end_col_offset :]
            yield Mutant(path, function, first, end, b"".join(lines[first:end]).decode(), after.decode())


# -- runs ----------------------------------------------------------------------------------------------------


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or would track."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, arguments: list[str], timeout_s: float) -> int:
    """Run pytest in a fork, which has torch already; return its exit code, or -1 after the time limit."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
        output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os._exit(sys.modules["pytest"].main(["-q", "-x", "-p", "no:cacheprovider", *arguments]))
    deadline = time.monotonic() + timeout_s
    ended, status = 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else -1


def record_calls(tree: Path, folders: list[str]) -> dict[str, dict[str, Any]]:
    """Return time and calls of each test, after running the files that have changed."""
    record = json.loads(RECORD.read_bytes()) if RECORD.exists() else {}
    files = sorted(str(path.relative_to(tree)) for folder in folders for path in (tree / folder).rglob("test_*.py"))
    for name in files:
        digest = hashlib.sha256((tree / name).read_bytes()).hexdigest()
        if record.get(name, {}).get("digest") != digest:
            print(f"recording {name}", flush=True)
            (tree / "calls.json").write_text("{}")
            if run_tests(tree, ["-p", "tests.mutants", "--timeout=600", "--maxfail=1000", name], 1200) not in (0, 5):
                print((tree / "output.txt").read_text()[-500:])
            record[name] = {"digest": digest, "tests": json.loads((tree / "calls.json").read_bytes())}
            RECORD.parent.mkdir(exist_ok=True)
            RECORD.write_text(json.dumps(record))
    return {nodeid: test for name in files for nodeid, test in record[name]["tests"].items()}


def chosen_tests(mutant: Mutant, tests: dict[str, dict[str, Any]]) -> list[str]:
    """Return the tests that call the function, else those that call its file, fastest first, within the time."""
    exact = [name for name, test in tests.items() if f"{mutant.path}:{mutant.function}" in test["calls"]]
    by_file = (n for n, test in tests.items() if any(call.startswith(f"{mutant.path}:") for call in test["calls"]))
    chosen, total = [], 0.0
    for name in sorted(exact or by_file, key=lambda name: tests[name]["seconds"]):
        total += tests[name]["seconds"]
        if not chosen or total < SECONDS:
            chosen.append(name)
    return chosen


def main() -> int:
    """Run a sample of mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--sources", nargs="+", default=["areal_lite/trainer", "areal_lite/data", "areal_lite/infra"])
    parser.add_argument(
        "--tests", nargs="+", default=[f"tests/{name}" for name in ("trainer", "data", "infra", "api", "launch")]
    )
    options = parser.parse_args()
    for name in ("torch", "transformers", "pytest", "hypothesis"):  # once for all forks
        __import__(name)
    listed = tomllib.loads((ROOT / "tests" / "mutants_equivalent.toml").read_text())["mutant"]
    equivalent = {(one["path"], one["before"], one["after"]) for one in listed}  # the lines, without indentation
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve()
        copy_tree(tree)
        tests = record_calls(tree, options.tests)
        paths = sorted(path for source in options.sources for path in (tree / source).rglob("*.py"))
        every = [one for path in paths for one in mutants_of(str(path.relative_to(tree)), path.read_bytes())]
        every = [one for one in every if (one.path, one.before.strip(), one.after.strip()) not in equivalent]
        sample = random.Random(options.seed).sample(every, min(options.count, len(every)))
        killed = 0
        for number, mutant in enumerate(sample, 1):
            path, chosen = tree / mutant.path, chosen_tests(mutant, tests)
            original = path.read_bytes()
            lines = original.splitlines(keepends=True)
            path.write_bytes(b"".join([*lines[: mutant.first], mutant.after.encode(), *lines[mutant.end :]]))
            os.utime(path, (number, number))  # no compiled file is of this time
            limit = 30 + 3 * sum(tests[name]["seconds"] for name in chosen)
            survives = not chosen or run_tests(tree, ["--timeout=30", *chosen], limit) == 0
            path.write_bytes(original)
            killed += not survives
            if survives:
                print(f"{mutant.path}:{mutant.first + 1}: {len(chosen)} tests pass")
                print(f"- {mutant.before.strip()}\n+ {mutant.after.strip()}")
            print(f"{killed} of {number} killed", flush=True)
    return int(killed < options.target * len(sample))


if __name__ == "__main__":
    sys.exit(main())
