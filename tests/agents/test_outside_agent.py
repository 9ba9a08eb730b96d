"""Whose key takes sessions of a run that trains on programs outside."""

from __future__ import annotations
import asyncio
import json
from datetime import date
from typing import Any
import numpy as np
import pytest
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.outside_agent import KEY, SessionDesk


@pytest.mark.parametrize("key", ["", "guess", "ключ", "al_\udcff\udcfe", "\ud800"])
def test_a_key_of_any_characters_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    desk = SessionDesk(AgentService())
    reply = asyncio.run(desk.handle("POST", "/rl/start_session", {"authorization": f"Bearer {key}"}, b""))
    assert reply.status == 401


def test_a_row_of_any_numbers_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    row = {"large": 2**70, "ids": np.arange(2), 3: "key", "when": date(2026, 1, 2)}

    async def run() -> Any:
        desk = SessionDesk(AgentService())
        waits = asyncio.create_task(desk.reward_of({"api_key": "k", "row": row}))
        reply = await desk.handle("POST", "/rl/start_session", {"authorization": "Bearer secret"}, b"{}")
        waits.cancel()
        return json.loads(reply.body)["row"]

    assert asyncio.run(run()) == {"large": 2**70, "ids": [0, 1], "3": "key", "when": "2026-01-02"}
