"""Change one expression or statement at a time, and see whether a test fails: ``make mutants``.

Works in copies of the tree, with the tests that call the changed function, nearest first. A mutant is killed if a test
fails that passes without the change. Prints the mutants that survive and exits with 1 if fewer than the target are
killed.
A run that was stopped continues: ``build/mutants.json`` keeps the calls of each test file and
``build/mutants_killed.json`` the test that killed each mutant, until that test or the mutant's file changes.
"""

from __future__ import annotations
import argparse
import ast
import contextlib
import copy
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
import mutants_calls

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "build" / "mutants.json"
KILLED = ROOT / "build" / "mutants_killed.json"
TESTS = "agents api config data e2e files models processes rollout runs servers tools trainer workflows"
TEST_S = 120
"""Most seconds of one test."""
NEAREST = 10
"""Tests that run before the others are collected."""
TREE = Path()
"""This process's copy of the tree."""

# -- mutants -------------------------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


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

    Of numbers only 0, 1 and 2 change: larger ones, such as ``1 << 20``, are sizes and times, whose exact value no test
    should depend on.
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
    """Yield the nodes that may change and their functions.

    Texts, annotations, logging, assertions, crash points, seconds, and the methods of a protocol stay as they are.
    """
    match node:
        case ast.FunctionDef(body=[ast.Expr(value=ast.Constant())]):
            return
        case ast.Assign(targets=[ast.Name(id=target)]) if target.endswith("_S"):
            return
        case ast.keyword(arg=str(target)) if target in ("strict", "timeout") or target.endswith("_s"):
            return
        case ast.BinOp(left=ast.Constant(), right=ast.Constant()):  # a number, such as 1 << 20
            return
        case ast.JoinedStr() | ast.Assert() | ast.AnnAssign(value=None) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "warnings")))):
            return
        case ast.Expr(value=ast.Call(func=ast.Name(id="crash_point"))):
            return
    yield node, name if in_function else ""
    for key, value in ast.iter_fields(node):
        if key in ("annotation", "returns", "decorator_list", "exc"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, mutants_calls.DEFINITIONS):
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


