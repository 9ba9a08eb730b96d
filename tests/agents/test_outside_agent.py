"""Whose key takes sessions of a run that trains on programs outside."""

from __future__ import annotations
import asyncio
import pytest
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.outside_agent import KEY, SessionDesk


@pytest.mark.parametrize("key", ["", "guess", "ключ", "al_\udcff\udcfe", "\ud800"])
def test_a_key_of_any_characters_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    desk = SessionDesk(AgentService())
    reply = asyncio.run(desk.handle("POST", "/rl/start_session", {"authorization": f"Bearer {key}"}, b""))
    assert reply.status == 401
