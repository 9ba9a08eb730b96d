"""Resources that episodes share, and the HTTP library that clients for agents are made of."""

from __future__ import annotations
import asyncio
import importlib.metadata
import sys
import types
from contextvars import ContextVar
import openai
import pytest
from areal_lite.api.shared_resources import SharedResources, sdk_httpx


def test_the_library_is_that_of_the_installed_sdk() -> None:
    assert isinstance(openai.AsyncOpenAI(api_key="x")._client, sdk_httpx().AsyncClient)


@pytest.mark.parametrize(("version", "name"), [("2.9.0", "httpx"), ("3.0.1", "httpx2"), ("10.0", "httpx2")])
def test_the_library_changed_after_version_2(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"openai": version}.__getitem__)
    monkeypatch.setitem(sys.modules, name, library := types.ModuleType(name))
    assert sdk_httpx() is library


def test_a_resource_is_not_made_in_the_first_callers_context() -> None:
    """A listener that kept it would take its episode for that of every later request."""
    name = ContextVar("name", default="")

    async def run() -> str:
        name.set("the first episode")

        async def make() -> str:
            return name.get()

        return await SharedResources().get("listener", make)

    assert asyncio.run(run()) == ""