def run_tests(tree: Path, arguments: list[str], timeout_s: float, variables: dict[str, str] | None = None) -> int:
    """Run pytest in a fork, which has torch already; return its exit code, or -1 after the time limit."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(tree)
        sys.path[0] = os.environ["PYTHONPATH"] = str(tree)
        os.environ.update(variables or {})
        output = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            code = sys.modules["pytest"].main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
        finally:
            os._exit(code)
    ended, status = 0, 0
    try:
        for _ in range(int(timeout_s / 0.02)):  # counts no time in which all processes were stopped
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.02)
    finally:
        if not ended:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else -1


def read(record: Path) -> dict[str, Any]:
    """Return what an earlier run has kept."""
    return json.loads(record.read_bytes()) if record.exists() else {}


def write(record: Path, value: dict[str, Any]) -> None:
    """Keep ``value``, whole or not at all."""
    record.parent.mkdir(exist_ok=True)
    part = record.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(record)


def failures(tree: Path) -> list[str]:
    """Return the tests, or files, that failed in the last run."""
    return re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", (tree / "output.txt").read_text(), re.MULTILINE)


def record_file(name: str) -> tuple[str, dict[str, Any]]:
    """Return time and calls of each test of a file."""
    (TREE / "calls.json").write_text("{}")
    if not (TREE / "calls.bin").exists():
        mutants_calls.prepare(TREE)
    recording = {"AREAL_LITE_CALLS": "1", "PYTHONPYCACHEPREFIX": str(TREE / mutants_calls.PYCACHE)}
    arguments = ["-p", "tests.mutants_calls", "--timeout=600", "--maxfail=1000", name]
    if run_tests(TREE, arguments, 1200, recording) not in (0, 5):
        print((TREE / "output.txt").read_text()[-500:])
    return name, json.loads((TREE / "calls.json").read_bytes())


def chosen_tests(mutant: Mutant, tests: dict[str, dict[str, Any]], seconds: float) -> list[str]:
    """Return the tests that call the function, else those that call its file, within the time.

    First those in the test file of that name, then those of the same package; of these the ones that call the fewest
    functions.
    """
    exact = [name for name, test in tests.items() if f"{mutant.path}:{mutant.function}" in test["calls"]]
    by_file = (n for n, test in tests.items() if any(call.startswith(f"{mutant.path}:") for call in test["calls"]))
    package = mutant.path.split("/")[1]

    def distance(name: str) -> tuple[bool, bool, int]:
        near = name.startswith(f"tests/{package}/")
        return f"/test_{Path(mutant.path).stem}" not in name, not near, len(tests[name]["calls"])

    chosen, total = [], 0.0
    for name in sorted(exact or by_file, key=distance):
        if not chosen or total + tests[name]["seconds"] < seconds:
            total += tests[name]["seconds"]
            chosen.append(name)
    return chosen


def killer(number: int, mutant: Mutant, chosen: dict[str, float]) -> str:
    """Return the test that fails with the mutant, or nothing; ``chosen`` has the seconds of each test.

    It has to fail twice. A run over the time limit counts if it is within the limit without the change.
    """
    if not chosen:
        return ""
    path = TREE / mutant.path
    original = path.read_bytes()
    lines = original.splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[: mutant.first], mutant.after.encode(), *lines[mutant.end :]]))
    os.utime(path, (number, number))  # no compiled file is of this time

    def timed(names: list[str]) -> int:
        if not names:
            return 0
        limit_s = 60 + 5 * sum(chosen[name] for name in names)
        return run_tests(TREE, [f"--timeout={TEST_S}", "--timeout-method=thread", *names], limit_s)

    def search() -> tuple[list[str], bool]:
        """Return what failed twice, and whether it names no single test; nothing if all pass."""
        for names in ([*chosen][:NEAREST], [*chosen][NEAREST:]):
            while timed(names):
                failed = failures(TREE)
                found = [
                    name for name in names if failed and (name == failed[-1] or name.startswith(f"{failed[-1]}::"))
                ]
                if timed(found[:1] or names):
                    return found[:1] or names, not found
                names = names[names.index(found[0]) + 1 :] if found else []  # it had failed by chance
        return [], False

    found, hung = search()
    path.write_bytes(original)
    return found[0] if found and not (hung and timed(found)) else ""


def failing(names: list[str]) -> set[str]:
    """Return the tests that fail without a change; all if the run breaks off."""
    if not names:
        return set()
    return set(failures(TREE) if run_tests(TREE, ["--maxfail=1000", *names], 3600) in (0, 1) else names)


def judge(job: tuple[int, Mutant, dict[str, float]]) -> tuple[Mutant, int, str]:
    """Return a mutant, how many tests it ran, and its killer."""
    return job[1], len(job[2]), killer(*job)


def preload() -> None:
    """Import the libraries of the tests, once for all forks."""
    program = (
        "import sys, pytest, hypothesis, areal_lite.runs.rl_run, tests.conftest, tests.stub_server; print(*sys.modules)"
    )
    for name in subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split():
        if name.partition(".")[0] not in ("__main__", "areal_lite", "tests"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def begin(folder: str) -> None:
    """Give a process its copy of the tree."""
    global TREE
    TREE = Path(folder).resolve() / str(os.getpid())
    copy_tree(TREE)


def functions_of(path: str) -> dict[str, str]:
    """Return a digest of each function of a file."""
    nodes = [
        node for node in ast.walk(ast.parse((ROOT / path).read_bytes())) if isinstance(node, mutants_calls.DEFINITIONS)
    ]
    return {node.name: hashlib.sha256(ast.dump(node).encode()).hexdigest() for node in nodes}


def sample_of(every: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Return ``count`` mutants, drawn by their text, so that a change of the code replaces few of them."""

    def draw(mutant: Mutant) -> bytes:
        return hashlib.sha256(repr((seed, mutant.path, mutant.function, mutant.before, mutant.after)).encode()).digest()

    return sorted(every, key=draw)[:count]


