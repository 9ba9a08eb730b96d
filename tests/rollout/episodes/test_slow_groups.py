"""A slow episode is trained like any other, and a failed one says whose fault it was."""

from __future__ import annotations
import asyncio
import threading
from collections.abc import Callable
from typing import Any
import torch
from areal_lite.api import FailureKind, InferenceEngine, RolloutWorkflow
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.rollout.scripted import OneTurn
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


class SlowAtFirst(RolloutWorkflow):
    """Row 0 waits for ``released`` between its model call and its end."""

    def __init__(self) -> None:
        self.released = threading.Event()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        tensors = await OneTurn().arun_episode(engine, data)
        if data["n"] == 0:
            await asyncio.to_thread(self.released.wait)
        return tensors


def test_a_batch_waits_for_a_slow_group_that_would_be_too_old_for_the_next(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, max_head_offpolicyness=1)
    workflow, rows = SlowAtFirst(), iter([{"n": n} for n in range(40)])
    first = engine.prepare_batch(rows, workflow)
    assert 0 not in {group.data["n"] for group in first}
    engine.update_weights_from_disk("ckpt", 1)
    threading.Timer(0.2, workflow.released.set).start()
    second = engine.prepare_batch(rows, workflow)
    assert second[0].data["n"] == 0  # the oldest comes first
    assert second[0].head_version == 0
    assert engine.export_stats()["rejected"] == 0
    assert engine.rollout_metrics()["discarded_tokens"] == 0


def test_a_failure_has_a_kind(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=2, faults={"episode_timeout_s": 2.0})
    rows = [{"do": "raise"}, {"do": "bad"}, {"do": "hang"}, {"do": "ok"}]
    *failed, finished = engine.rollout_batch(rows, OneTurn)
    failures = [group.failure for group in failed]
    assert [failure and failure.kind for failure in failures] == [
        FailureKind.AGENT,
        FailureKind.OUTPUT,
        FailureKind.DEADLINE,
    ]
    assert failures[0] is not None and (failures[0].type, failures[0].message) == (
        "KeyError",
        "'broken agent'",
    )
    assert finished.failure is None
