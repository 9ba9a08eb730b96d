"""An episode that blocks the event loop of all others is named, and ended at its deadline from outside the loop."""

from __future__ import annotations
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
import pytest
from areal_lite.api import EpisodeStatus, InferenceEngine
from areal_lite.api.failure import FailureKind
from areal_lite.rollout import loop_watchdog
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.fork_server import IN_A_FORK
from tests.rollout import worker_episodes
from tests.rollout.scripted import OneTurn
from tests.stub_server import StubServer, StubThread


class Blocks(OneTurn):
    """Never returns to the event loop in rows with ``spin`` or ``sleep``, whatever is raised."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Block, or answer."""
        while data.get("spin"):
            try:
                time.sleep(0.01)  # noqa: ASYNC251
            except Exception:
                continue
        if "sleep" in data:
            time.sleep(data["sleep"])  # noqa: ASYNC251
        return await super().arun_episode(engine, data)


def test_a_blocking_episode_ends_at_its_deadline_and_the_others_finish(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(loop_watchdog, "BLOCKED_S", 0.2)
    engine = start_engine(start_stub(), faults={"episode_timeout_s": 1.5})
    began = time.monotonic()
    groups = engine.rollout_batch([{"spin": n == 7} for n in range(20)], Blocks)
    assert time.monotonic() - began < 10
    assert [n for n, group in enumerate(groups) if group.status is not EpisodeStatus.ACCEPTED] == [7]
    assert groups[7].failure is not None
    assert groups[7].failure.kind is FailureKind.DEADLINE
    assert "blocks the event loop of all episodes at" in caplog.text
    assert engine.rollout_batch([{}], Blocks)[0].status is EpisodeStatus.ACCEPTED


WAYS = ["coroutine", "callback", "timer", "done callback", "task nobody awaits", "task"]


@pytest.mark.parametrize(("way", "workers"), [*((way, 1) for way in WAYS), ("coroutine", 2), ("callback", 2)])
def test_whatever_code_of_an_episode_blocks_ends_that_episode_alone_with_its_kind(
    way: str, workers: int, start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine],
) -> None:  # fmt: skip
    engine = start_engine(start_stub(), faults={"episode_timeout_s": 2.0 * workers}, workers=workers)
    engine.rollout_batch([{}] * 4, worker_episodes.Blocks)  # the workers load it
    began = time.monotonic()
    group, other = engine.rollout_batch([{"way": way}, {}], worker_episodes.Blocks, group_size=2)
    assert time.monotonic() - began < 25
    first, second = group.trajectories
    assert (first.status, second.status, other.status) == ("failed", "accepted", "accepted")
    assert first.failure is not None
    assert (first.failure.kind, first.failure.type) == (FailureKind.DEADLINE, "DeadlineError")
    assert "worker_episodes.py" in first.failure.text  # the line that blocks
    assert engine.failures.metrics() == {"failed_episodes": 1.0, "failed_episodes/deadline": 1.0}
    assert engine.rollout_batch([{}], worker_episodes.Blocks)[0].status is EpisodeStatus.ACCEPTED


@pytest.mark.parametrize("way", ["coroutine", "callback"])
def test_an_episode_alone_in_its_group_fails_with_the_kind_of_its_error(
    way: str, start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    engine = start_engine(start_stub(), faults={"episode_timeout_s": 1.5})
    (group,) = engine.rollout_batch([{"way": way}], worker_episodes.Blocks)
    assert group.failure is not None and group.failure.kind is FailureKind.DEADLINE
    assert "blocked the event loop" in group.failure.message


def test_code_that_an_ended_episode_left_behind_does_not_block_the_others_for_ever(
    start_stub: Callable[..., StubThread], start_engine: Callable[..., RemoteInfEngine]
) -> None:
    engine = start_engine(start_stub(), faults={"episode_timeout_s": 2.0})
    (group,) = engine.rollout_batch([{"way": "after its end"}], worker_episodes.Blocks)
    assert group.status is EpisodeStatus.ACCEPTED
    time.sleep(0.4)  # it blocks now
    began = time.monotonic()
    assert engine.rollout_batch([{}], worker_episodes.Blocks)[0].status is EpisodeStatus.ACCEPTED
    assert time.monotonic() - began < 15


PROGRAM = """
from areal_lite.api import InferenceEngineConfig
from areal_lite.rollout import loop_watchdog
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.test_loop_watchdog import Blocks

loop_watchdog.BLOCKED_S = loop_watchdog.EXIT_AFTER_S = 0.2
config = InferenceEngineConfig(backend="sglang", addresses=["ADDRESS"], faults={"episode_timeout_s": 0.5})
with RemoteInfEngine(config) as engine:
    engine.rollout_batch([{"sleep": 100}], Blocks)
"""


def test_a_call_into_c_that_outlives_its_deadline_ends_the_process() -> None:
    with StubThread(StubServer()) as stub:
        ended = subprocess.run(
            [sys.executable, "-c", IN_A_FORK + PROGRAM.replace("ADDRESS", stub.address)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 70, ended.stderr
    assert "cannot be interrupted" in ended.stderr
    assert "test_loop_watchdog.py:" in ended.stderr