def main() -> int:
    """Run a sample of mutants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.95)
    parser.add_argument("--jobs", type=int, default=1, help="processes that test mutants")
    parser.add_argument("--seconds", type=float, default=100.0, help="most test time of one mutant")
    parser.add_argument(
        "--sources",
        nargs="+",
        default=["areal_lite/trainer", "areal_lite/data", "areal_lite/rollout", "areal_lite/servers"],
    )
    parser.add_argument("--tests", nargs="+", default=[f"tests/{name}" for name in TESTS.split()])
    options = parser.parse_args()
    preload()
    listed = tomllib.loads((ROOT / "tests" / "mutants_equivalent.toml").read_text())["mutant"]
    equivalent = {(one["path"], one["function"], one["before"], one["after"]) for one in listed}

    def digests(folders: list[str], pattern: str) -> dict[str, str]:
        paths = sorted(path for folder in folders for path in (ROOT / folder).rglob(pattern))
        return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    sources, test_files = digests(options.sources, "*.py"), digests(options.tests, "test_*.py")
    functions = {path: functions_of(path) for path in test_files}
    every = [one for path in sources for one in mutants_of(path, (ROOT / path).read_bytes())]
    every = [m for m in every if (m.path, m.function, m.before.strip(), m.after.strip()) not in equivalent]
    sample = sample_of(every, options.seed, options.count)
    record, killed = read(RECORD), read(KILLED)
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.jobs, context, begin, (folder,)) as pool,  # its processes may have children
    ):
        new = [name for name in test_files if record.get(name, {}).get("digest") != test_files[name]]
        for done in as_completed([pool.submit(record_file, name) for name in new]):
            name, calls = done.result()
            print(f"recorded {name}", flush=True)
            record[name] = {"digest": test_files[name], "tests": calls}
            write(RECORD, record)
        tests = {nodeid: test for name in test_files for nodeid, test in record[name]["tests"].items()}

        def evidence(mutant: Mutant, test: str) -> list[str | None]:
            file, _, name = test.partition("::")
            return [test, functions.get(file, {}).get(name.partition("[")[0]), sources[mutant.path]]

        kept = [m for m in sample if (old := killed.get(repr(m))) and old == evidence(m, old[0])]
        if kept:
            print(f"{len(kept)} killed by an earlier run", flush=True)
        left = [m for m in sample if m not in kept]
        jobs = [
            (n, m, {t: tests[t]["seconds"] for t in chosen_tests(m, tests, options.seconds)})
            for n, m in enumerate(left, 1)
        ]
        kills = len(kept)
        for number, done in enumerate(as_completed([pool.submit(judge, job) for job in jobs]), len(kept) + 1):
            mutant, ran, test = done.result()
            if test:
                kills += 1
                killed[repr(mutant)] = evidence(mutant, test)
                write(KILLED, killed)
            else:
                killed.pop(repr(mutant), None)
                print(f"{mutant.path}:{mutant.first + 1} {mutant.function}: {ran} tests pass")
                print(f"- {mutant.before.strip()}\n+ {mutant.after.strip()}")
            print(f"{kills} of {number} killed", flush=True)
        killers = {repr(m): killed[repr(m)][0] for m in sample if repr(m) in killed}
        for failed in pool.submit(failing, sorted(set(killers.values()))).result():
            for mutant in [mutant for mutant, test in killers.items() if test == failed]:
                print(f"{failed} fails without the change too: {mutant}")
                del killed[mutant]
                kills -= 1
        write(KILLED, killed)
        print(f"{kills} of {len(sample)} killed: {kills / len(sample):.1%}")
    return int(kills < options.target * len(sample))


if __name__ == "__main__":
    sys.exit(main())
