"""Misses are counted by kind, and a data source whose code fails ends its feed with its own error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from areal_lite.api.failure import Failure, FailureKind
from areal_lite.api.trajectory import EpisodeStatus, Group
from areal_lite.data.source.rollout_data_source import RolloutDataSource
from areal_lite.infra.remote_inf_engine import RemoteInfEngine
from areal_lite.infra.row_feed import drop_reason
from tests.infra.scripted import OneTurn
from tests.stub_server import StubThread

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


class Lost(Exception):
    """Raised by an agent."""


async def raise_in_tasks() -> None:
    """Fail as an agent with a task group does."""

    async def fail() -> None:
        raise Lost("id 7")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fail())


def raise_with(message: str) -> None:
    raise Lost(message)


def raise_from_another() -> None:
    try:
        raise_with("id 7")
    except Lost as error:
        raise KeyError("id 8") from error


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (lambda: raise_with("id 7"), "Lost"),
        (lambda: raise_with("id 7:\n  of: a\nlong: b"), "Lost"),
        (lambda: raise_with(""), "Lost"),
        (raise_from_another, "KeyError"),
        (lambda: asyncio.run(raise_in_tasks()), "Lost"),
        (lambda: raise_with("id 7 " * 2000), "Lost"),
    ],
)
def test_failures_are_counted_by_the_type_of_their_exception_whatever_it_says(
    fail: Callable[[], None], kind: str
) -> None:
    with pytest.raises(Exception) as caught:
        fail()
    assert drop_reason(ended("failed", failure=Failure.of(caught.value))) == f"failed: {kind}"


def test_failures_without_an_exception_are_counted_by_kind_and_rejections_by_reason() -> None:
    late = Failure(FailureKind.DEADLINE, "", "the episode ran longer than episode_timeout_s=1")
    assert drop_reason(ended("failed", failure=late)) == "failed: deadline"
    assert drop_reason(ended("rejected", rejection="should_accept_fn said no: too short")).endswith(
        "no: too short"
    )


def ended(status: str, *, failure: Failure | None = None, rejection: str | None = None) -> Group:
    return Group(
        task_id=1, group_id="1", status=EpisodeStatus(status), data={}, failure=failure, rejection=rejection
    )


class Broken(RolloutDataSource):
    """Takes no group back."""

    def give_back(self, groups: Any) -> None:
        """Fail."""
        raise OSError("no place")

    def drop(self, group: Group, reason: str) -> None:
        """Fail."""
        raise SystemExit("no drop")


@pytest.mark.parametrize(("retries", "message"), [(1, "no place"), (0, "no drop")])
def test_a_source_that_fails_as_a_group_ends_gives_its_error_to_who_waits(
    start_stub: StartStub, start_engine: StartEngine, retries: int, message: str
) -> None:
    engine = start_engine(start_stub(), consumer_batch_size=1, failed_group_retries=retries)
    source = Broken([{"do": "raise"}])
    with pytest.raises((OSError, RuntimeError), match=message):
        engine.prepare_batch(source, OneTurn)
    assert source.num_owed == 1  # and a restart hands it out again
    assert len(engine.prepare_batch([{}], OneTurn)) == 1
