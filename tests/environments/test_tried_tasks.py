"""Every task of the installed libraries is reset and steps once; the names are the table of docs/environments.md.

``make test-environments`` runs it, and UPDATE_TABLE=1 writes the table.
"""

from __future__ import annotations
import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
import socket
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
import pytest
from areal_lite.environments import Step, WrongAction
from areal_lite.environments.catalog import environment_maker, rows
from areal_lite.environments.environment import Observation
from areal_lite.environments.random_state import OwnRandom

pytestmark = [pytest.mark.environments, pytest.mark.timeout(1800)]
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
SECONDS = 30
AT_LEAST = {"gymnasium": 180, "reasoning-gym": 100, "textarena": 65, "scienceworld": 30, "skyrl-gym": 2}
ROW = {
    "prompt": "1+2?",
    "reward_spec": {"ground_truth": "3"},
    "reward_model": {"ground_truth": "3"},
    "extra_info": {"max_turns": 2},
}


def names(prefix: str) -> list[str]:
    if prefix == "gymnasium":
        registry = importlib.import_module("gymnasium").registry
        importlib.import_module("minigrid")
        return [name for name in registry if not name.startswith(("GymV21", "GymV26"))]
    if prefix == "textarena":
        registry = importlib.import_module("textarena").envs.registration.ENV_REGISTRY
        return [name for name in registry if not name.endswith(("-raw", "-train"))]
    if prefix == "scienceworld":
        return list(importlib.import_module("scienceworld.constants").ID2TASK.values())
    if prefix == "skyrl-gym":
        return list(importlib.import_module("skyrl_gym").envs.registration.registry)
    return list(importlib.import_module("reasoning_gym.factory").DATASETS)


async def one_step(env: str) -> int:
    """Play one step and return the number of seats."""
    row = dict(ROW) if env.startswith("skyrl-gym:") else rows(env, {"size": 1, "seed": 3})[0]
    own = OwnRandom(3)
    with own.in_place():
        environment: Any = environment_maker(env, {})()
    try:
        seen = await own.run(environment.reset(row, 3))
        assert seen.messages if isinstance(seen, Observation) else seen, "the first observation is empty"
        action = str(environment.solution(row)) if hasattr(environment, "solution") else "[0]"
        if env.startswith("gymnasium:"):
            sample = environment._game.action_space.sample()
            action = json.dumps(sample.tolist())
        with contextlib.suppress(WrongAction):
            step = await own.run(environment.step(action))
            assert isinstance(step, Step)
    finally:
        await own.run(environment.close())
    return int(getattr(environment, "players", 1))


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer in {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def reason(error: BaseException) -> str:
    """Return one line on why a task cannot run here."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip(" *")), "")
    if resource := re.search(r"Resource '?(\w+)'? not found", re.sub(r"\x1b\[[\d;]*m", "", str(error))):
        return f"NLTK's {resource.group(1)}, a download"
    if isinstance(error, FileNotFoundError):
        return "a file that its package lacks"
    if isinstance(error, SyntaxError):
        return "a newer Python"
    return f"{type(error).__name__}: {re.split(r'[,(]|[.] ', text)[0][:100].strip()}".replace("|", "/")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_here(function: Any) -> Any:
        def call(*arguments: Any, **kwargs: Any) -> Any:
            if not any("127.0.0.1" in (each, *(each if isinstance(each, tuple) else ())) for each in arguments):
                raise OSError("a download, or an address that answers")
            return function(*arguments, **kwargs)

        return call

    monkeypatch.setattr(socket.socket, "connect", only_here(socket.socket.connect))
    monkeypatch.setattr(socket, "getaddrinfo", only_here(socket.getaddrinfo))


@pytest.mark.parametrize("prefix", AT_LEAST)
def test_tasks_are_reset_and_step(prefix: str, offline: None) -> None:
    pytest.importorskip(prefix.replace("-", "_"))
    tried: dict[int, list[str]] = defaultdict(list)
    left: dict[str, list[str]] = defaultdict(list)
    for name in names(prefix):
        try:
            with limit(SECONDS):
                tried[asyncio.run(one_step(f"{prefix}:{name}"))].append(name)
        except Exception as error:
            left[reason(error)].append(name)
    for why, those in left.items():
        print(f"{prefix}: {why}: {', '.join(those)}")
    assert sum(map(len, tried.values())) >= AT_LEAST[prefix]
    if os.environ.get("UPDATE_TABLE"):
        write(prefix, tried, left)


def write(prefix: str, tried: dict[int, list[str]], left: dict[str, list[str]]) -> None:
    lines = ["| seats | tasks | names |", "|---|---|---|"]
    lines += [f"| {seats} | {len(those)} | {listed(those)} |" for seats, those in sorted(tried.items())]
    if left:
        lines += ["", "| not run here | tasks | names |", "|---|---|---|"]
        lines += [f"| {why} | {len(those)} | {listed(those)} |" for why, those in sorted(left.items())]
    begin, end = f"<!-- {prefix} -->", f"<!-- end of {prefix} -->"
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")


def listed(those: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(those))
