"""The HTTP library that clients for agents are made of."""

from __future__ import annotations
import importlib.metadata
import sys
import types
import openai
import pytest
from areal_lite.api.shared_resources import sdk_httpx


def test_the_library_is_that_of_the_installed_sdk() -> None:
    assert isinstance(openai.AsyncOpenAI(api_key="x")._client, sdk_httpx().AsyncClient)


@pytest.mark.parametrize(("version", "name"), [("2.9.0", "httpx"), ("3.0.1", "httpx2"), ("10.0", "httpx2")])
def test_the_library_changed_after_version_2(version: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"openai": version}.__getitem__)
    monkeypatch.setitem(sys.modules, name, library := types.ModuleType(name))
    assert sdk_httpx() is library
